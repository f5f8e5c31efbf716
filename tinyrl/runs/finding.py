"""A finding: what is wrong, with figures, and one thing to change; of a run (findings.py) and of `tinyrl check`."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tinyrl.runs.records import json_safe
from tinyrl.text import escape_control

Subject = TypeVar("Subject")  # what a check looks at: a run's records, or answers of a policy


@dataclass(frozen=True)
class Finding:
    """`what` is a sentence with figures, `change` one thing to change; is_harmless: the run learns all the same."""

    name: str
    what: str
    change: str
    figures: dict[str, float] = field(default_factory=dict)
    is_harmless: bool = False


def found_by(checks: Iterable[Callable[[Subject], Finding | None]], subject: Subject) -> list[Finding]:
    """Return the findings of those checks that have one."""
    findings = [check(subject) for check in checks]
    return [finding for finding in findings if finding is not None]


# ---- as text and JSON ----


def as_json(found: list[Finding]) -> list[dict[str, Any]]:
    return [
        {"finding": one.name, "what": one.what, "figures": json_safe(one.figures), "change": one.change}
        for one in found
    ]


def counted(found: list[Finding]) -> str:
    return "1 finding" if len(found) == 1 else f"{len(found)} findings"


def columns() -> int:
    """Return the columns of the terminal, 60 to 110."""
    return max(60, min(shutil.get_terminal_size().columns, 110))


def in_words(found: list[Finding]) -> Iterator[str]:
    """Yield a paragraph for each finding."""
    wrap = partial(textwrap.wrap, width=columns(), initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    for one in found:
        yield "\n".join(map(escape_control, [one.name, *wrap(one.what), *wrap(f"Change: {one.change}")]))
