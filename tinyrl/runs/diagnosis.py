"""What `tinyrl doctor RUN` says of a run, with completions that show it, and what a run warns of while it trains."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tinyrl.runs.findings import AT_ONCE, CHECKS, Finding, Row, has_steps
from tinyrl.runs.records import Run, messages_of, number, samples_of
from tinyrl.text import number as shown
from tinyrl.text import one_line, visible

NUM_SHOWN = 3  # completions of each finding
SHOWN_CHARACTERS = 200
MOST_LINES = 1000  # that a run keeps in memory, of steps with an evaluation and of others


def findings(run: Run) -> list[Finding]:
    """What is wrong with a run, as far as its metrics say; [] for one that goes well, or is too short to tell."""
    return [found for check in (CHECKS if has_steps(run) else AT_ONCE) if (found := check(run)) is not None]


def examples(rows: Iterable[Row], finding: Finding) -> list[Row]:
    """Up to three of `rows`, lines of samples.jsonl in order, that show a finding; of the last step that has any."""
    step, best = -1, list[Row]()
    for row in rows:
        if row.get("step", 0) < step:
            continue
        if row.get("step", 0) > step:
            step, best = row.get("step", 0), []
        best = sorted([*best, row], key=finding.rank, reverse=True)[:NUM_SHOWN]  # stable: the first of equals stay
    return best


def _of_run(run: Run, finding: Finding) -> list[Row]:
    return examples(samples_of(run.path / "samples.jsonl", [], kind=finding.kind), finding)


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


def run_as_json(run: Run, found: list[Finding]) -> list[dict[str, Any]]:
    return as_json(found, partial(_of_run, run))


def render(run: Run, found: list[Finding], *, width: int | None = None) -> str:
    last = f"{run.name}: {run.last_step:,} step{'s' * (run.last_step != 1)}"
    if not found:
        short = "" if has_steps(run) or not run.finite("reward/mean") else "; it is too short for most that could be"
        return f"{last}, nothing found{short}."
    return "\n\n".join([f"{last}, {counted(found)}", *in_words(found, partial(_of_run, run), width=width)])


def counted(found: list[Finding]) -> str:
    return f"{len(found)} finding{'s' * (len(found) != 1)}"


def columns() -> int:
    """Of the terminal, within what can be read."""
    return max(60, min(shutil.get_terminal_size().columns, 110))


def in_words(
    found: list[Finding], rows_of: Callable[[Finding], list[Row]], *, width: int | None = None
) -> Iterator[str]:
    """A paragraph for each finding, with completions that show it."""
    width = width or columns()
    wrap = textwrap.TextWrapper(width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False).wrap
    for one in found:
        lines = [one.name, *wrap(one.what), *wrap(f"Change: {one.change}")]
        lines += [row_line(row, width) for row in rows_of(one)]
        yield "\n".join(map(visible, lines))


def row_line(row: Row, width: int) -> str:
    """A completion on one line: step, prompt, reward, and how it begins."""
    reward, index = number(row.get("reward")), row.get("prompt_index")
    value = "-" if math.isnan(reward) else shown(reward)
    when = f"step {row['step']}, " if "step" in row else ""
    about = f"    {when}prompt {index if isinstance(index, int) else '-'}, reward {value}: "
    _, text = (messages_of(row) or [("", "")])[-1]
    return about + one_line(text, max(20, min(SHOWN_CHARACTERS, width - len(about))))


class Watch:
    """The findings of a run while it trains, each said once. Looks are farther apart the longer the run is, and of many
    lines between the first and the last ones every second is let go, so that neither time nor memory grows with it.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config, self._steps = config, dict[int, dict[str, Any]]()
        self._next, self._told = 0, set[str]()
        self._kept: dict[bool, list[int]] = {False: [], True: []}  # steps without and with an evaluation

    def know(self, steps: dict[int, dict[str, Any]]) -> None:
        """Take over the metrics of a run that is resumed; what they say has been said."""
        for step, line in steps.items():
            self._keep(step, line)
        self._new()

    def look(self, step: int, line: dict[str, Any]) -> list[str]:
        """Warnings that the metrics of this step, with those before, are the first to give."""
        self._keep(step, {"step": step, **line})
        if step < self._next:
            return []
        self._next = step + max(5, step // 20)
        return [f"{one.name}: {one.what} {one.change}" for one in self._new()]

    def _new(self) -> list[Finding]:
        found = findings(Run(Path(), self._steps, self._config))
        new = [one for one in found if one.name not in self._told]
        self._told |= {one.name for one in new}
        return new

    def _keep(self, step: int, line: dict[str, Any]) -> None:
        """Take in a line; the windows of a finding (findings.py), the first 25 and the last 50, stay whole."""
        self._steps[step] = line
        kept = self._kept[any(key.startswith("eval/") for key in line)]
        kept.append(step)
        if len(kept) > MOST_LINES:
            for at in kept[25:-50:2]:
                self._steps.pop(at, None)
            del kept[25:-50:2]
