"""Settings that depend on what is on disk: absolute paths, so that a run can be resumed from any folder; runs named as
models, replaced by their newest checkpoints that verify; defaults that fit the model.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinyrl.config.recipe import build_config
from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.runs.checkpoint import checkpoint_of
from tinyrl.runs.run_dir import named_run, open_run

MODEL_FIELDS = (("model", "path"), ("model", "adapter"), ("critic", "path"), ("teacher", "path"), ("reward", "model"))
NEEDED: dict[str, tuple[str, Callable[[Config], bool]]] = {  # of a run that is named as a model
    "model.path": ("a fully trained policy (one of adapters is model.adapter, with its base as model.path)",
        lambda run: run.trains.policy and not run.lora.enabled),
    "model.adapter": ("a policy of adapters", lambda run: run.trains.policy and run.lora.enabled),
    "critic.path": ("a ppo or reward run, or a fully trained policy",
        lambda run: run.uses("critic") or not run.trains.policy or not run.lora.enabled),
    "teacher.path": ("a policy", lambda run: run.trains.policy),
    "reward.model": ("a run of `tinyrl train reward`", lambda run: not run.trains.policy),
}  # fmt: skip
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
            needed, fits = NEEDED[key := f"{section}.{name}"]
            if not fits(found):
                what = f"{found.method} run{' of adapters' if found.lora.enabled else ''}"
                raise ValueError(f"{key}={path} is a {what}; it must be {needed}")
            values[section][name] = str(checkpoint_of(Path(os.path.expanduser(path))))
    values = absolute_paths(values)
    if config.model.adapter is not None:
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):  # which loading it reports
            facts = json.loads(Path(values["model"]["adapter"], "adapter_config.json").read_text(encoding="utf-8"))
            values["lora"] |= {"r": int(facts["r"]), "alpha": float(facts["lora_alpha"])}
            if isinstance(facts["target_modules"], list):  # not a pattern
                values["lora"]["target_modules"] = sorted(facts["target_modules"])
    _check_critic(config, bases=(values["model"]["path"], values["critic"]["path"]))
    if config.samples and (positions := _positions(values["model"]["path"])) is not None:
        observed = max(1, positions // 4 // max(1, config.environment.max_turns - 1))
        both = (("generation", "max_new_tokens", positions // 2), ("environment", "max_observation_tokens", observed))
        for section, name, most in both:
            if name not in getattr(config, section).model_fields_set:
                values[section][name] = min(values[section][name], most)
    return build_config(values)


def absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Return nested settings (of a `Config`, or of a checkpoint) with absolute paths for files that exist; names of
    embedded models and of the hub stay.
    """
    values = copy.deepcopy(values)
    for section, name in (*MODEL_FIELDS, *DATA_FIELDS):
        path = values.get(section, {}).get(name)
        if isinstance(path, str) and starter_path(path) is None and os.path.exists(os.path.expanduser(path)):
            values[section][name] = os.path.abspath(os.path.expanduser(path))
    for function in values.get("reward", {}).get("functions", ()):
        for name, change in (("use", _absolute_use), ("rubric", os.path.abspath), ("cache", os.path.abspath)):
            if isinstance(function, dict) and isinstance(function.get(name), str):
                function[name] = change(os.path.expanduser(function[name]))
    task = values.get("task", {})
    if isinstance(task.get("name"), str):
        task["name"] = _absolute_use(task["name"])
    if environment := values.get("environment"):
        environment |= {name: _absolute_use(environment[name]) for name in ("name", "agent") if environment[name]}
        environment["tools"] = [_absolute_use(use) for use in environment["tools"]]
    return values


def _absolute_use(use: str) -> str:
    """Make the file of 'file.py:function' absolute; return the name of a module or an environment unchanged."""
    place, colon, function = use.rpartition(":")
    file = os.path.expanduser(place.strip())
    is_file = (file.endswith(".py") or "/" in file) and os.path.isfile(file)
    return f"{os.path.abspath(file)}{colon}{function}" if is_file else use


def _run_at(path: str | None) -> Config | None:
    """Return the configuration of the run that a setting names, itself or by a checkpoint; None for everything else."""
    run = named_run(path) if path else None
    return open_run(run).read_config() if run else None


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
    path, kind, found = config.critic.path, str(config.critic.kind), _run_at(config.critic.path)
    if path is None or not config.uses("critic"):
        return
    of_adapters = found is not None and found.lora.enabled
    theirs = "adapter" if of_adapters else "separate"
    theirs = str(found.critic.kind) if found is not None and found.uses("critic") else theirs
    if kind.removesuffix("-detached") != theirs.removesuffix("-detached"):  # a head on the same states
        raise ValueError(f"critic.path={path} is for critic.kind={theirs}; critic.kind is {kind} here")
    if of_adapters and kind == "separate" and not config.lora.enabled:
        raise ValueError(f"critic.path={path} holds a critic of adapters, and lora.enabled is false here")
    if found is not None and kind != "separate" and bases[0] not in (found.model.path, bases[1]):
        raise ValueError(f"critic.path={path} is on model.path={found.model.path}; model.path is {bases[0]} here")


def _positions(path: str) -> int | None:
    """Return the number of positions of the model in a folder; None where no config.json has it."""
    folder = starter_path(path) or Path(path)
    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a hub name; loading reports what is wrong with a folder
        return None
    facts = facts.get("text_config", facts)
    return facts.get("max_position_embeddings", facts.get("n_positions"))
