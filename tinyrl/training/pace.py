"""The pace of a run's steps: one that takes far longer than usual says that the machine has other work."""

from __future__ import annotations

import statistics
from collections import deque

SLOWER = 3.0  # times the median of the steps before
FEWEST = 5  # steps that a median needs


class Pace:
    """Seconds of the last steps."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=20)

    def slowed(self, seconds: float) -> float | None:
        """How many times slower than usual a step was, where that is much; what is usual is then learnt anew."""
        usual = statistics.median(self.seconds) if len(self.seconds) >= FEWEST else None
        self.seconds.append(seconds)
        if usual is None or seconds <= SLOWER * usual:
            return None
        self.seconds.clear()
        return seconds / usual
