"""A row of the tables of other libraries' names (aliases.py, without_setting.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tinyrl.config.foreign_values import Reader, as_given


@dataclass(frozen=True)
class Ours:
    """What a name is here: a setting, with a remark behind it; or the reason why there is none (is_needless: nothing
    has to be set).
    """

    setting: str = ""
    remark: str = ""
    reason: str = ""
    is_needless: bool = False


@dataclass(frozen=True)
class Foreign:
    """A row of the table. names: apart by spaces; read: how the value of each is read, but for those in `reads`;
    under: what the names are under some methods instead.
    """

    names: str
    ours: Ours
    read: Reader = as_given
    reads: Mapping[str, Reader] = field(default_factory=dict)
    under: Mapping[str, Ours] = field(default_factory=dict)


def setting(name: str, remark: str = "") -> Ours:
    return Ours(setting=name, remark=remark)


def not_needed(reason: str) -> Ours:
    return Ours(reason=reason, is_needless=True)


def cannot_be_set(reason: str) -> Ours:
    return Ours(reason=reason)
