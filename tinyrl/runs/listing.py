"""The checkpoints of a run as a list, for `tinyrl checkpoints RUN`. Reads files only, and loads no tensor."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from tinyrl.runs.checkpoint import checkpoint_step, list_checkpoints, problem_with
from tinyrl.runs.records import read_steps
from tinyrl.runs.run_dir import RunDir
from tinyrl.text import number, one_line, visible

MOST_PATH, MOST_METRIC = 4096, 40  # characters that are shown


@dataclass(frozen=True)
class Listed:
    """One checkpoint: its step, bytes on disk, the run's best_metric at that step (None: not evaluated there), and what
    is wrong with it (None: it verifies).
    """

    name: str
    step: int
    size: int
    metric: float | None
    problem: str | None


def list_verified(run: RunDir) -> list[Listed]:
    """Every checkpoint of a run, oldest first, each verified against its manifest."""
    name = run.read_config().run.best_metric
    steps = read_steps(run.metrics, []) if run.metrics.is_file() else {}
    values = {step: line[name] for step, line in steps.items() if isinstance(line.get(name), int | float)}
    return [
        Listed(folder.name, step, _bytes(folder), values.get(step), problem_with(folder))
        for folder in list_checkpoints(run.checkpoints)
        for step in [checkpoint_step(folder)]
    ]


def render(run: RunDir, listed: list[Listed]) -> str:
    """A table, and what to do with the newest that verifies. Everything in it may be shown."""
    path = one_line(shlex.quote(str(run.path)), MOST_PATH)
    if not listed:
        return f"{path} has no checkpoint yet"
    metric = one_line(run.read_config().run.best_metric.removeprefix("eval/"), MOST_METRIC)
    sound = [one for one in listed if one.problem is None]
    known = [one.metric for one in listed if one.metric is not None]
    rows = [f"{'checkpoint':14} {'step':>8} {'size':>10} {metric:>14}  verifies"]
    for one in listed:
        value = "-" if one.metric is None else number(one.metric, decimals=4)
        marks = "yes" if one.problem is None else f"no: {visible(one.problem)}"
        marks += ", best" if one.problem is None and known and one.metric == max(known) else ""
        rows.append(f"{one.name:14} {one.step:>8} {one.size / 1e6:>7.1f} MB {value:>14}  {marks}")
    if not sound:
        return "\n".join([*rows, "", "none verifies: a resume begins from the start"])
    newest = one_line(shlex.quote(str(run.checkpoints / sound[-1].name)), MOST_PATH)
    return "\n".join([*rows, "", f"resume    tinyrl train --resume {path}", f"evaluate  tinyrl eval {newest}"])


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
