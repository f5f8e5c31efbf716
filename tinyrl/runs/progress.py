"""The progress display of a run: one line a step, and in a terminal a live bar below them.

A terminal that is gone (a closed window, a broken pipe) never stops a run: metrics.jsonl is the record.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tinyrl.text import redact, visible

SHOWN = (
    ("reward", "reward/mean"),
    ("loss", "loss"),
    ("held-out", "eval/reward_mean"),
    ("pass@1", "eval/pass@1"),
    ("kl", "objective/kl"),
    ("accuracy", "rewards/accuracy"),
    ("margin", "rewards/margin"),
    ("entropy", "policy/entropy"),
    ("length", "completion/mean_length"),
    ("tokens/s", "tokens_per_second"),
)


class _Forgiving:
    """A stream that may be closed at the other end: what cannot be written is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            return

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


PHASE = "{:10}".format  # as wide as the longest, so that the bar stays where it is


def fitting(parts: list[str], room: int) -> str:
    """The first of `parts` on one line, as many as fit into `room` columns."""
    text = ""
    for part in parts:
        longer = f"{text} · {part}" if text else part
        if len(longer) > room:
            break
        text = longer
    return text


class Display:
    """Progress of one run, on standard error; results go to standard output. `silent`: of a process beside rank 0."""

    def __init__(self, *, num_steps: int, silent: bool = False) -> None:
        self.silent = silent
        self.console = Console(file=cast(TextIO, _Forgiving(sys.stderr)), highlight=False, emoji=False)
        self.num_steps, self._first, self._started = num_steps, 0, time.monotonic()
        self._latest: dict[str, float] = {}
        self._bar: Progress | None = None

    def start(self, *, done: int = 0) -> None:
        """Start drawing, and estimating the time left, for a run of which `done` steps are done."""
        self._first, self._started = done, time.monotonic()
        if self.console.is_terminal and not self.silent:
            columns = (
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),  # what the others leave
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self.console, transient=False, expand=True)
            self._task = self._bar.add_task(PHASE("step"), total=self.num_steps, completed=done)
            self._bar.start()

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """A line for a finished step, reward first; held-out numbers stay until there are newer ones.

        In a terminal it has the numbers that fit beside each other, and the bar shows the time left.
        """
        self._latest |= {
            label: float(metrics[key]) for label, key in SHOWN if isinstance(metrics.get(key), int | float)
        }
        numbers = [f"{label} {_short(self._latest[label])}" for label, _ in SHOWN if label in self._latest]
        parts = [f"step {step}/{self.num_steps}", *numbers]
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
            self._print(fitting(parts, self.console.width))
        else:
            self._print(" · ".join([*parts, self._time_left(step)]))

    def phase(self, what: str) -> None:
        """Name the current part of a long step (only where there is a bar to show it on)."""
        if self._bar is not None:
            self._bar.update(self._task, description=PHASE(what))

    def note(self, text: str) -> None:
        """A line that stays: a warning, a choice made."""
        self._print(text)

    def close(self) -> None:
        """Stop drawing; notes are still printed."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str) -> None:
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
