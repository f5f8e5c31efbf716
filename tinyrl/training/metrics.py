"""The metrics of one step: known once, averaged over its optimizer steps, or timed; one line of metrics.jsonl."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any


class StepMetrics:
    """Values and sums are JSON and go into a checkpoint, so that a step resumed inside its update says the same;
    times do not.
    """

    def __init__(self, values: dict[str, Any] | None = None, sums: dict[str, list[float]] | None = None) -> None:
        self.values = {} if values is None else values
        self.sums = {} if sums is None else sums  # metric -> [sum, count] over the optimizer steps
        self.seconds: dict[str, float] = {}

    def start_update(self, metrics: dict[str, float]) -> None:
        """What the rollout had to say, and no optimizer step yet."""
        self.values, self.sums = dict(metrics), {}

    def add(self, metrics: dict[str, float]) -> None:
        """Metrics of one optimizer step; the line shows their mean (non-finite ones are left out)."""
        for key, value in metrics.items():
            if math.isfinite(value):
                total = self.sums.setdefault(key, [0.0, 0])
                total[0] += value
                total[1] += 1

    def end_update(self, metrics: dict[str, float]) -> None:
        """The means, and what else the step came to."""
        self.values |= {key: total / count for key, (total, count) in self.sums.items()} | metrics
        self.sums = {}

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a block to `time/<phase>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def line(self, **measured: float) -> dict[str, Any]:
        """Everything, with `measured`, the total of the times (evaluations are not part of a step), tokens a second."""
        total = sum(seconds for phase, seconds in self.seconds.items() if phase != "evaluation")
        times = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        line = {**self.values, **times, "time/total": total, **measured}
        tokens = self.values.get("completion/tokens")
        return {**line, "tokens_per_second": tokens / total} if tokens and total else line
