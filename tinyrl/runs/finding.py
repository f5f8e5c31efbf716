"""Findings of a run: what its metrics say is wrong, with figures, what shows it, and one thing to change.

A finding is a pure function of the rows of metrics.jsonl and the configuration, so that `tinyrl doctor RUN` says of
files what a run says of itself as warnings. Windows: the first tenth of the steps (5 to 25 of them) against the last
quarter (10 to 50). Thresholds are where runs that go well never are, by some margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

from tinyrl.runs.records import Points, Run, number

FEWEST_STEPS = 12  # of training, before anything is said
Row = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """name: what it is called; what: a sentence with figures; change: one thing to change; figures: by name.

    kind and rank say which lines of samples.jsonl show it: of the last step with lines of that kind, those that rank
    highest.
    """

    name: str
    what: str
    change: str
    figures: dict[str, float]
    kind: Literal["train", "eval"] = "train"
    rank: Callable[[Row], float] = field(default=lambda row: 0.0, repr=False, compare=False)


def early(points: Points) -> float:
    """The mean of the first tenth of the points, 5 to 25 of them; NaN where there are none."""
    return _mean(points[: min(25, max(5, len(points) // 10))])


def recent_points(points: Points) -> Points:
    """The last quarter of the points, 10 to 50 of them."""
    return points[-min(50, max(10, len(points) // 4)) :]


def recent(points: Points) -> float:
    """The mean of the last quarter of the points; NaN where there are none."""
    return _mean(recent_points(points))


def halfway(points: Points) -> float:
    """The mean of the points before the middle, as many as `early` takes."""
    return early(points[max(0, len(points) // 2 - min(25, max(5, len(points) // 10))) :])


def noise(points: Points) -> float:
    """The standard error of `recent`, from how far neighbouring points differ."""
    last = recent_points(points)
    steps = [(b - a) ** 2 for (_, a), (_, b) in pairwise(last)]
    return math.sqrt(fmean(steps) / 2 / len(last)) if steps else math.inf


def _mean(points: Points) -> float:
    return fmean(value for _, value in points) if points else math.nan


def has_steps(run: Run) -> bool:
    """Whether a run has trained for long enough that windows of it can be compared."""
    return len(run.finite("reward/mean")) >= FEWEST_STEPS


def of_unit_scale(run: Run) -> bool:
    """Whether the reward looks like one between 0 and 1."""
    means = run.finite("reward/mean")
    return all(0 <= value <= 1 for _, value in means) and early(run.finite("reward/std")) <= 0.6


def solved(run: Run) -> bool:
    """Whether a reward between 0 and 1 is 0.9 or more."""
    return of_unit_scale(run) and recent(run.finite("reward/mean")) >= 0.9


def near_top(run: Run) -> bool:
    """Whether the reward is about as high as it can be: solved, or on another scale a deviation above the start."""
    points, spread = run.finite("reward/mean"), early(run.finite("reward/std"))
    return solved(run) or (not of_unit_scale(run) and recent(points) > early(points) + spread)


def known(value: Any, otherwise: float) -> float:
    """A JSON value as a number; `otherwise` where it is none."""
    found = number(value)
    return otherwise if math.isnan(found) else found
