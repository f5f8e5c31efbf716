"""What differs between a checkpoint and the run that goes on from it (settings, files, rows, versions), and what of
that is refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinyrl.config.changes import Change, by_setting, changed_settings
from tinyrl.config.methods import and_list
from tinyrl.config.removed import given_removed, with_newer
from tinyrl.config.rules import READS
from tinyrl.config.schema import Config, without_secrets
from tinyrl.data.images import Image
from tinyrl.training.code_inputs import same_module
from tinyrl.training.method import Method
from tinyrl.training.run_state import InputHashes
from tinyrl.training.step import rate_factor

MOST_SHOWN = 3  # changes in an error


@dataclass(frozen=True)
class ChangedInput:
    """A file, or rows, that are not what they were."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name} {self.what}"


def check_changes(before: dict[str, Any], config: Config, *, since: str, allowed: bool) -> list[Change]:
    """Compare a checkpoint's configuration with the one it is resumed under; return the differences.

    Raises ValueError for another method, and for differences that are not `allowed`, other than more steps and what a
    run keeps.
    """
    method = before.get("method")
    if method != config.method:
        raise ValueError(f"{since} was written by `tinyrl train {method}`; {config.method} cannot go on with it")
    changes = changed_settings(without_secrets(before), config.written())
    changes += _newer_settings(before, config)
    for name, value in given_removed(before).items():
        changes.append(Change(setting=name, before=value, now=None, removed=True))
    refused = [change for change in changes if not (_is_longer(change) or config.only_keeps(change.setting))]
    refuse("settings have changed", refused, since=since, allowed=allowed)
    return changes


def _newer_settings(before: dict[str, Any], config: Config) -> list[Change]:
    """List settings that overrides give, and that a checkpoint of an earlier version does not have: that version did
    what their defaults do.
    """
    known = by_setting(with_newer(before))
    changes = list[Change]()
    for setting in config.given.typed:
        section, _, name = setting.partition(".")
        own = getattr(config, section)
        default = type(own).model_fields[name].get_default(call_default_factory=True)
        now = getattr(own, name)
        if setting not in known and now != default:
            changes.append(Change(setting=setting, before=default, now=now))
    return changes


def _is_longer(change: Change) -> bool:
    """Return whether a change gives a run more steps."""
    if change.setting not in ("run.num_steps", "run.epochs"):
        return False
    known = isinstance(change.before, int | float) and isinstance(change.now, int | float)
    return known and change.before < change.now


def check_schedule(before: dict[str, Any], config: Config, *, step: int, allowed: bool) -> list[str]:
    """Return a note where a schedule is stretched, so that the learning rate jumps behind `step` finished steps. Raises
    ValueError, with the rate before and after, where that is not `allowed`.
    """
    then = before["optim"]
    now = config.optim
    schedule_then = {"num_steps": before["run"]["num_steps"], "warmup_steps": then["warmup_steps"]}
    schedule_now = {"num_steps": config.run.num_steps, "warmup_steps": now.warmup_steps}
    planned = rate_factor(then["schedule"], step, **schedule_then)
    factor = rate_factor(now.schedule, step, **schedule_now)
    if math.isclose(planned, factor):
        return []
    rate_before = then["learning_rate"] * rate_factor(then["schedule"], max(0, step - 1), **schedule_then)
    rate_after = (now.learning_rate or 0.0) * factor
    steps = f"{config.run.num_steps} steps"
    what = f"optim.schedule={now.schedule} over {steps}, {then['schedule']} over {schedule_then['num_steps']} before"
    rates = f"the learning rate of step {step} was {rate_before:.3g}, that of step {step + 1} is {rate_after:.3g}"
    if not allowed:
        raise ValueError(f"{what}: {rates}. Put run.num_steps back, or go on like that: --allow-config-change")
    return [f"{what}: {rates}"]


def change_invalidates(change: Change | ChangedInput) -> bool:
    """Return whether a change makes wrong what a method keeps of its rows and frozen models."""
    if isinstance(change, ChangedInput) or change.setting == "run.seed":
        return True
    return not change.setting.startswith(("optim.", "run."))


def change_is_of_reward(change: Change | ChangedInput) -> bool:
    """Return whether rewards may be others after a change: of a reward's settings or files, of the task's rule, or of
    an environment's functions, which may give rewards.
    """
    name = change.name if isinstance(change, ChangedInput) else change.setting
    of_reward = name.startswith(("reward.", "task.name", "task.grading", "environment.name", "environment.tools"))
    return of_reward and name != "reward.timeout_s"


def refuse(what: str, changes: Sequence[Change | ChangedInput], *, since: str, allowed: bool) -> None:
    """Raise ValueError, with the first of the changes, when there are some and they are not allowed."""
    if not changes or allowed:
        return
    more = [f"  and {len(changes) - MOST_SHOWN} more"] if len(changes) > MOST_SHOWN else []
    lines = [f"{what} since {since}, so the run would not go on as it began:"]
    lines += [f"  {change}" for change in changes[:MOST_SHOWN]] + more
    raise ValueError("\n".join([*lines, "Put them back, or go on with the new values: --allow-config-change"]))


def notes_of(changes: Sequence[Change | ChangedInput], *, since: str) -> list[str]:
    """Name the changes, and which setting a value follows from that nobody gave."""
    changed = {change.setting for change in changes if isinstance(change, Change)}
    notes = list[str]()
    for change in changes:
        reads = READS.get(change.setting, ()) if isinstance(change, Change) else ()
        follows = [setting for setting in reads if setting in changed]
        because = f" (follows from {and_list(follows)})" if follows else ""
        notes.append(f"changed since {since}: {change}{because}")
    return notes


# ---- what a run reads ----


def changed_sources(before: InputHashes, now: InputHashes) -> list[ChangedInput]:
    """List the inputs that have changed. One that only `now` has came with a setting, whose change is noted."""
    changes: list[ChangedInput] = []
    for name, rows in before.rows.items():
        if now.rows.get(name) != rows:
            changes.append(ChangedInput(f"{name} rows", "have changed"))
    for name, function in before.functions.items():
        if now.functions.get(name) != function:
            changes.append(ChangedInput(name, "is another function"))
    for name, file in before.files.items():
        there = now.files.get(name) or same_module(name, file, now.files)
        if there is None:
            changes.append(ChangedInput(name, "is not there any more"))
        elif there.sha256 != file.sha256:
            changes.append(ChangedInput(name, "has changed"))
    for name in before.unread:
        changes.append(ChangedInput(name, "has no hash, as it was gone when it was to be read: it may be another one"))
    return changes


def newer_images(images: Iterable[Image], checkpoint: Path) -> list[ChangedInput]:
    """Name images whose files were written after a checkpoint, some of many: rows have one fingerprint together."""
    saved = checkpoint.stat().st_mtime_ns
    newer = [image.path for image in images if os.stat(image.path).st_mtime_ns > saved]
    return [ChangedInput(path, "was written since then") for path in newer[: MOST_SHOWN - 1]]


def changed_inputs(method: Method, before: InputHashes, now: Callable[[], InputHashes]) -> list[ChangedInput]:
    """List the inputs that have changed by rank 0, whose workers have loaded all code."""
    changed = method.world.on_main(lambda: [asdict(one) for one in changed_sources(before, now())])
    return [ChangedInput(**one) for one in changed]


def other_versions(known: InputHashes, sources: InputHashes, *, since: str) -> list[str]:
    """Warn of libraries whose versions are other ones than at a checkpoint."""
    now = sources.versions
    others = [
        f"{name} {old}, now {now[name]}" for name, old in sorted(known.versions.items()) if now.get(name, old) != old
    ]
    if not others:
        return []
    return [f"warning: numbers may differ in their last digits, other versions than at {since}: {', '.join(others)}"]
