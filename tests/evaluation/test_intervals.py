"""Intervals of a mean over prompts: how often they cover the truth, and what they are at the ends."""

import math
import random
from collections.abc import Callable

import pytest

from tinyrl.evaluation.statistics import interval, mean_interval


@pytest.mark.parametrize(
    ("n", "kind"),
    [(3, "normal"), (8, "normal"), (3, "uniform"), (32, "uniform"), (5, "shares"), (16, "shares"), (60, "normal")],
)
def test_an_interval_covers_the_mean_as_often_as_it_says(n: int, kind: str) -> None:
    """Student's t for few (of three -1, 0, 1: t = 4.303, s = 1), the bootstrap from MANY on."""
    assert interval([-1.0, 0.0, 1.0]) == pytest.approx([-4.303 / 3**0.5, 4.303 / 3**0.5], abs=5e-4)
    rng, rounds = random.Random(n), 2000 if n < 50 else 300
    draws: dict[str, Callable[[], float]] = {
        "normal": lambda: rng.gauss(0.3, 2.0),
        "uniform": lambda: rng.uniform(-0.7, 1.3),
        "shares": lambda: 0.3 + (rng.randint(0, 8) - rng.randint(0, 8)) / 8,
    }
    hits = 0
    for _ in range(rounds):
        low, high = interval([draws[kind]() for _ in range(n)])
        hits += low <= 0.3 <= high
    assert 0.91 <= hits / rounds <= 0.985  # of three of a uniform distribution 92 %; the deviation is 0.5 to 1.3 %


def test_wilson_against_published_values() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), Table I, method 3, without continuity correction
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (successes, trials), ends in published.items():
        values = [1.0] * successes + [0.0] * (trials - successes)
        assert mean_interval(values) == pytest.approx(ends, abs=5e-5)


@pytest.mark.parametrize(("n", "p"), [(64, 0.95), (64, 0.5), (512, 0.93)])
def test_an_interval_of_graded_samples_covers_the_truth_as_often_as_it_says(n: int, p: float) -> None:
    """Summed over every count of right ones."""
    covered = 0.0
    for right in range(n + 1):
        low, high = mean_interval([1.0] * right + [0.0] * (n - right))
        covered += math.comb(n, right) * p**right * (1 - p) ** (n - right) * (low <= p <= high)
    assert 0.93 <= covered <= 0.98


@pytest.mark.parametrize(("n", "samples", "p"), [(5, 4, 0.98), (8, 4, 0.5), (64, 8, 0.9)])
def test_an_interval_of_means_of_samples_covers_the_truth_as_often_as_it_says(n: int, samples: int, p: float) -> None:
    rng, hits, rounds = random.Random(n), 0, 1000
    for _ in range(rounds):
        low, high = mean_interval([sum(rng.random() < p for _ in range(samples)) / samples for _ in range(n)])
        hits += low <= p <= high
    assert hits / rounds >= 0.92  # the standard deviation is 0.7 %


def test_no_interval_has_a_width_of_0() -> None:
    """Equal shares say at least as much as as many samples; of other equal numbers nothing is known."""
    low, high = mean_interval([1.0] * 64)
    assert (low, high) == (pytest.approx(64 / (64 + 1.959964**2)), 1.0)  # 0.943
    assert mean_interval([0.0] * 64) == pytest.approx([0.0, 1 - low])
    low, high = mean_interval([0.5] * 10)
    assert low == pytest.approx(0.5 - 0.29, abs=0.01)  # 0.5 t / sqrt(10 + t^2) with t = 2.262
    assert high == pytest.approx(1 - low)
    for n in (9, 90):
        assert all(math.isnan(end) for value in (0.0, -3.0) for end in interval([value] * n))
    assert all(math.isnan(end) for end in interval([0.3 - 0.2, 0.4 - 0.3, 0.1]))  # equal but for rounding


def test_an_interval_ignores_missing_prompts_and_needs_two() -> None:
    assert mean_interval([1.0, 0.0, math.nan]) == mean_interval([1.0, 0.0])
    assert mean_interval([2.0, 4.0, math.nan]) == mean_interval([2.0, 4.0])
    for few in ([], [1.0], [0.5, math.nan]):
        assert all(math.isnan(end) for end in mean_interval(few))
