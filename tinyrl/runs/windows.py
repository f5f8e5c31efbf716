"""Figures of a run's records that findings share: means over windows, and what several conditions ask.

Windows: the first tenth of the steps (5 to 25) against the last quarter (10 to 50). A missing metric or setting is NaN,
for which no condition holds.
"""

from __future__ import annotations

import math
from statistics import fmean

from tinyrl.runs.records import Points, RunRecords, to_float

# ---- windows ----


def mean(points: Points) -> float:
    """Return the mean of the values; NaN without any."""
    return fmean(value for _, value in points) if points else math.nan


def early(points: Points, *, halfway: bool = False) -> float:
    """Return the mean of the first tenth of the points, 5 to 25 of them; halfway: of those before the middle."""
    size = min(25, max(5, len(points) // 10))
    start = max(0, len(points) // 2 - size) if halfway else 0
    return mean(points[start : start + size])


def last_quarter(points: Points) -> Points:
    """Return the last quarter of the points, 10 to 50 of them."""
    return points[-min(50, max(10, len(points) // 4)) :]


def recent(points: Points) -> float:
    """Return the mean over the last quarter of the points."""
    return mean(last_quarter(points))


# ---- figures that several findings share ----


def setting(run: RunRecords, name: str) -> float:
    return to_float(run.setting(name))


def method_of(run: RunRecords) -> str:
    return run.setting("method") or "grpo"


def reward_is_between_0_and_1(run: RunRecords) -> bool:
    means = run.finite("reward/mean")
    return all(0 <= value <= 1 for _, value in means) and early(run.finite("reward/std")) <= 0.6


def is_solved(run: RunRecords) -> bool:
    """Return whether a reward between 0 and 1 is at 0.9 or above."""
    return reward_is_between_0_and_1(run) and recent(run.finite("reward/mean")) >= 0.9


def is_near_top(run: RunRecords) -> bool:
    """Return whether the reward is solved or, on another scale, a deviation above its start."""
    if reward_is_between_0_and_1(run):
        return is_solved(run)
    means = run.finite("reward/mean")
    return recent(means) > early(means) + early(run.finite("reward/std"))


def largest_std(run: RunRecords) -> float:
    """Return the largest standard deviation of the rewards in a step; 0 without any."""
    return max((value for _, value in run.finite("reward/std")), default=0.0)


def is_constant(run: RunRecords) -> bool:
    """Return whether every reward was the same, and the task's verifier does not call all of it right."""
    verified = run.finite("eval/verifier_mean")
    verifier_disagrees = bool(verified) and verified[-1][1] < 0.9
    all_right = is_solved(run) and not verifier_disagrees
    return bool(run.finite("reward/std")) and largest_std(run) < 1e-6 and not all_right


def kl_from_reference(run: RunRecords) -> float:
    """Return the recent KL in nats per response; held out where training has none, the last value of few."""
    points = run.finite("objective/kl") or run.finite("eval/kl")
    if not points:
        return math.nan
    return recent(points) if len(points) > 10 else points[-1][1]


def kl_per_token(run: RunRecords) -> float:
    """Return the KL from the reference in nats per token, by the recent mean length."""
    return kl_from_reference(run) / max(recent(run.finite("completion/mean_length")), 1e-9)


def is_far_from_reference(run: RunRecords) -> bool:
    return kl_from_reference(run) >= 10 and kl_per_token(run) >= 0.5
