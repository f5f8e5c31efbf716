"""Settings that depend on what is on disk: absolute paths, so that a run can be resumed from any folder; runs named as
models, replaced by the checkpoints that are meant; the facts of models that `derive` needs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinyrl.config.advice import working_advice
from tinyrl.config.derive import derive, derive_over
from tinyrl.config.given import Given
from tinyrl.config.marks import Named, replace_named
from tinyrl.config.refusal import Refusal
from tinyrl.config.rules import AdapterFacts, ModelFacts
from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.runs.places import checkpoint_of, named_run
from tinyrl.runs.records import json_object
from tinyrl.runs.run_dir import RunDir, open_run

FEWER_BETWEEN = "Take fewer environment.max_turns, or a smaller environment.max_observation_tokens"


def config_of(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Return the whole configuration of nested values with overrides laid over them. Raises ValueError as `derive`."""
    return derive(Given(dict(values)).over(overrides), model_facts)


def changed_config(run: RunDir, overrides: Sequence[str]) -> Config:
    """Return the configuration of a run with overrides laid over what was given to it. Without any it is config.yaml.
    Raises ValueError where that is invalid, or an override is.
    """
    config = run.read_config()
    return derive_over(config, overrides, model_facts) if overrides else config


def resolve(config: Config) -> Config:
    """Return the configuration as a run keeps it: with absolute paths, and checkpoints for runs. Idempotent. Raises
    Refusal for a run that is of another kind.
    """
    values = replace_named(config.model_dump(), _checkpoint_of_run, schema=type(config))
    values = absolute_paths(values, schema=type(config))
    _check_critic(config, bases=(values["model"]["path"], values["critic"]["path"]))
    return Config.model_validate(values).with_given(config.given)


def model_facts(config: Config) -> ModelFacts:
    """Read what the files of config.model say. Of a name of the hub, and of what loading reports, nothing is known."""
    model = config.model
    return ModelFacts(
        positions=_positions_at(model.path),
        adapter=None if model.adapter is None else _adapter_facts(model.adapter),
    )


def _positions_at(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return positions_named(_folder_of(path))
    return None


def _adapter_facts(path: str) -> AdapterFacts | None:
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        facts = json_object(Path(_folder_of(path), "adapter_config.json"))
        targets = facts["target_modules"]
        parameters = facts.get("target_parameters")
        return AdapterFacts(
            r=int(facts["r"]),
            alpha=float(facts["lora_alpha"]),
            target_modules=sorted(targets) if isinstance(targets, list) else None,
            target_parameters=sorted(parameters) if parameters else None,
        )
    return None


def _folder_of(path: str) -> str:
    """Return what a model's path names: the checkpoint that is meant of a run, or the path itself."""
    is_run = named_run(path) is not None
    return str(checkpoint_of(Path(path).expanduser())) if is_run else os.path.expanduser(path)


def check_room_for_responses(config: Config) -> None:
    """Raise Refusal where a response may fill all positions of the model, as its config.json has them."""
    positions = positions_named(config.model.path)
    if not config.samples or positions is None or config.generation.max_new_tokens < positions:
        return
    raise Refusal(("generation.max_new_tokens", "model.path"), no_room_for_prompt(config, positions=positions))


def no_room_for_prompt(config: Config, *, positions: int, between: int = 0, limited_by: str = "") -> str:
    """Return the sentence for responses that leave no position for a prompt, with a value that would. between: tokens
    that are read between turns; limited_by: what gives the model fewer positions than its config names.
    """
    room = positions - between
    advices = [[f"generation.max_new_tokens={room // part}"] for part in (2, 1) if room >= 4]
    advice = working_advice(config, advices, lambda changed: changed.generation.max_new_tokens < room)
    if advice is not None:
        change = f"For example {advice}"
    elif between:
        change = FEWER_BETWEEN
    else:
        change = "Take a model with a longer context"
    limits = _limits(config, between)
    return f"{limits}, but the model's context length is {positions:,} for prompt and response{limited_by}. {change}"


def _limits(config: Config, between: int) -> str:
    """Name the tokens of a response, with those that are read between its turns."""
    read = f" and up to {between:,} that are read between turns" if between else ""
    return f"generation.max_new_tokens={config.generation.max_new_tokens}{read}"


def room_for_prompt(config: Config, longest: int, *, positions: int, between: int) -> str:
    """Return what to set for a prompt of `longest` tokens: a longer limit of prompts, and a shorter one of responses
    where that leaves at least a quarter of theirs; or which limits leave no room.
    """
    generation = config.generation
    left = positions - between - longest
    longer = [f"generation.max_prompt_tokens={max(longest, generation.max_prompt_tokens)}"]
    advices = [longer] if longest > generation.max_prompt_tokens else []
    if 4 * left >= generation.max_new_tokens:
        shorter = [f"generation.max_new_tokens={left}"]
        advices += [shorter, [*longer, *shorter]]

    def has_room(changed: Config) -> bool:
        limits = changed.generation
        return limits.max_prompt_tokens >= longest and limits.max_new_tokens <= left

    advice = working_advice(config, advices, has_room)
    if advice is not None:
        return f"Set {advice}"
    model = f"the model's context length is {positions:,} for prompt and response"
    fewer = f"{FEWER_BETWEEN}, cut the rows" if between else "Cut the rows"
    return f"No limit of prompts makes room: {model}, and responses have {_limits(config, between)}. {fewer}"


def _checkpoint_of_run(named: Named) -> str:
    """Return the checkpoint that is meant of a run that is named as a model; every other value as it is."""
    found = _run_at(named.value) if named.kind == "model" else None
    if found is None:
        return named.value
    needed = named.names.run
    if needed is None or not needed.fits(found):
        what = f"{found.method} run{' of adapters' if found.lora.enabled else ''}"
        must_be = needed.words if needed is not None else "a model"
        raise Refusal((named.setting,), f"{named.label}={named.value} is a {what}; it must be {must_be}")
    try:
        return str(checkpoint_of(Path(named.value).expanduser()))
    except ValueError as error:  # none that verifies
        raise Refusal((named.setting,), str(error)) from error


def absolute_paths(values: dict[str, Any], *, schema: type[Config] = Config) -> dict[str, Any]:
    """Return nested settings (of a `Config`, or of a checkpoint) with absolute paths; names of embedded models, of the
    hub and of modules stay.
    """
    return replace_named(values, _absolute, schema=schema)


def _absolute(named: Named) -> str:
    value = named.value
    path = os.path.expanduser(value)
    if named.kind == "file":
        return os.path.abspath(path)
    if named.kind == "code":
        return _absolute_use(value)
    is_path = named.kind in ("model", "rows") and starter_path(value) is None and os.path.exists(path)
    return os.path.abspath(path) if is_path else value


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
    """Raise Refusal where what critic.path names is of another kind than critic.kind, or on another base. `bases`:
    model.path and critic.path as resolved.
    """
    path = config.critic.path
    kind = str(config.critic.kind)
    found = _run_at(config.critic.path)
    if path is None or not config.uses("critic"):
        return
    of_adapters = found is not None and found.lora.enabled
    theirs = "adapter" if of_adapters else "separate"
    theirs = str(found.critic.kind) if found is not None and found.uses("critic") else theirs
    if kind.removesuffix("-detached") != theirs.removesuffix("-detached"):  # a head on the same states
        raise Refusal(
            ("critic.path", "critic.kind"),
            f"critic.path={path} is for critic.kind={theirs}; critic.kind is {kind} here",
        )
    if of_adapters and kind == "separate" and not config.lora.enabled:
        raise Refusal(
            ("critic.path", "lora.enabled"),
            f"critic.path={path} holds a critic of adapters, and lora.enabled is false here",
        )
    if found is not None and kind != "separate" and bases[0] not in (found.model.path, bases[1]):
        raise Refusal(
            ("critic.path", "model.path"),
            f"critic.path={path} is on model.path={found.model.path}; model.path is {bases[0]} here",
        )


def positions_named(path: str) -> int | None:
    """Return the number of positions of the model in a folder; None where no config.json has it."""
    facts = config_json(path)
    of_text = facts.get("text_config")
    facts = of_text if isinstance(of_text, dict) else facts
    positions = facts.get("max_position_embeddings", facts.get("n_positions"))
    is_count = isinstance(positions, int) and not isinstance(positions, bool) and positions > 0
    return positions if is_count else None


def has_vision_tower(path: str) -> bool | None:
    """Return whether config.json of a model, or of a run's checkpoint, names a vision tower; None if it is not here."""
    facts = config_json(_folder_of(path))
    return "vision_config" in facts if facts else None


def config_json(path: str) -> dict[str, Any]:
    """Return config.json of the model in a folder; {} for a hub name, and for a file that loading will refuse."""
    try:
        return json_object((starter_path(path) or Path(path)) / "config.json")
    except (OSError, ValueError):
        return {}
