"""TRL's configuration objects as settings: what `tinyrl.from_trl` takes. TRL is not needed; fields are read by name.

Fields are converted as the names of a line that is typed (foreign_names.py). Those that decide what is learnt are taken
with TRL's defaults where they were not given, and so is full fine-tuning without a peft_config; a field without a
counterpart is named only if it was given.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinyrl.config.aliases import ALIASES
from tinyrl.config.foreign_names import answer_of, copy_of, copy_of_own, home_of, remarks
from tinyrl.config.foreign_values import Copy, ForeignNames
from tinyrl.config.methods import or_list
from tinyrl.config.yaml_reader import parse_plain

METHOD_OF = {"GRPOConfig": "grpo", "PPOConfig": "ppo", "SFTConfig": "sft", "DPOConfig": "dpo", "RewardConfig": "reward"}
OF_PEFT = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
}
SAID_ELSEWHERE = ("reward_weights", "output_dir", "run_name")  # by arguments of from_trl and of train
RENAMED = {"activation_checkpointing": "gradient_checkpointing"}  # by transformers, when it makes the object
# Fields that change nothing here, or that transformers derives from others.
WITHOUT_EFFECT = (
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_prefetch_factor",
    "disable_tqdm",
    "do_eval",
    "eval_on_start",
    "logging_first_step",
    "logging_strategy",
    "num_completions_to_print",
    "save_only_model",
    "use_cpu",
)
DECIDING = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_generations",
    "num_iterations",
    "max_completion_length",
    "temperature",
    "beta",
    "epsilon",
    "loss_type",
    "scale_rewards",
    "max_steps",
    "num_train_epochs",
)  # fields that are taken with TRL's own defaults
ABOUT_PEFT = ("base_model_name_or_path", "inference_mode", "peft_version", "task_type")  # change no run


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


def fields_of(config: object) -> dict[str, Any]:
    """Return the fields of TRL's configuration that are converted: those that were given, and DECIDING."""
    values = {name: plain(getattr(config, name)) for name in DECIDING if getattr(config, name, None) is not None}
    left_out = (*SAID_ELSEWHERE, *WITHOUT_EFFECT)
    given = {RENAMED.get(name, name): value for name, value in given_fields(config).items() if name not in left_out}
    values |= {name: plain(value) for name, value in given.items()}
    if values.get("eval_strategy") == "steps":
        del values["eval_strategy"]  # every eval_steps
    loaded_with = values.get("model_init_kwargs")
    if isinstance(loaded_with, dict) and {*loaded_with} <= {"dtype", "torch_dtype"}:
        values["torch_dtype"] = next(iter(loaded_with.values()))
        del values["model_init_kwargs"]
    if "epsilon" in values:
        values.setdefault("epsilon_high", values["epsilon"])  # as TRL has it where it is not given
    values.pop("num_train_epochs" if values.get("max_steps", -1) > 0 else "max_steps", None)
    return values


def plain(value: Any) -> Any:
    """Return a value as a person would type it: of an enumeration its text, of a list of one that one."""
    value = getattr(value, "value", value)
    if isinstance(value, set):
        return sorted(value)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def settings_of(config: object, peft_config: object | None) -> Taken:
    """Return the settings that TRL's configuration, and PEFT's of the adapter (None: no adapter), stand for."""
    method = method_of(config)
    values = fields_of(config)
    refused = dict[str, str]()
    notes = list[str]()
    if peft_config is not None:
        values |= {name: plain(getattr(peft_config, field)) for field, name in OF_PEFT.items()}
        if parameters := getattr(peft_config, "target_parameters", None):
            values["lora_target_parameters"] = sorted(parameters)
        if values.get("lora_target_modules") is None:
            values.pop("lora_target_modules", None)
            notes.append("without target_modules PEFT adapts q_proj and v_proj of most models, this all linear layers")
        unknown = {*given_fields(peft_config)} - {*OF_PEFT, "target_parameters", *ABOUT_PEFT}
        reason = "`{}` of peft_config cannot be set: an adapter is LoRA on weights alone here"
        refused |= {name: reason.format(name) for name in sorted(unknown)}
    given_names = {*given_fields(config)}
    if needless := sorted(given_names & {*WITHOUT_EFFECT}):
        notes.append(f"without effect here: {', '.join(needless)}")
    dropout = values.get("lora_dropout")
    if dropout and method in ("grpo", "ppo"):
        refused["lora_dropout"] = f"`lora_dropout` is not taken: {method} needs lora.dropout=0, not {dropout}"
        del values["lora_dropout"]
    typed = {*(RENAMED.get(name, name) for name in given_names), "torch_dtype", *OF_PEFT.values()}
    given = ForeignNames(method, values)
    copies = dict[str, Copy]()
    for name, value in values.items():
        answer = answer_of(name, method) if name in ALIASES else None
        home = home_of(name, method)
        if answer is not None and answer.setting:
            copies[name] = copy_of(name, answer.setting, value, given)
        elif answer is None and home is not None:
            copies[name] = copy_of_own(name, home, value, given)
        elif name not in typed:
            continue  # a default of TRL's, of a matter that this method does not have
        elif answer is not None and answer.ours.is_needless:
            notes.append(answer.in_words(name, name, method))
        elif answer is not None:
            refused[name] = answer.in_words(name, name, method)
        else:
            refused[name] = f"`{name}` is not known here"
    refused |= {name: f"`{name}` is not taken: {copy.without}" for name, copy in copies.items() if copy.without}
    notes += remarks(copies, given)
    settings = settings_in(copies)
    if peft_config is None and method != "reward":
        settings["lora.enabled"] = False
        notes.append("without a peft_config TRL trains the whole model: lora.enabled=false")
    return Taken(method=method, settings=settings, notes=notes, refused=refused)


def settings_in(copies: Mapping[str, Copy]) -> dict[str, Any]:
    """Return the settings of the lines to copy; a value says more than a switch of the same setting."""
    found = dict[str, Any]()
    for copy in sorted(copies.values(), key=lambda each: not each.is_switch):
        for word in shlex.split(copy.line):
            if word.startswith("--"):  # an option of the command
                continue
            key, _, text = word.partition("=")
            found[key] = parse_plain(text, key)
    return found
