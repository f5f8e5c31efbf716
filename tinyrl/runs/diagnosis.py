"""What `tinyrl doctor RUN` says of a run, with completions that show it, and what a run warns of while it trains."""

from __future__ import annotations

import math
import shutil
import textwrap
from pathlib import Path
from typing import Any

from tinyrl.runs.findings import AT_ONCE, OF_NUMBERS, OF_POLICY, OF_ROLLOUTS, Finding, Row, has_steps, held_out_falls
from tinyrl.runs.records import Run, json_lines, messages_of, number
from tinyrl.text import number as shown
from tinyrl.text import one_line, visible

NUM_SHOWN = 3  # completions of each finding
SHOWN_CHARACTERS = 200
MOST_LINES = 1000  # that a run keeps in memory, of steps with an evaluation and of others


def findings(run: Run) -> list[Finding]:
    """What is wrong with a run, as far as its metrics say; [] for one that goes well, or is too short to tell."""
    windows = (*OF_ROLLOUTS, *OF_POLICY) if has_steps(run) else (held_out_falls,)  # sft, reward, dpo sample nothing
    return [found for check in (*OF_NUMBERS, *AT_ONCE, *windows) if (found := check(run)) is not None]


def examples(path: Path, finding: Finding) -> list[Row]:
    """Up to three lines of samples.jsonl that show a finding; of the last step that has any of its kind."""
    step, best = -1, list[Row]()
    for row in json_lines(path, [], containing=b'"kind"') if path.is_file() else ():
        if row.get("kind") != finding.kind or row["step"] < step:
            continue
        if row["step"] > step:
            step, best = row["step"], []
        best = sorted([*best, row], key=finding.rank, reverse=True)[:NUM_SHOWN]  # stable: the first of equals stay
    return best


def as_json(run: Run, found: list[Finding]) -> list[dict[str, Any]]:
    """The findings as JSON values."""
    return [
        {
            "finding": one.name,
            "what": one.what,
            "figures": {name: value if math.isfinite(value) else None for name, value in one.figures.items()},
            "change": one.change,
            "completions": examples(run.path / "samples.jsonl", one),
        }
        for one in found
    ]


def render(run: Run, found: list[Finding], *, width: int | None = None) -> str:
    """The findings for a terminal: what, what to change, three completions each."""
    width = width or max(60, min(shutil.get_terminal_size().columns, 110))
    last = f"{run.name}: {run.last_step:,} step{'s' * (run.last_step != 1)}"
    if not found:
        short = "" if has_steps(run) or not run.finite("reward/mean") else "; it is too short for most that could be"
        return f"{last}, nothing found{short}."
    parts = [f"{last}, {len(found)} finding{'s' * (len(found) != 1)}"]
    for one in found:
        lines = [one.name, *_wrapped(one.what, width), *_wrapped(f"Change: {one.change}", width)]
        rows = examples(run.path / "samples.jsonl", one)
        parts.append("\n".join(visible(line) for line in [*lines, *(_row(row, width) for row in rows)]))
    return "\n\n".join(parts)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _row(row: Row, width: int) -> str:
    """A completion on one line: step, prompt, reward, and how it begins."""
    reward = number(row.get("reward"))
    value = "-" if math.isnan(reward) else shown(reward)
    index = row.get("prompt_index")
    about = f"    step {row['step']}, prompt {index if isinstance(index, int) else '-'}, reward {value}: "
    text = messages_of(row)[-1:]
    return about + one_line(text[0][1] if text else "", max(20, min(SHOWN_CHARACTERS, width - len(about))))


class Watch:
    """The findings of a run while it trains, each said once. Looks are farther apart the longer the run is, so that
    they cost next to nothing beside the steps. Of many lines between the first and the last ones, every second is let
    go, again and again, so that memory does not grow with the steps.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config, self._steps = config, dict[int, dict[str, Any]]()
        self._next, self._told = 0, set[str]()
        self._kept: dict[bool, list[int]] = {False: [], True: []}  # steps without and with an evaluation

    def know(self, steps: dict[int, dict[str, Any]]) -> None:
        """Take over the metrics of a run that is resumed; what they say has been said."""
        for step, line in steps.items():
            self._keep(step, line)
        self._told |= {one.name for one in findings(self._run())}

    def look(self, step: int, line: dict[str, Any]) -> list[str]:
        """Warnings that the metrics of this step, with those before, are the first to give."""
        self._keep(step, {"step": step, **line})
        if step < self._next:
            return []
        self._next = step + max(5, step // 20)
        new = [one for one in findings(self._run()) if one.name not in self._told]
        self._told |= {one.name for one in new}
        return [f"{one.name}: {one.what} {one.change}" for one in new]

    def _run(self) -> Run:
        return Run(Path(), self._steps, self._config)

    def _keep(self, step: int, line: dict[str, Any]) -> None:
        """Take in a line; the windows of a finding (finding.py), the first 25 and the last 50, stay whole."""
        self._steps[step] = line
        kept = self._kept[any(key.startswith("eval/") for key in line)]
        kept.append(step)
        if len(kept) > MOST_LINES:
            for at in kept[25:-50:2]:
                self._steps.pop(at, None)
            del kept[25:-50:2]
