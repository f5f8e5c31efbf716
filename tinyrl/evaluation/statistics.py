"""Statistics of an evaluation: means with 95 % intervals, pass@k and majority@k, and two policies paired by prompt.

Intervals are Wilson's for 0/1 values, Student's t for few others, else the bootstrap.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tinyrl.evaluation.evaluate import Evaluation

INTERVAL = 0.95
TAIL = (1 - INTERVAL) / 2
FEWEST = 2  # values that an interval needs
MANY = 50  # values from which on the percentile bootstrap covers as much as it says; of 3 it covers 74 %, of 8 89 %


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of no values."""
    return float(sum(values) / len(values)) if values else math.nan


def mean_interval(values: Sequence[float]) -> list[float]:
    """[low, high] of the mean reward over prompts, one value a prompt: samples of one prompt are not independent.

    Where every value is 0 or 1 it is Wilson's: resampling 64 prompts of which 61 are right covers the truth in 83 % of
    cases, and would call all right certain. NaN values are left out; with fewer than two others both ends are NaN.
    """
    kept = [v for v in values if not math.isnan(v)]
    if len(kept) >= FEWEST and all(v in (0.0, 1.0) for v in kept):
        return wilson_interval(int(sum(kept)), len(kept))
    return interval(kept)


def interval(values: Sequence[float]) -> list[float]:
    """Of the mean of values of any kind, paired differences too: by Student's t where there are few. NaN as above."""
    kept = [v for v in values if not math.isnan(v)]
    return t_interval(kept) if len(kept) < MANY else bootstrap_interval(kept)


def wilson_interval(successes: int, trials: int) -> list[float]:
    """Wilson's score interval of a share p = successes / n: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).

    Wilson, JASA 22 (1927), p. 209.
    """
    assert 0 <= successes <= trials
    assert trials > 0
    z, share = NormalDist().inv_cdf(1 - TAIL), successes / trials
    middle = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return [max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)]


def t_interval(values: Sequence[float]) -> list[float]:
    """mean -+ t s / sqrt(n), with Student's t of n - 1 degrees of freedom and the deviation s (unbiased)."""
    if len(values) < FEWEST:
        return [math.nan, math.nan]
    middle, spread = mean(values), float(np.std(values, ddof=1))
    half = t_quantile(len(values) - 1) * spread / math.sqrt(len(values))
    return [middle - half, middle + half]


@lru_cache
def t_quantile(freedom: int) -> float:
    """The t between whose two signs INTERVAL of Student's distribution lies: with t = sqrt(freedom) tan(angle) its
    density is that of the angle, cos(angle)^(freedom - 1), which is summed here.
    """
    angles = np.linspace(0.0, math.pi / 2, 100_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(INTERVAL * below[-1], below, angles)))


def bootstrap_interval(values: Sequence[float], *, resamples: int = 2000) -> list[float]:
    means = np.random.default_rng(0).choice(np.array(values), (resamples, len(values))).mean(1)
    return [float(q) for q in np.quantile(means, [TAIL, 1 - TAIL])]


# ---- what a verifier says of the samples of each prompt ----


def verdict_metrics(
    verdicts: list[float], answers: list[Any] | None, samples: int, *, is_pass: Callable[[float], bool]
) -> dict[str, Any]:
    """pass@1 (pass@k and majority@k for k samples), the verifier's mean score, the number of distinct answers.

    Over the prompts with a verdict (NaN: the row has no answer to compare with); nothing where no prompt has one.
    """
    starts = [i for i in range(0, len(verdicts), samples) if not all(map(math.isnan, verdicts[i : i + samples]))]
    if not starts:
        return {}
    groups = [[is_pass(v) for v in verdicts[i : i + samples]] for i in starts]
    out: dict[str, Any] = {"pass@1": mean([pass_at_k(len(g), sum(g), 1) for g in groups])}
    out["verifier_mean"] = mean([v for v in verdicts if not math.isnan(v)])
    if samples > 1:
        out[f"pass@{samples}"] = mean([pass_at_k(len(g), sum(g), samples) for g in groups])
    if answers is not None:
        said = [answers[i : i + samples] for i in starts]
        out["distinct_answers"] = len({a for group in said for a in group if a is not None})
        if samples > 1:
            out[f"majority@{samples}"] = mean([majority_passes(a, g) for a, g in zip(said, groups, strict=True)])
    return out


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased pass@k from n samples of which c passed: 1 - C(n - c, k) / C(n, k). Chen et al. (2107.03374) Eq. 1."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority_passes(answers: Sequence[Any], passed: Sequence[bool]) -> float:
    """Whether the most frequent answer is right (ties share the verdict). Completions without an answer do not vote."""
    votes = Counter(a for a in answers if a is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [a for a, n in votes.items() if n == most]
    return mean([max(ok for a, ok in zip(answers, passed, strict=True) if a == w) for w in winners])


# ---- two policies on the same prompts ----


def paired_difference(ours: Evaluation, other: Evaluation) -> dict[str, Any]:
    """Mean reward difference prompt by prompt, with its interval; distinguishable when that is known and without 0."""
    pairs = [a - b for a, b in zip(ours.by_prompt, other.by_prompt, strict=True) if not math.isnan(a - b)]
    low, high = interval(pairs)
    return {"reward_mean": mean(pairs), "reward_ci": [low, high], "distinguishable": low > 0.0 or high < 0.0}


def win_rates(ours: Evaluation, other: Evaluation) -> dict[str, dict[str, Any]]:
    """Of each judge that both sides have: how often ours is preferred, with an interval over prompts, and the ties.

    Within a prompt every sample of ours meets every sample of the other side; a tie counts half. NaN values meet
    nobody, and a prompt without a meeting is left out.
    """
    return {
        judge: _win_rate([_meetings(*both) for both in zip(values, other.values[judge], strict=True)])
        for judge, values in ours.values.items()
        if judge in other.values
    }


def _meetings(ours: list[float], other: list[float]) -> tuple[float, float]:
    """(share won, ties counting half; share of ties) of the meetings of one prompt's samples; NaN without any."""
    pairs = [(a, b) for a in ours for b in other if not math.isnan(a - b)]
    won, tied = sum(a > b for a, b in pairs), sum(a == b for a, b in pairs)
    return ((won + 0.5 * tied) / len(pairs), tied / len(pairs)) if pairs else (math.nan, math.nan)


def _win_rate(meetings: list[tuple[float, float]]) -> dict[str, Any]:
    met = [both for both in meetings if not math.isnan(both[0])]
    shares = [share for share, _ in met]
    return {"mean": mean(shares), "ci": mean_interval(shares), "ties": mean([ties for _, ties in met])}
