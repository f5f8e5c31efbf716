"""Settings that depend on what is on disk: absolute paths, so that a run can be resumed from any folder; runs named as
models, replaced by their newest checkpoints that verify; defaults that fit the model.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

from tinyrl.config.recipe import build_config
from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.runs.checkpoint import checkpoint_of
from tinyrl.runs.run_dir import named_run, open_run

MODEL_FIELDS = (("model", "path"), ("model", "adapter"), ("critic", "path"), ("teacher", "path"), ("reward", "model"))
DATA_FIELDS = (("task", "data"), ("task", "eval_data"), ("environment", "corpus"), ("ppo", "ptx_data"))


def resolve(config: Config) -> Config:
    """Return the configuration with absolute paths, checkpoints for runs, the LoRA settings of model.adapter, and
    lengths within the model's positions where nobody has set them: half of them for responses, a quarter for all
    observations. Idempotent. Raises ValueError for a run that is of another kind.
    """
    values = config.model_dump()
    for section, name in MODEL_FIELDS:
        path = values[section][name]
        if (found := _run_at(path)) is not None:
            if problem := _unfit(f"{section}.{name}", path, found):
                raise ValueError(f"{section}.{name}={path} {problem}")
            values[section][name] = str(checkpoint_of(Path(os.path.expanduser(path))))
    values = absolute_paths(values)
    if config.model.adapter is not None:
        values["lora"] |= adapter_settings(Path(values["model"]["adapter"]))
    _check_critic(config, bases=(values["model"]["path"], values["critic"]["path"]))
    if config.samples and (positions := _positions(values["model"]["path"])) is not None:
        observed = max(1, positions // 4 // max(1, config.environment.max_turns - 1))
        both = (("generation", "max_new_tokens", positions // 2), ("environment", "max_observation_tokens", observed))
        for section, name, most in both:
            if name not in getattr(config, section).model_fields_set:
                values[section][name] = min(values[section][name], most)
    return build_config(values)


def adapter_settings(folder: Path) -> dict[str, Any]:
    """Read rank, alpha and target modules of the adapter in `folder`; {} if its configuration cannot be read, which
    loading it reports. A regular expression of targets is left out.
    """
    try:
        facts = json.loads((folder.expanduser() / "adapter_config.json").read_text(encoding="utf-8"))
        found = {"r": int(facts["r"]), "alpha": float(facts["lora_alpha"])}
        targets = facts["target_modules"]
    except (OSError, ValueError, TypeError, LookupError):
        return {}
    return found | ({"target_modules": sorted(map(str, targets))} if isinstance(targets, list) else {})


def absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Return nested settings (of a `Config`, or of a checkpoint) with absolute paths for files that exist; names of
    embedded models and of the hub stay.
    """
    values = copy.deepcopy(values)
    for section, name in (*MODEL_FIELDS, *DATA_FIELDS):
        path = values.get(section, {}).get(name)
        if isinstance(path, str) and starter_path(path) is None and os.path.exists(os.path.expanduser(path)):
            values[section][name] = os.path.abspath(os.path.expanduser(path))
    functions = values.get("reward", {}).get("functions")
    for function in functions if isinstance(functions, list) else ():
        for name, change in (("use", _absolute_use), ("rubric", os.path.abspath), ("cache", os.path.abspath)):
            if isinstance(function, dict) and isinstance(function.get(name), str):
                function[name] = change(os.path.expanduser(function[name]))
    environment = values.get("environment", {})
    for name in {"name", "agent", "tools"} & environment.keys():
        given = environment[name]
        environment[name] = [*map(_absolute_use, given)] if isinstance(given, list) else _absolute_use(given)
    return values


def _absolute_use(use: Any) -> Any:
    """Make the file of 'file.py:function' absolute; return a module's name, and anything else, unchanged."""
    if not isinstance(use, str):
        return use
    place, colon, function = use.rpartition(":")
    file = os.path.expanduser(place.strip())
    is_file = (file.endswith(".py") or "/" in file) and os.path.isfile(file)
    return f"{os.path.abspath(file)}{colon}{function}" if is_file else use


def _run_at(path: str | None) -> Config | None:
    """Return the configuration of the run that a setting names, itself or by a checkpoint; None for everything else."""
    run = named_run(path) if path else None
    return open_run(run).read_config() if run else None


def _unfit(key: str, path: str, config: Config) -> str | None:
    """Return why a run of this configuration cannot be `key`; None where it can."""
    policy, critic, lora = config.trains.policy, config.uses("critic") or not config.trains.policy, config.lora.enabled
    if key == "reward.model":
        return f"is a {config.method} run; a reward model is made by `tinyrl train reward`" if policy else None
    if not policy and key != "critic.path":
        return f"is a reward model: reward.model={path}"
    if key == "model.adapter" and not lora:
        return f"was fully fine-tuned, so it is a model: model.path={path}"
    if key == "model.path" and lora:
        base = config.model.path
        return f"holds adapters, not a whole model; its base and it are model.path={base} model.adapter={path}"
    if key == "critic.path" and lora and not critic:
        return "holds adapters, not a whole model, and no critic: name a ppo run, a reward run, or a fully trained one"
    return None


# ---- the critic ----


def critic_run(config: Config) -> Config | None:
    """Return the configuration of the run whose critic, or reward model of adapters, the one of `config` starts from.
    None: critic.path is not given, or is a whole model, which a fully fine-tuned run is too.
    """
    found = _run_at(config.critic.path)
    return found if found is not None and (found.uses("critic") or found.lora.enabled) else None


def _check_critic(config: Config, *, bases: tuple[str, str | None]) -> None:
    """Raise ValueError where what critic.path names is of another kind than critic.kind, or on another base. `bases`:
    model.path and critic.path as resolved.
    """
    path, kind, found = config.critic.path, config.critic.kind, _run_at(config.critic.path)
    if path is None or not config.uses("critic"):
        return
    theirs = "adapter" if found and found.lora.enabled else "separate"
    theirs = found.critic.kind if found and found.uses("critic") else theirs
    if _trunk(kind) != _trunk(theirs):
        raise ValueError(f"critic.path={path} is for critic.kind={theirs}; critic.kind is {kind} here")
    if found is None:
        return
    if found.lora.enabled and kind == "separate" and not config.lora.enabled:
        raise ValueError(f"critic.path={path} holds a critic of adapters, and lora.enabled is false here")
    if found.lora.enabled and found.model.random_init:
        raise ValueError(f"critic.path={path} holds adapters on weights drawn at random, which are in no file")
    if kind != "separate" and bases[0] not in (found.model.path, bases[1]):
        raise ValueError(f"critic.path={path} is on model.path={found.model.path}; model.path is {bases[0]} here")


def _trunk(kind: str | None) -> str:
    return str(kind).removesuffix("-detached")  # its head is on the same states


def _positions(path: str) -> int | None:
    """Return the number of positions of the model in a folder; None where no config.json has it."""
    folder = starter_path(path) or Path(path)
    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a hub name; loading reports what is wrong with a folder
        return None
    inner = facts.get("text_config", facts) if isinstance(facts, dict) else {}
    found = [inner.get(name) for name in ("max_position_embeddings", "n_positions")] if isinstance(inner, dict) else []
    return next((count for count in found if isinstance(count, int) and count > 1), None)
