"""A part of the page of `tinyrl check`."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

from tinyrl.runs.finding import Finding, columns
from tinyrl.text import escape_control

INDENT = 13  # columns for the name
MOST_LINES = 20


@dataclass
class CheckSection:
    """Lines to read, the same as facts for --json, and what was found wrong."""

    name: str
    lines: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def render(self) -> str:
        """Return the section as at most MOST_LINES lines of the terminal, its name on the left."""
        wrapped = list[str]()
        for line in "\n".join(filter(None, self.lines)).split("\n"):
            indent = " " * (2 + len(line) - len(line.lstrip()))
            wrap = textwrap.TextWrapper(columns() - INDENT, subsequent_indent=indent, break_on_hyphens=False)
            wrapped += wrap.wrap(escape_control(line))
        if len(wrapped) > MOST_LINES:
            wrapped = [*wrapped[: MOST_LINES - 1], f"... {len(wrapped) - MOST_LINES + 1} more lines"]
        names = [self.name] + [""] * len(wrapped)
        return "\n".join(f"{name:{INDENT}}{line}" for name, line in zip(names, wrapped or ["-"], strict=False))


def words_of_kind(kind: str) -> str:
    """Return how lines name a kind of text that is tried; its key in --json is the kind itself."""
    return "reference answer" if kind == "gold" else kind
