"""Checks that both sides do the same work: tokens sampled a step.

Ratios of times mean nothing without it, so they are not shown when it fails (--force shows them).
"""

from __future__ import annotations

import math
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

TOKENS_APART, LOSS_APART = 0.05, 1e-4


@dataclass(frozen=True)
class Check:
    """One comparison: a sentence with the result, and whether it passed."""

    passed: bool
    sentence: str


def within(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether two means are at most a twentieth apart."""
    return abs(statistics.mean(ours) / statistics.mean(theirs) - 1) <= TOKENS_APART


def same_tokens(ours: Sequence[float], theirs: Sequence[float]) -> Check:
    """Tokens of a step. Lengths are random: where a few steps cannot resolve 5 %, two standard errors count instead."""
    means = statistics.mean(ours), statistics.mean(theirs)
    errors = [statistics.stdev(x) / math.sqrt(len(x)) if len(x) > 1 else math.inf for x in (ours, theirs)]
    error = math.hypot(*errors)
    apart = means[0] / means[1] - 1
    sentence = f"tokens a step: tinyrl {means[0]:.0f}, peer {means[1]:.0f} ({apart:+.1%}; allowed 5 %)"
    if within(ours, theirs):
        return Check(True, sentence)
    if error > TOKENS_APART / 2 * means[1] and abs(means[0] - means[1]) <= 2 * error:
        return Check(True, f"{sentence}; within the noise of {len(ours)} and {len(theirs)} steps, too few to tell 5 %")
    return Check(False, sentence)


def report(checks: Sequence[Check], *, options: Namespace) -> bool:
    """Print the checks; returns whether ratios may be shown."""
    for check in checks:
        print(f"- same work, {'passed' if check.passed else 'FAILED'}: {check.sentence}")
    passed = all(check.passed for check in checks)
    if not passed:
        print(f"- the sides do not do the same work: ratios {'shown by --force' if options.force else 'not shown'}")
    return passed or options.force
