"""The progress display of a run: one line a step, and in a terminal columns under a header with a live bar below them.

A terminal that is gone (a closed window, a broken pipe) never stops a run: metrics.jsonl is the record.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tinyrl.runs.metrics import METRICS
from tinyrl.runs.records import messages_of, number
from tinyrl.text import one_line, redact, visible

COLUMNS = {metric.column: key for key, metric in METRICS.items() if metric.column}
WIDTH = 10  # of a column
PHASE = "{:10}".format  # as wide as the longest, so that the bar stays where it is


class _Forgiving:
    """A stream that may be closed at the other end: what cannot be written is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tell(text: str) -> None:
    """Print the result of a run on standard output. A reader that is gone, or a full disk behind it, changes nothing
    about how the run ended, so the exit code stays what it is.
    """
    try:
        print(text, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is still buffered goes there when Python ends
        os.close(nowhere)


class Display:
    """Progress of one run, on standard error; results go to standard output. `silent`: of a process beside rank 0."""

    def __init__(self, *, num_steps: int, silent: bool = False) -> None:
        self.silent = silent
        self.console = Console(file=cast(TextIO, _Forgiving(sys.stderr)), highlight=False, emoji=False)
        self.num_steps, self._first, self._started = num_steps, 0, time.monotonic()
        self._latest: dict[str, float] = {}
        self._header: list[str] = []  # the columns that stand above the lines
        self._passes = False  # whether pass@1 has been another number than the held-out reward
        self._bar: Progress | None = None

    def start(self, *, done: int = 0) -> None:
        """Start drawing, and estimating the time left, for a run of which `done` steps are done."""
        self._first, self._started = done, time.monotonic()
        if self.console.is_terminal and not self.silent:
            bar = BarColumn(bar_width=None)  # what the others leave
            columns = (TextColumn("[bold]{task.description}"), bar, MofNCompleteColumn(), TimeElapsedColumn(),
                       TextColumn("left"), TimeRemainingColumn())  # fmt: skip
            self._bar = Progress(*columns, console=self.console, transient=False, expand=True)
            self._task = self._bar.add_task(PHASE("step"), total=self.num_steps, completed=done)
            self._bar.start()

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """A line for a finished step; held-out numbers stay until there are newer ones, and pass@1 is left out as long
        as it is the held-out reward. In a terminal the numbers that fit are columns.
        """
        known = {label: metrics.get(key) for label, key in COLUMNS.items()}
        self._latest |= {label: float(value) for label, value in known.items() if isinstance(value, int | float)}
        self._passes = self._passes or self._latest.get("pass@1") != self._latest.get("held-out")
        labels = [label for label in COLUMNS if label in self._latest and (label != "pass@1" or self._passes)]
        shown = {label: _short(self._latest[label]) for label in labels}
        if self._bar is None:
            self._print_numbers(step, shown, self._time_left(step))
            return
        self._bar.update(self._task, completed=step)
        first = max(len("step"), 2 * len(str(self.num_steps)) + 1)
        labels = [*shown][: (self.console.width - first) // WIDTH]
        if step == 0:  # before training: fewer numbers than the lines that follow
            self._print_numbers(step, {label: shown[label] for label in labels})
            return
        rows = [[f"{step}/{self.num_steps}", *(shown[label] for label in labels)]]
        if labels != self._header:
            self._header = labels
            rows.insert(0, ["step", *labels])
        lines = (f"{place:>{first}}" + "".join(f"{cell:>{WIDTH}}" for cell in cells) for place, *cells in rows)
        self.note("\n".join(lines))

    def _print_numbers(self, step: int, shown: dict[str, str], *more: str) -> None:
        numbers = (f"{label} {value}" for label, value in shown.items())
        self.note(" · ".join([f"step {step}/{self.num_steps}", *numbers, *more]))

    def sample(self, samples: list[dict[str, Any]]) -> None:
        """In a terminal, an evaluation's greedy sample to the first prompt: what it reads, writes, and its reward."""
        shown = next((line for line in samples if line.get("kind") == "eval-greedy"), next(iter(samples), None))
        if self._bar is None or shown is None:
            return
        turns = [("prompt", str(shown.get("prompt", ""))), *messages_of(shown)]
        turns[-1] = (f"{turns[-1][0]} (reward {_short(number(shown.get('reward')))})", turns[-1][1])
        width = self.console.width
        self.note("\n".join(f"  {who}: {one_line(text, max(20, width - len(who) - 4))}" for who, text in turns))

    def phase(self, what: str) -> None:
        """Name the current part of a long step (only where there is a bar to show it on)."""
        if self._bar is not None:
            self._bar.update(self._task, description=PHASE(what))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def note(self, text: str) -> None:
        """A line that stays: a warning, a choice made."""
        if self.silent:
            return
        text = visible(redact(text))  # notes quote prompts and people's code
        if self._bar is not None:
            self.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=self.console.file, flush=True)

    def _time_left(self, step: int) -> str:
        done = step - self._first
        if done <= 0:
            return "starting"
        seconds = int((time.monotonic() - self._started) / done * (self.num_steps - step))
        hours, minutes = f"{seconds // 3600}:" if seconds >= 3600 else "", seconds % 3600 // 60
        return f"{hours}{minutes:02d}:{seconds % 60:02d} left"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
