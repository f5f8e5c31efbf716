"""Differences between two configurations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Change:
    """A setting with two values. setting: section.name; removed: there is none of that name now."""

    setting: str
    before: Any
    now: Any
    removed: bool = False

    def __str__(self) -> str:
        now = "removed" if self.removed else json.dumps(self.now)
        return f"{self.setting}: {json.dumps(self.before)} then, {now} now"


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """List settings with two values, by name. One that only one side has is left out: another version wrote it."""
    before = by_setting(before)
    now = by_setting(now)
    changed = [name for name in sorted(before.keys() & now.keys()) if not is_same(before[name], now[name])]
    return [Change(setting=name, before=before[name], now=now[name]) for name in changed]


def is_same(before: Any, now: Any) -> bool:
    """Compare values of a setting. Of objects in a list (reward.functions) a field that only one side has is left out
    too, unless it holds something.
    """
    if not isinstance(before, list) or not isinstance(now, list):
        return before == now
    return len(before) == len(now) and all(map(_is_same_entry, before, now))


def _is_same_entry(before: Any, now: Any) -> bool:
    if not isinstance(before, dict) or not isinstance(now, dict):
        return is_same(before, now)
    shared = before.keys() & now.keys()
    of_one_side = [value for name, value in {**before, **now}.items() if name not in shared]
    return not any(of_one_side) and all(is_same(before[name], now[name]) for name in shared)


def by_setting(values: dict[str, Any]) -> dict[str, Any]:
    """Return nested settings by section.name."""
    sections = {section: own for section, own in values.items() if isinstance(own, dict)}
    return {f"{section}.{name}": value for section, own in sections.items() for name, value in own.items()}
