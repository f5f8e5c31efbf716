"""Error sentences for invalid settings: the place, the value, what is allowed, what was probably meant."""

from __future__ import annotations

import json
import re
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS
from tinyrl.config.schema import Config
from tinyrl.config.yaml_reader import KeyPath, Source
from tinyrl.text import did_you_mean, shortened

MOST_SENTENCES = 3

# Names people know from TRL, verl and PEFT, and the settings they correspond to here.
FAMILIAR = {
    "num_generations": "grpo.group_size", "rollout_n": "grpo.group_size",
    "n_samples_per_prompt": "grpo.group_size", "beta": "grpo.kl_coef", "kl_loss_coef": "grpo.kl_coef",
    "init_kl_coef": "ppo.kl_coef", "kl_penalty": "ppo.kl_estimator", "epsilon": "grpo.clip_eps",
    "epsilon_high": "grpo.clip_eps_high", "clip_ratio": "grpo.clip_eps", "delta": "grpo.dual_clip",
    "clip_ratio_high": "grpo.clip_eps_high", "cliprange": "ppo.clip_eps",
    "cliprange_value": "ppo.value_clip_eps", "vf_coef": "ppo.value_coef", "lam": "ppo.gae_lambda",
    "num_ppo_epochs": "ppo.num_epochs", "ppo_epochs": "ppo.num_epochs",
    "ppo_mini_batch_size": "ppo.minibatch_size", "target": "ppo.target_kl", "horizon": "ppo.kl_horizon",
    "num_iterations": "grpo.num_epochs", "loss_type": "grpo.preset",
    "importance_sampling_level": "grpo.ratio_level", "scale_rewards": "grpo.advantage_scale",
    "max_completion_length": "generation.max_new_tokens", "response_length": "generation.max_new_tokens",
    "max_response_length": "generation.max_new_tokens", "max_tokens": "generation.max_new_tokens",
    "max_prompt_length": "generation.max_prompt_tokens", "stop_strings": "generation.stop",
    "lr": "optim.learning_rate", "warmup_ratio": "optim.warmup_steps", "lr_scheduler_type": "optim.schedule",
    "adam_epsilon": "optim.adam_eps", "max_steps": "run.num_steps", "total_episodes": "run.num_steps",
    "num_train_epochs": "run.num_steps", "save_steps": "run.save_every", "eval_steps": "run.eval_every",
    "save_total_limit": "run.keep_checkpoints", "report_to": "run.trackers",
    "per_device_train_batch_size": "run.micro_batch_tokens",
    "gradient_accumulation_steps": "run.micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "run.micro_batch_tokens", "lora_alpha": "lora.alpha", "lora_r": "lora.r",
    "lora_rank": "lora.r", "lora_dropout": "lora.dropout", "lora_target_modules": "lora.target_modules",
    "model_name_or_path": "model.path", "attn_implementation": "model.attention", "torch_dtype": "model.dtype",
    "load_in_4bit": "model.quantization", "dataset_name": "task.data", "train_files": "task.data",
    "val_files": "task.eval_data", "reward_funcs": "reward.functions", "reward_weights": "reward.functions",
    "reward_model_path": "reward.model", "missing_eos_penalty": "reward.truncated_penalty",
    "mask_truncated_completions": "reward.truncated", "temperature": "generation.temperature",
    "top_p": "generation.top_p", "top_k": "generation.top_k", "seed": "run.seed", "output_dir": "--output-dir",
}  # fmt: skip


def dotted(path: KeyPath) -> str:
    """A path as people write it: reward.functions[0].use."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return shortened("".join(parts).removeprefix("."))


def explain(error: ValidationError, source: Source) -> str:
    """The first problems pydantic found, a sentence each; a setting is named once."""
    found: dict[KeyPath, str] = {}
    for problem in error.errors(include_url=False):
        path, sentence = _sentence(problem, source)
        found.setdefault(path, sentence)
    shown = list(found.values())[:MOST_SENTENCES]
    more = len(found) - len(shown)
    return "\n".join(shown + ([f"(and {more} more)"] if more else []))


def check_familiar(source: Source) -> None:
    """ValueError for a setting that has another name elsewhere: `beta` is `grpo.kl_coef` here."""
    values, method = source.values, source.values.get("method")
    used = {name: section for name, section in values.items() if name not in _unused(method)}
    inner = [(name, key) for name, section in used.items() if isinstance(section, dict) for key in section]
    for path in [*((key,) for key in used), *inner]:
        *section, key = path
        known = fields_of(_kind_at((*section,)))
        if known and key not in known and isinstance(key, str) and key in FAMILIAR:
            name = _for_method(FAMILIAR[key], method)
            raise ValueError(f"{source.place(path)}: `{dotted(path)}` is not a setting: `{key}` is `{name}` here")


def _unused(method: Any) -> set[str]:
    """Sections that a method does not look at."""
    return {*OPTIONAL_SECTIONS} - {*METHODS[method].sections} if method in METHODS else set()


def _for_method(name: str, method: Any) -> str:
    """The same setting in the method's own section: `grpo.kl_coef` is `ppo.kl_coef` under PPO."""
    section, _, key = name.partition(".")
    if section in ("grpo", "ppo") and method in ("grpo", "ppo") and key in fields_of(_kind_at((method,))):
        return f"{method}.{key}"
    return name


def _sentence(problem: Any, source: Source) -> tuple[KeyPath, str]:
    """The setting a pydantic problem is about, and its sentence: place, `key`, value, what is allowed, did you mean."""
    if problem["type"] == "value_error":
        sentence = str(problem["ctx"]["error"])
        named = re.search(r"\b([a-z_]+)\.([a-z_]+)", sentence)
        where = source.place(named.groups() if named else ())
        return (sentence,), sentence if where.startswith("override") else f"{where}: {sentence}"
    path, kind = _walk(problem["loc"])
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        unknown = (*path, str(problem["loc"][len(path)]))
        meant = _meant(path, unknown[-1], method=source.values.get("method"))
        return unknown, f"{source.place(unknown)}: unknown key `{dotted(unknown)}`.{meant}"
    where, name = source.place(path), dotted(path)
    if problem["type"] == "missing":
        return path, f"{where}: `{name}` is missing; it must be {allowed(kind)}"
    value = source.value(path)
    hint = did_you_mean(value, [str(literal) for literal in _literals(kind)]) if isinstance(value, str) else ""
    if value in ("", []):
        hint = " It is empty."
    elif isinstance(value, bool | int | float) and any(_bare(option) is str for option in _options(kind)):
        hint = " Put it in quotes."
    return path, f"{where}: `{name}` is {_shown(value)}; it must be {allowed(kind)}.{hint}"


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | None) else shortened(repr(value))


def _meant(path: KeyPath, key: str | int, *, method: Any) -> str:
    """What an unknown key was probably meant to be; the keys of its section where there is no guess."""
    known = list(fields_of(_kind_at(path)))
    key = str(key)
    homes = (
        name for name in Config.model_fields if name not in _unused(method) and key in fields_of(_kind_at((name,)))
    )
    home = next(homes, None)
    if home:
        return f" Did you mean `{home}.{key}`?"
    near = did_you_mean(key, known)
    if near:
        return near.replace("`", f"`{dotted(path)}.", 1) if path else near
    return f" `{dotted(path)}` has: {', '.join(known)}" if path else f" Sections: {', '.join(known)}"


@cache
def fields_of(kind: Any) -> dict[str, Any]:
    """The fields of a section and what each allows; {} for what is not a section."""
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return {}
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.model_fields}


def section_class(name: str) -> Any:
    """The class of a section of `Config`; None where there is no section of that name."""
    return _kind_at((name,))


def _walk(loc: KeyPath) -> tuple[KeyPath, Any]:
    """The part of an error's location that names a setting, and what that setting allows.

    Inside a union pydantic adds the alternatives it tried to the location; those are not part of the setting.
    """
    path: list[str | int] = []
    kind: Any = Config
    for part in loc:
        inner = _inside(kind, part)
        if inner is None:
            break
        path.append(part)
        kind = inner
    return tuple(path), kind


def _kind_at(path: KeyPath) -> Any:
    """What the setting at `path` may be, or None. An optional section gives the section itself."""
    walked, kind = _walk(path)
    return _bare(kind) if walked == path else None


def _inside(kind: Any, part: str | int) -> Any:
    kind = _bare(kind)
    if get_origin(kind) is list and isinstance(part, int):
        return get_args(kind)[0]
    if get_origin(kind) is dict and part != "[key]":
        return get_args(kind)[1]
    return fields_of(kind).get(str(part))


def _bare(kind: Any) -> Any:
    """A type without its constraints and without None."""
    if get_origin(kind) is Annotated:
        return _bare(get_args(kind)[0])
    options = [option for option in _options(kind) if option is not NoneType]
    return _bare(options[0]) if len(options) == 1 and options[0] is not kind else kind


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _literals(kind: Any) -> list[Any]:
    return [value for option in _options(kind) if get_origin(option) is Literal for value in get_args(option)]


def allowed(kind: Any) -> str:
    """What a setting may be, in words: "auto or a whole number of at least 1"."""
    if fields_of(_bare(kind)):
        return f"a section ({', '.join(list(fields_of(_bare(kind)))[:4])}, ...)"
    words = [word for option in _options(kind) for word in _words(option)]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _words(kind: Any) -> list[str]:
    limits = ""
    if get_origin(kind) is Annotated:
        kind, *rules = get_args(kind)
        limits = " and ".join(filter(None, (_limit(rule) for each in rules for rule in _rules(each))))
        limits = f" {limits}" if limits else ""
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if get_origin(kind) is dict:
        return ["a mapping of text to text, {new: old}"]
    if get_origin(kind) is list:
        inner = get_args(kind)[0]
        return [f"a list of {{{', '.join(fields_of(inner))}}}" if fields_of(inner) else f"a list of {allowed(inner)}"]
    if kind is bool:
        return ["true", "false"]
    return [{NoneType: "null", str: "text", int: "a whole number", float: "a number"}[kind] + limits]


def _rules(rule: Any) -> list[Any]:
    return list(rule.metadata) if isinstance(rule, FieldInfo) else [rule]


def _limit(rule: Any) -> str:
    words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    return next((f"{text} {getattr(rule, name)}" for name, text in words.items() if hasattr(rule, name)), "")
