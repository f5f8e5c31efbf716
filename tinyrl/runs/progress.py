"""The progress display of a run: one line per step on standard error, and in a terminal a status line below them.

A terminal that is gone (a closed window, a broken pipe) never stops a run: metrics.jsonl is the record.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from typing import Any

from tinyrl.formatting import format_clock, format_short
from tinyrl.runs.metrics import TABLE
from tinyrl.runs.records import MOST_MESSAGES, to_float, turns_of, without_middle
from tinyrl.text import escape_control, one_line
from tinyrl.urls import mask_url

CLEAR = "\r\x1b[K"  # the line that the cursor is in


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
        self.num_steps = num_steps
        self.silent = silent
        self._live = False
        self._step = 0
        self._first = 0
        self._started = time.monotonic()
        self._status = ""
        self._named = False

    def start(self, *, done: int = 0) -> None:
        """Start the status line, and the estimate of the time left, of a run of which `done` steps are done."""
        self._step = done
        self._first = done
        self._started = time.monotonic()
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not self.silent

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """Print the line of a finished step, without metrics that are unknown, and in a terminal without the last ones
        where it is too narrow; pass@1 is left out where it equals the held-out reward.
        """
        found = {metric.column: to_float(metrics.get(metric.key)) for metric in TABLE if metric.column}
        columns = {column: value for column, value in found.items() if math.isfinite(value)}
        if columns.get("pass@1") == columns.get("held-out"):
            columns.pop("pass@1", None)
        place = f"step {step}/{self.num_steps}"
        known = [f"{column} {format_short(value)}" for column, value in columns.items()]
        left = list[str]()
        if step > self._first:
            seconds = int((time.monotonic() - self._started) / (step - self._first) * (self.num_steps - step))
            left.append(f"{format_clock(seconds)} left")
        self._step = step
        self._status = ""  # of the step that is done
        room = shutil.get_terminal_size().columns if self._live else math.inf
        while known and len(" · ".join([place, *known, *left])) > room:
            known.pop()
        self.note(" · ".join([place, *known, *left]))

    def sample(self, samples: list[dict[str, Any]]) -> None:
        """In a terminal, print an evaluation's greedy sample to the first prompt, with its reward."""
        shown = next((line for line in samples if line.get("kind") == "eval-greedy"), next(iter(samples), None))
        if not self._live or shown is None:
            return
        turns, omitted = without_middle(turns_of(shown), MOST_MESSAGES)
        named = [("prompt", str(shown.get("prompt", ""))), *((turn.speaker, turn.text) for turn in turns)]
        if omitted:
            named.insert(1 + len(turns) // 2, ("...", f"{omitted} messages left out"))
        named[-1] = (f"{named[-1][0]} (reward {format_short(to_float(shown.get('reward')))})", named[-1][1])
        width = shutil.get_terminal_size().columns
        self.note("\n".join(f"  {who}: {one_line(text, max(20, width - len(who) - 4))}" for who, text in named))

    def phase(self, name: str) -> None:
        """Name the current part of a long step in the status line; without one, in a line of its own, the first."""
        if not (self._live or self._named):
            self.note(f"step {self._step}/{self.num_steps}: {name} ...")
        self._named = True
        if self._live:
            status = f"step {self._step + 1}/{self.num_steps}: {name}"
            self._status = one_line(status, shutil.get_terminal_size().columns - 1)
            self._write(CLEAR + self._status)

    def close(self) -> None:
        if self._live:
            self._write(CLEAR)
        self._live = False
        self._status = ""

    def note(self, text: str) -> None:
        """Print a line that stays: a warning, a choice made. Notes quote prompts and user code."""
        if not self.silent:
            text = escape_control(mask_url(text))
            self._write(f"{CLEAR}{text}\n{self._status}" if self._live else f"{text}\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
