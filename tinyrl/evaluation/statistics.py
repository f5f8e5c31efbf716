"""Statistics of an evaluation: means with 95 % intervals, pass@k and majority@k, two policies paired by prompt.
A value that is NaN does not apply, and is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np
from scipy.special import stdtrit

from tinyrl.nan import mean, numbers

TAIL = 0.025  # beyond either end of a 95 % interval
MANY = 50  # values from which on a percentile bootstrap covers its 95 %; with 3 values it covers 74 %, with 8 89 %
FEWEST = 6  # differing prompts that can show a difference: all go one way by chance in 2 / 2^6 = 3 % of cases
T = TypeVar("T")
EQUAL = 1e-9  # relative difference up to which values are equal but for rounding


def grouped(values: list[T], size: int) -> list[list[T]]:
    """Split values into groups of `size`, in order."""
    return [values[i : i + size] for i in range(0, len(values), size)]


def all_equal(values: Sequence[float]) -> bool:
    """Return whether values differ by no more than rounding, relative to the largest."""
    return max(values) - min(values) <= EQUAL * max(abs(value) for value in values)


def share_interval(values: Sequence[float]) -> list[float]:
    """Return [low, high] of the mean over prompts of shares, one each: samples of one prompt are not independent.

    For values that are shares by their kind, those of a prompt's samples that are right or that win; other values have
    `interval`, also where all happen to be between 0 and 1. NaN for fewer than two.

    Wilson's score interval (JASA 22, 1927, p. 209) of a share p of n:
    (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n). For values other than 0 and 1 with variance s^2, n is
    n p (1 - p) / s^2 (Korn and Graubard, Survey Methodology 24, 1998; n where all are equal) and z Student's t.
    Resampling 64 prompts of which 61 are right covers the truth in 83 % of cases, and would call all right certain.
    """
    valid = numbers(values)
    assert all(0.0 <= value <= 1.0 for value in valid), "a share is from 0 to 1"
    if len(valid) < 2:
        return [math.nan, math.nan]
    share = mean(valid)
    trials = float(len(valid))
    z = NormalDist().inv_cdf(1 - TAIL)
    if not {*valid} <= {0.0, 1.0}:
        z = float(stdtrit(len(valid) - 1, 1 - TAIL))
        if not all_equal(valid):
            trials = len(valid) * share * (1 - share) / float(np.var(valid))
    middle = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return [max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)]


def interval(values: Sequence[float]) -> list[float]:
    """Return [low, high] of the mean of any values: of few mean -+ t s / sqrt(n) (Student's t with n - 1 degrees of
    freedom), of MANY the percentiles of 2,000 bootstrapped means. NaN for fewer than two values or all equal ones.
    """
    valid = numbers(values)
    if len(valid) < 2 or all_equal(valid):
        return [math.nan, math.nan]
    if len(valid) >= MANY:
        means = np.random.default_rng(0).choice(np.array(valid), (2000, len(valid))).mean(1)
        return [float(q) for q in np.quantile(means, [TAIL, 1 - TAIL])]
    return t_interval(valid)


def t_interval(values: Sequence[float]) -> list[float]:
    """Return [low, high] of the mean, mean -+ t s / sqrt(n) with Student's t of n - 1 degrees of freedom; NaN for fewer
    than two values, or all equal ones.
    """
    if len(values) < 2 or all_equal(values):
        return [math.nan, math.nan]
    half = float(stdtrit(len(values) - 1, 1 - TAIL) * np.std(values, ddof=1)) / math.sqrt(len(values))
    return [mean(values) - half, mean(values) + half]


def prompts_for_a_gain(rewards: Sequence[float], *, prompts: int, best: float) -> int | None:
    """Return how many prompts it takes for an evaluation to be above the interval of an earlier one (run.patience), of
    rewards like these, where so many `prompts` never are; None where they can be, and where these rewards do not tell.

    Of rewards that take few values, no two nearer than d, from l to the highest seen or `best`: if not all are equal,
    the t interval ends lowest where one is l + d and the others l, at l + d (1 + t) / n, with Student's t of n - 1
    degrees of freedom. Where even that reaches the highest reward, no later mean is above it. Rewards most of which
    differ may lie nearer to each other. `share_interval` never reaches 1 while a share is below.
    """
    valid = numbers(rewards)
    values = sorted({*valid})
    if prompts < 2 or len(values) < 2 or 2 * len(values) > len(valid):
        return None
    nearest = min(b - a for a, b in pairwise(values))
    reach = (max(best, values[-1]) - values[0]) / nearest

    def can_gain(count: int) -> bool:
        return count >= MANY or (1 + float(stdtrit(count - 1, 1 - TAIL))) / count < reach

    if can_gain(prompts):
        return None
    return next(count for count in range(prompts, MANY + 1) if can_gain(count))


# ---- verdicts on the samples of each prompt ----


def verdict_metrics(
    verdicts: list[float],
    answers: list[Any] | None,
    samples: int,
    *,
    is_pass: Callable[[float], bool],
    equal_by_verdict: bool = False,
) -> dict[str, Any]:
    """Compute pass@1 (pass@k and majority@k for k samples), the verifier's mean score, the number of distinct answers.

    Over the prompts with a verdict (NaN: the row has no answer to compare with); nothing where no prompt has one.
    equal_by_verdict: the right answers to a prompt are one answer, as for a verifier to which 0.5 and 2^{-1} are equal.
    Unbiased pass@k of n samples, c of them right, is 1 - C(n - c, k) / C(n, k) (2107.03374, Eq. 1), here for k = 1, n.
    """
    groups = grouped(verdicts, samples)
    judged = [i for i, group in enumerate(groups) if numbers(group)]
    if not judged:
        return {}
    passed = [[is_pass(verdict) for verdict in groups[i]] for i in judged]
    given = [] if answers is None else [grouped(answers, samples)[i] for i in judged]
    if equal_by_verdict:
        given = [
            [("right", at) if ok else answer for answer, ok in zip(group, passed[at], strict=True)]
            for at, group in enumerate(given)
        ]
    out: dict[str, Any] = {"pass@1": mean([1.0 - group.count(False) / len(group) for group in passed])}
    out["verifier_mean"] = mean(verdicts)
    if samples > 1:
        out[f"pass@{samples}"] = mean([float(any(group)) for group in passed])
    if given:
        out["distinct_answers"] = len({answer for group in given for answer in group} - {None})
    if given and samples > 1:
        out[f"majority@{samples}"] = mean([majority_passes(a, g) for a, g in zip(given, passed, strict=True)])
    return out


def majority_passes(answers: Sequence[Any], passed: Sequence[bool]) -> float:
    """Return whether the most frequent answer is right (ties share the verdict). None does not vote."""
    votes = Counter(a for a in answers if a is not None)
    winners = [a for a, n in votes.items() if n == max(votes.values())]
    right = [max(ok for a, ok in zip(answers, passed, strict=True) if a == winner) for winner in winners]
    return mean(right) if right else 0.0


# ---- two policies on the same prompts ----


@dataclass(frozen=True)
class PairedDifference:
    """Mean difference of two policies' mean rewards, paired by prompt.

    pairs: prompts with a reward on both sides; distinguishable: whether the difference is more than chance.
    """

    reward_mean: float
    reward_ci: list[float]
    pairs: int
    distinguishable: bool


@dataclass(frozen=True)
class WinRate:
    """How often a policy is preferred to another, with an interval over prompts, and the share of ties."""

    mean: float
    ci: list[float]
    ties: float


def paired_difference(ours: list[list[float]], other: list[list[float]]) -> PairedDifference:
    """Compute the mean difference of the mean rewards by prompt, with an interval; ours, other: the rewards of each
    prompt's samples.

    pairs: prompts with a reward on both sides, over which the mean is; distinguishable: at least FEWEST prompts differ,
    and the interval excludes 0 or all differences are equal.
    """
    pairs = [mean(mine) - mean(theirs) for mine, theirs in zip(ours, other, strict=True)]
    valid, (low, high) = numbers(pairs), interval(pairs)
    apart = low > 0.0 or high < 0.0 or (bool(valid) and all_equal(valid))
    enough = sum(pair != 0.0 for pair in valid) >= FEWEST
    return PairedDifference(
        reward_mean=mean(pairs),
        reward_ci=[low, high],
        pairs=len(valid),
        distinguishable=enough and apart,
    )


def win_rate(ours: list[list[float]], other: list[list[float]]) -> WinRate:
    """Compute how often ours is preferred, with an interval over prompts, and the ties. Within a prompt every sample of
    ours meets every sample of the other side; a tie counts half. NaN values meet nobody.
    """
    shares = []
    ties = []
    for mine, theirs in zip(ours, other, strict=True):
        if pairs := [(a, b) for a in numbers(mine) for b in numbers(theirs)]:
            won = sum(a > b for a, b in pairs)
            tied = sum(a == b for a, b in pairs)
            shares.append((won + 0.5 * tied) / len(pairs))
            ties.append(tied / len(pairs))
    return WinRate(mean=mean(shares), ci=share_interval(shares), ties=mean(ties))
