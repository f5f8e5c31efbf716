"""Metrics of a step: what its phases measured, means over its optimizer steps, and seconds by phase."""

from __future__ import annotations

import math
import time
from typing import Any


class StepMetrics:
    """Metrics of a step, which begins when they are made; seconds: those that it took before, as RunState has them."""

    def __init__(self, values: dict[str, Any] | None = None, *, seconds: dict[str, float] | None = None) -> None:
        before = dict(seconds or {})
        self.values = {} if values is None else values  # also in a checkpoint before the evaluation after the step
        self.sums: dict[str, list[float]] = {}  # metric -> [sum, count] over the optimizer steps
        self.began = time.perf_counter() - before.pop("total", 0.0)
        self.seconds = before  # by phase

    def add(self, metrics: dict[str, float]) -> None:
        """Add metrics of one optimizer step; the line has their mean (non-finite ones are left out)."""
        for key, value in metrics.items():
            if math.isfinite(value):
                total = self.sums.setdefault(key, [0.0, 0])
                total[0] += value
                total[1] += 1

    def line(self, **measured: float) -> dict[str, Any]:
        """Return all metrics, with `measured`, tokens per second, and times: of each phase, and in all without the
        evaluation. `time/other` is what belongs to no phase, such as the advantages.
        """
        phases = sum(seconds for phase, seconds in self.seconds.items() if phase != "evaluation")
        evaluation = self.seconds.get("evaluation", 0.0)
        total = time.perf_counter() - self.began - evaluation if phases else 0.0  # 0: an evaluation by itself
        times = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        times |= {"time/other": max(0.0, total - phases), "time/total": total}
        line = {**self.values, **times, **measured}
        tokens = self.values.get("completion/tokens")
        return {**line, "tokens_per_second": tokens / total} if tokens and total else line
