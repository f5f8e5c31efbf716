"""TRL's configuration objects as settings: what `tinyrl.from_trl` takes. TRL is not needed; fields are read by name.

Fields are converted as the names of a line that is typed (line_to_copy.py). Those that decide what is learnt are taken
with TRL's defaults where they were not given, and so is full fine-tuning without a peft_config; a field without a
counterpart is named only if it was given.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tinyrl.config.aliases import ALIASES
from tinyrl.config.foreign_names import answer_of, setting_named
from tinyrl.config.foreign_values import Copy, ForeignNames
from tinyrl.config.line_to_copy import copy_of, line_of, remarks
from tinyrl.config.methods import or_list
from tinyrl.config.yaml_reader import parse_plain

METHOD_OF = {"GRPOConfig": "grpo", "PPOConfig": "ppo", "SFTConfig": "sft", "DPOConfig": "dpo", "RewardConfig": "reward"}
OF_PEFT = ("r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters")  # taken with PEFT's defaults
SAID_ELSEWHERE = ("reward_weights", "output_dir", "run_name")  # by arguments of from_trl and of train
RENAMED = {"activation_checkpointing": "gradient_checkpointing"}  # by transformers, when it makes the object
DECIDING = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "max_grad_norm",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_generations",
    "num_iterations",
    "num_mini_batches",
    "num_ppo_epochs",
    "max_completion_length",
    "response_length",
    "temperature",
    "beta",
    "kl_coef",
    "epsilon",
    "loss_type",
    "scale_rewards",
    "max_steps",
    "num_train_epochs",
)  # fields that are taken with TRL's own defaults


@dataclass(frozen=True)
class Taken:
    """Settings that stand for a configuration object. notes: what was counted, added and is not needed; refused: by the
    name of a field, why it cannot be taken.
    """

    method: str
    settings: dict[str, Any]
    notes: list[str]
    refused: dict[str, str]


def method_of(config: object) -> str:
    """Return the method that a configuration object of TRL is for. Raises ValueError for other objects."""
    name = next((kind.__name__ for kind in type(config).__mro__ if kind.__name__ in METHOD_OF), None)
    if name is None:
        raise ValueError(f"from_trl takes a {or_list([*METHOD_OF])}, not a {type(config).__name__}")
    return METHOD_OF[name]


def given_fields(config: object) -> dict[str, Any]:
    """Return the fields of a configuration object that differ from those of one without arguments."""
    if not dataclasses.is_dataclass(config):
        raise ValueError(f"from_trl takes configuration objects, not a {type(config).__name__}")
    kind: Any = type(config)
    fields = dataclasses.fields(config)
    try:
        plain = kind()
    except (ValueError, TypeError):  # its default dtype needs a GPU
        plain = kind(bf16=False)
    names = [each.name for each in fields]
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(plain, name)}


def given_names(config: object) -> dict[str, Any]:
    """Return the fields that were given to a configuration of TRL, by the names that a person would type."""
    given = {RENAMED.get(name, name): value for name, value in given_fields(config).items()}
    loaded_with = given.get("model_init_kwargs")
    if isinstance(loaded_with, dict) and {*loaded_with} <= {"dtype", "torch_dtype"}:
        given["torch_dtype"] = next(iter(loaded_with.values()))
        del given["model_init_kwargs"]
    return {name: plain(value) for name, value in given.items() if name not in SAID_ELSEWHERE}


def plain(value: Any) -> Any:
    """Return a value as a person would type it: of an enumeration its text, of a list of one that one."""
    value = getattr(value, "value", value)
    if isinstance(value, set):
        return sorted(value)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def of_adapter(peft_config: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of PEFT's configuration of an adapter that are taken, and the others that were given."""
    taken = {name: getattr(peft_config, name, None) for name in OF_PEFT}
    if taken["target_parameters"]:
        taken["target_parameters"] = sorted(taken["target_parameters"])
    others = {name: value for name, value in given_fields(peft_config).items() if name not in OF_PEFT}
    return {name: plain_modules(value) for name, value in taken.items() if value is not None}, others


def plain_modules(value: Any) -> Any:
    """Return the names of modules in an order that does not change with the process."""
    return sorted(value) if isinstance(value, set) else value


def settings_of(
    config: object,
    peft_config: object | None,
    *,
    model: str | None = None,
    others: Mapping[str, Any] | None = None,
) -> Taken:
    """Return the settings that TRL's configuration, and PEFT's of the adapter (None: no adapter), stand for. others:
    further arguments of the trainer, by name.
    """
    method = method_of(config)
    typed = given_names(config) | dict(others or {})
    values = {name: plain(getattr(config, name)) for name in DECIDING if getattr(config, name, None) is not None}
    values |= typed
    if peft_config is not None:
        adapter, given_too = of_adapter(peft_config)
        values |= adapter | given_too
        typed |= adapter | given_too
    trains_all = peft_config is None and method != "reward"
    beside: dict[str, Any] = {"method": method, "model": {"path": model} if model else {}}
    if trains_all:
        beside["lora"] = {"enabled": False}
    given = ForeignNames(method, values, frozenset({"lora.enabled"} if trains_all else ()))
    copies = dict[str, Copy]()
    notes = list[str]()
    refused = dict[str, str]()
    for name, value in values.items():
        if setting_named(name, method):
            copies[name] = copy_of(name, value, given)
            continue
        if name not in typed:
            continue  # a default of TRL's, of a matter that this method does not have
        if name not in ALIASES:
            refused[name] = f"`{name}` is not known here"
            continue
        answer = answer_of(name, method)
        in_words = answer.in_words(name, name, method)
        if answer.ours.is_needless:
            notes.append(in_words)
        else:
            refused[name] = in_words
    line = line_of(copies, given, beside)
    for name, why in line.without.items():
        if name in line.needless and name in typed:
            notes.append(f"`{name}` is not needed: {why}")
        elif name in typed:
            refused[name] = f"`{name}` is not taken: {why}"
    settings = settings_in(line.words.values())
    if trains_all:
        settings["lora.enabled"] = False
        notes.append("without a peft_config TRL trains the whole model: lora.enabled=false")
    return Taken(method=method, settings=settings, notes=[*notes, *remarks(copies, given)], refused=refused)


def settings_in(words: Iterable[str]) -> dict[str, Any]:
    """Return the settings of words of the command line, but for options."""
    found = dict[str, Any]()
    for word in words:
        if not word.startswith("--"):
            key, _, text = shlex.split(word)[0].partition("=")
            found[key] = parse_plain(text, key)
    return found
