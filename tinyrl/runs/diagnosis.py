"""Findings as text and JSON, with completions that show them; and those that a run warns of while it trains."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tinyrl.runs.findings import FEWEST_STEPS, Finding, Row, find
from tinyrl.runs.records import RunRecords, messages_of, number, samples_of
from tinyrl.text import number as shown
from tinyrl.text import one_line, visible

NUM_SHOWN = 3  # completions of each finding
SHOWN_CHARACTERS = 200
MOST_LINES = 2000  # without an evaluation, that a run keeps in memory


def examples(rows: Iterable[Row], finding: Finding) -> list[Row]:
    """Return up to three of `rows`, lines of samples.jsonl, that show a finding; of the last step that has any."""
    step, best = -1, list[Row]()
    for row in rows:
        if row.get("step", 0) < step:
            continue
        if row.get("step", 0) > step:
            step, best = row.get("step", 0), []
        best = sorted([*best, row], key=finding.rank, reverse=True)[:NUM_SHOWN]  # stable: the first of equals stay
    return best


def examples_in(run: RunRecords) -> Callable[[Finding], list[Row]]:
    return lambda finding: examples(samples_of(run.path / "samples.jsonl", [], kind=finding.kind), finding)


def as_json(found: list[Finding], rows_of: Callable[[Finding], list[Row]]) -> list[dict[str, Any]]:
    return [
        {
            "finding": one.name,
            "what": one.what,
            "figures": {name: value if math.isfinite(value) else None for name, value in one.figures.items()},
            "change": one.change,
            "completions": rows_of(one),
        }
        for one in found
    ]


def render(run: RunRecords, found: list[Finding]) -> str:
    last = f"{run.name}: {run.last_step:,} step{'s' * (run.last_step != 1)}"
    if found:
        return "\n\n".join([f"{last}, {counted(found)}", *in_words(found, examples_in(run))])
    short = 0 < len(run.finite("reward/mean")) < FEWEST_STEPS
    return f"{last}, nothing found{'; it is too short for most that could be' * short}."


def counted(found: list[Finding]) -> str:
    return f"{len(found)} finding{'s' * (len(found) != 1)}"


def columns() -> int:
    """Return the columns of the terminal, 60 to 110."""
    return max(60, min(shutil.get_terminal_size().columns, 110))


def in_words(found: list[Finding], rows_of: Callable[[Finding], list[Row]]) -> Iterator[str]:
    """Yield a paragraph for each finding, with completions that show it."""
    width = columns()
    wrap = partial(textwrap.wrap, width=width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    for one in found:
        lines = [one.name, *wrap(one.what), *wrap(f"Change: {one.change}")]
        yield "\n".join(map(visible, [*lines, *(row_line(row, width) for row in rows_of(one))]))


def row_line(row: Row, width: int) -> str:
    """Return a completion on one line: step, prompt, reward, and how it begins."""
    reward, index = number(row.get("reward")), row.get("prompt_index")
    value = "-" if math.isnan(reward) else shown(reward)
    when = f"step {row['step']}, " if "step" in row else ""
    about = f"    {when}prompt {index if isinstance(index, int) else '-'}, reward {value}: "
    _, text = (messages_of(row) or [("", "")])[-1]
    return about + one_line(text, max(20, min(SHOWN_CHARACTERS, width - len(about))))


class Watch:
    """The findings of a run while it trains, each reported once. Looks are farther apart the longer the run is, and
    lines between the first 25 and the last 50 are thinned out, so that neither time nor memory grows with it.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config, self._steps = config, dict[int, dict[str, Any]]()
        self._next, self._warned = 0, set[str]()

    def know(self, steps: dict[int, dict[str, Any]]) -> None:
        """Take over the metrics of a run that is resumed; their findings have been reported."""
        self._steps |= steps
        self._new()

    def look(self, step: int, line: dict[str, Any]) -> list[str]:
        """Return warnings that the metrics of this step, with those before, are the first to give."""
        self._steps[step] = {"step": step, **line}
        if step < self._next:
            return []
        self._next = step + max(5, step // 20)
        return [f"{one.name}: {one.what} {one.change}" for one in self._new()]

    def _new(self) -> list[Finding]:
        plain = [step for step, line in self._steps.items() if not any(key.startswith("eval/") for key in line)]
        if len(plain) > MOST_LINES:
            for step in plain[25:-50:2]:
                del self._steps[step]
        new = [one for one in find(RunRecords(Path(), self._steps, self._config)) if one.name not in self._warned]
        self._warned |= {one.name for one in new}
        return new
