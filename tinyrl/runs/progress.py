"""The progress display of a run: one line a step on standard error, and in a terminal a live bar below them.

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

from tinyrl.runs.metrics import TABLE
from tinyrl.runs.records import messages_of, to_float
from tinyrl.text import escape_control, one_line, redact


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
    """Print the result of a run on standard output. A closed pipe or a full disk does not change the exit code."""
    try:
        print(text, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is still buffered goes there when Python ends
        os.close(nowhere)


class Display:
    """Progress of one run. `silent`: of a process beside rank 0."""

    def __init__(self, *, num_steps: int, silent: bool = False) -> None:
        self.num_steps, self.silent = num_steps, silent
        self.console = Console(file=cast(TextIO, _Forgiving(sys.stderr)), highlight=False, emoji=False)
        self._first, self._started = 0, time.monotonic()
        self._bar: Progress | None = None

    def start(self, *, done: int = 0) -> None:
        """Start the bar, and the estimate of the time left, of a run of which `done` steps are done."""
        self._first, self._started = done, time.monotonic()
        if self.console.is_terminal and not self.silent:
            columns = (TextColumn("[bold]{task.description:10}"), BarColumn(bar_width=None), MofNCompleteColumn(),
                       TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())  # fmt: skip
            self._bar = Progress(*columns, console=self.console, expand=True)
            self._task = self._bar.add_task("step", total=self.num_steps, completed=done)
            self._bar.start()

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """Print the line of a finished step; pass@1 is left out where it equals the held-out reward."""
        found = [(metric.column, metrics.get(metric.key)) for metric in TABLE if metric.column]
        columns = {column: float(value) for column, value in found if isinstance(value, int | float)}
        if columns.get("pass@1") == columns.get("held-out"):
            columns.pop("pass@1", None)
        parts = [f"step {step}/{self.num_steps}", *(f"{column} {_short(value)}" for column, value in columns.items())]
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
        elif step > self._first:
            seconds = int((time.monotonic() - self._started) / (step - self._first) * (self.num_steps - step))
            hours = f"{seconds // 3600}:" if seconds >= 3600 else ""
            parts.append(f"{hours}{seconds % 3600 // 60:02d}:{seconds % 60:02d} left")
        self.note(" · ".join(parts))

    def sample(self, samples: list[dict[str, Any]]) -> None:
        """In a terminal, print an evaluation's greedy sample to the first prompt, with its reward."""
        shown = next((line for line in samples if line.get("kind") == "eval-greedy"), next(iter(samples), None))
        if self._bar is None or shown is None:
            return
        turns = [("prompt", str(shown.get("prompt", ""))), *messages_of(shown)]
        turns[-1] = (f"{turns[-1][0]} (reward {_short(to_float(shown.get('reward')))})", turns[-1][1])
        texts = (f"  {who}: {one_line(text, max(20, self.console.width - len(who) - 4))}" for who, text in turns)
        self.note("\n".join(texts))

    def phase(self, name: str) -> None:
        """Name the current part of a long step beside the bar."""
        if self._bar is not None:
            self._bar.update(self._task, description=name)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def note(self, text: str) -> None:
        """Print a line that stays: a warning, a choice made. Notes quote prompts and users' code."""
        if self.silent:
            return
        text = escape_control(redact(text))
        if self._bar is not None:
            self.console.print(text, markup=False, soft_wrap=True)
        else:  # as it is: in a notebook rich would make HTML of it
            print(text, file=self.console.file, flush=True)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
