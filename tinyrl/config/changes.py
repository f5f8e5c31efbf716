"""Settings that changed between a checkpoint and its resume: refused with both values unless allowed. More steps are
always allowed.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tinyrl.config.schema import Config, without_secrets

MOST_SHOWN = 3


def check_changes(before: dict[str, Any], config: Config, *, since: str, allowed: bool) -> list[str]:
    """Compare a checkpoint's configuration with the one it is resumed under; returns a line for each difference.

    Raises ValueError when there are some besides more steps and `allowed` is false, and always when the method is
    another one.
    """
    if before["method"] != config.method:
        raise ValueError(
            f"{since} was written by `tinyrl train {before['method']}`; {config.method} cannot go on with it"
        )
    changes = changed_settings(without_secrets(before), config.written())
    refuse("settings have changed", [c for c in changes if not _longer(c)], since=since, allowed=allowed)
    return changes


def refuse(what: str, changes: list[str], *, since: str, allowed: bool) -> list[str]:
    """The changes. Raises ValueError, with the first of them, when there are some and they are not allowed."""
    if not changes or allowed:
        return changes
    more = [f"  and {len(changes) - MOST_SHOWN} more"] if len(changes) > MOST_SHOWN else []
    lines = [f"{what} since {since}, so the run would not go on as it began:"]
    lines += [f"  {change}" for change in changes[:MOST_SHOWN]] + more
    raise ValueError("\n".join([*lines, "Put them back, or go on with the new values: --allow-config-change"]))


def _longer(change: str) -> bool:
    """Whether a line of `changed_settings` says that the run is to take more steps."""
    found = re.fullmatch(r"run\.num_steps: (\d+) then, (\d+) now", change)
    return found is not None and int(found[1]) < int(found[2])


def keeps_rollout(change: str) -> bool:
    """Whether an update goes on with the rollout it has after a changed setting (a line of `changed_settings`): one
    that says how it is learnt from and not what is in it, nor which of its rows make a minibatch.
    """
    key = change.partition(":")[0]
    return key.startswith(("optim.", "run.")) and key != "run.seed"


def changed_settings(before: dict[str, Any], now: dict[str, Any], *, within: str = "") -> list[str]:
    """A line for each setting with two values. One that only one side has is left out: another version wrote it."""
    changes = []
    for key in sorted(before.keys() & now.keys()):
        old, new = before[key], now[key]
        if isinstance(old, dict) and isinstance(new, dict):
            changes += changed_settings(old, new, within=f"{within}{key}.")
        elif old != new:
            changes.append(f"{within}{key}: {json.dumps(old)} then, {json.dumps(new)} now")
    return changes
