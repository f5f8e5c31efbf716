"""Settings that would have no effect, and settings that contradict each other.

A setting of the command line or of the Python API that does not count (`OnlyIf`) is refused, one of a recipe gets a
note. config.yaml of a run holds every value and is exempt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.text import mask_url, truncate


@dataclass(frozen=True)
class Contradiction:
    """Settings that make no sense together, and a sentence with their values."""

    settings: tuple[str, ...]
    sentence: str


def given_settings(values: dict[str, Any]) -> list[str]:
    """Return the settings of nested values, as section.name. One that is null or empty asks for nothing."""
    found: list[str] = []
    for section, own in values.items():
        if isinstance(own, dict):
            found += [f"{section}.{name}" for name, value in own.items() if value not in (None, [], {})]
    return found


def without_effect(config: Config, setting: str, *, of_recipe: bool = False) -> str | None:
    """Return a sentence for a setting that does not count, else None. A recipe may serve several methods, so nothing is
    said about its settings that are for other ones.
    """
    section, _, name = setting.partition(".")
    unmet = config.unmet(section, name) if config.uses(section) else None
    if unmet is None or (of_recipe and unmet.of_method):
        return None
    return f"`{setting}` has no effect: {unmet.why} (it counts only if {unmet.words})"


def contradictions(config: Config) -> Iterator[Contradiction]:
    """Yield what would train on something else than was asked for, or penalise everything."""
    yield from _data_contradictions(config)
    if config.samples:
        yield from _sampling_contradictions(config)


def _data_contradictions(config: Config) -> Iterator[Contradiction]:
    model = config.model
    task = config.task
    if model.revision is not None and _is_local(model.path):
        yield Contradiction(
            ("model.revision", "model.path"),
            f"model.revision={truncate(model.revision)} is of a hub model, and model.path={model.path} is a folder",
        )
    if model.random_init and model.adapter is not None:
        yield Contradiction(
            ("model.random_init", "model.adapter"),
            f"model.random_init=true draws other weights than model.adapter={model.adapter} was trained on",
        )
    sources = [source for source in (task.data, task.eval_data) if source is not None]
    if task.columns and not sources:
        columns = json.dumps(task.columns)
        yield Contradiction(
            ("task.columns", "task.data"), f"task.columns={columns} renames columns of task.data, which is not given"
        )
    if task.revision is not None and all(os.path.exists(source) for source in sources):
        found = f"task.data={task.data} is not on the hub" if sources else "task.data is not given"
        yield Contradiction(
            ("task.revision", "task.data"), f"task.revision={truncate(task.revision)} is of the hub, and {found}"
        )


def _sampling_contradictions(config: Config) -> Iterator[Contradiction]:
    environment = config.environment
    teacher = config.teacher
    overlong = config.reward.overlong_tokens
    longest = config.generation.max_new_tokens
    if overlong > longest:
        yield Contradiction(
            ("reward.overlong_tokens", "generation.max_new_tokens"),
            f"reward.overlong_tokens={overlong} penalises every answer: generation.max_new_tokens={longest} is less",
        )
    of_call = environment.max_call_tokens
    if of_call is not None and of_call > longest:
        yield Contradiction(
            ("environment.max_call_tokens", "generation.max_new_tokens"),
            f"environment.max_call_tokens={of_call} never holds: all calls of an episode have "
            f"generation.max_new_tokens={longest} together",
        )
    names = [use.rpartition(":")[2] for use in environment.tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        tools = ", ".join(environment.tools)
        yield Contradiction(
            ("environment.tools",), f"environment.tools=[{tools}] has two tools called {twice}: only one would be run"
        )
    if teacher.quantization is not None and teacher.kind not in ("model", "none"):
        path = truncate(mask_url(str(teacher.path)))
        yield Contradiction(
            ("teacher.quantization", "teacher.path"),
            f"teacher.quantization={teacher.quantization} is of a model of its own, and teacher.path={path} is none",
        )
    if config.method == "ppo" and config.ppo.target_kl is not None and config.ppo.kl_coef == 0:
        yield Contradiction(
            ("ppo.target_kl", "ppo.kl_coef"),
            f"ppo.target_kl={config.ppo.target_kl} adapts ppo.kl_coef by a factor, and ppo.kl_coef=0 stays 0",
        )
    fraction = config.distill.on_policy_fraction
    if config.method == "distill" and fraction < 1:
        for name in ("name", "tools"):
            value = getattr(environment, name)
            if value:
                yield Contradiction(
                    ("distill.on_policy_fraction", f"environment.{name}"),
                    f"distill.on_policy_fraction={fraction} takes given answers, which are no episodes of "
                    f"environment.{name}={value if name == 'name' else json.dumps(value)}",
                )


def _is_local(path: str) -> bool:
    return starter_path(path) is not None or os.path.exists(os.path.expanduser(path))
