"""Sections of the page that `tinyrl check` prints."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

from tinyrl.runs.findings import Finding, columns
from tinyrl.text import visible

INDENT, MOST_LINES = 13, 20


@dataclass
class CheckSection:
    """A part of the page: lines to read, the same as facts for --json, and what was found wrong."""

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
            wrapped += wrap.wrap(visible(line))
        if len(wrapped) > MOST_LINES:
            wrapped = [*wrapped[: MOST_LINES - 1], f"... {len(wrapped) - MOST_LINES + 1} more lines"]
        return "\n".join(f"{self.name if i == 0 else '':{INDENT}}{line}" for i, line in enumerate(wrapped or ["-"]))
