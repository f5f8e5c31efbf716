"""Two policies on the same prompts: the difference of their rewards, and how often one is preferred to the other."""

from __future__ import annotations

import math
from typing import Any

from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.evaluation.intervals import interval, mean, mean_interval


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
