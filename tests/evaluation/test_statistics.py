"""Statistics of an evaluation: intervals and how often they cover the truth, pass@k, two policies paired by prompt, and
held-out numbers of a reward model; by hand.
"""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tinyrl.evaluation.reward_model import label_metrics, pair_metrics, roc_auc
from tinyrl.evaluation.statistics import (
    interval,
    majority_passes,
    paired_difference,
    prompts_for_a_gain,
    share_interval,
    t_interval,
    verdict_metrics,
    win_rate,
)

NAN = math.nan


# ---- intervals ----


@pytest.mark.parametrize(("n", "kind"), [(3, "normal"), (16, "shares"), (60, "normal")])
def test_an_interval_covers_the_mean_as_often_as_it_says(n: int, kind: str) -> None:
    """Student's t for few (of three -1, 0, 1: t = 4.303, s = 1), the bootstrap from MANY on."""
    assert interval([-1.0, 0.0, 1.0]) == pytest.approx([-4.303 / 3**0.5, 4.303 / 3**0.5], abs=5e-4)
    rng, rounds, hits = random.Random(n), 2000 if n < 50 else 300, 0
    draws: dict[str, Callable[[], float]] = {
        "normal": lambda: rng.gauss(0.3, 2.0),
        "shares": lambda: 0.3 + (rng.randint(0, 8) - rng.randint(0, 8)) / 8,
    }
    for _ in range(rounds):
        low, high = interval([draws[kind]() for _ in range(n)])
        hits += low <= 0.3 <= high
    assert 0.91 <= hits / rounds <= 0.985  # the deviation is 0.5 to 1.3 %


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
        assert share_interval(values) == pytest.approx(ends, abs=5e-5)


def test_no_interval_has_a_width_of_0() -> None:
    """Equal shares say at least as much as as many samples; of other equal numbers nothing is known."""
    low, high = share_interval([1.0] * 64)
    assert (low, high) == (pytest.approx(64 / (64 + 1.959964**2)), 1.0)  # 0.943
    assert share_interval([0.0] * 64) == pytest.approx([0.0, 1 - low])
    low, high = share_interval([0.5] * 10)
    assert low == pytest.approx(0.5 - 0.29, abs=0.01)  # 0.5 t / sqrt(10 + t^2) with t = 2.262
    assert high == pytest.approx(1 - low)
    assert all(math.isnan(end) for end in interval([0.3 - 0.2, 0.4 - 0.3, 0.1]))  # equal but for rounding


def test_an_interval_ignores_missing_prompts_and_needs_two() -> None:
    assert share_interval([1.0, 0.0, NAN]) == share_interval([1.0, 0.0])
    assert all(math.isnan(end) for end in share_interval([0.5, NAN]))


# ---- verdicts ----


def test_pass_at_k_is_over_the_prompts_with_a_verdict() -> None:
    """Of four samples 1, 2 and 0 are right; of the last prompt nothing is known."""
    verdicts = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, *[math.nan] * 4]
    found = verdict_metrics(verdicts, None, 4, is_pass=lambda verdict: verdict == 1.0)
    assert found == {"pass@1": pytest.approx(3 / 12), "verifier_mean": pytest.approx(3 / 12), "pass@4": 2 / 3}
    assert verdict_metrics([math.nan], None, 1, is_pass=bool) == {}


def test_right_answers_in_two_spellings_are_one_vote_where_the_verifier_finds_them_equal() -> None:
    """Of five answers two are wrong and alike; in another prompt all are wrong."""
    verdicts = [1.0, 1.0, 1.0, 0.0, 0.0, *[0.0] * 5]
    answers = ["0.5", "2^{-1}", "x", "3", "3", *"01234"]
    how: Any = {"is_pass": lambda verdict: verdict == 1.0}
    apart = verdict_metrics(verdicts, answers, 5, **how)
    together = verdict_metrics(verdicts, answers, 5, equal_by_verdict=True, **how)
    assert (apart["majority@5"], together["majority@5"]) == (0.0, 0.5)


def test_the_most_frequent_answer_decides_and_ties_share() -> None:
    assert majority_passes(["a", "a", "b"], [True, True, False]) == 1.0
    assert majority_passes(["a", "b", "b"], [True, False, False]) == 0.0
    assert majority_passes(["a", "b"], [True, False]) == 0.5  # a tie shares the verdict
    assert majority_passes([None, None, "a"], [False, False, True]) == 1.0  # no answer, no vote
    assert majority_passes([None, None], [False, False]) == 0.0


# ---- two policies ----


def test_no_better_below_the_number_of_prompts_that_can_show_it() -> None:
    """Under policies alike five prompts all go one way in 2 / 2^5 = 6 % of cases, six in 3 %."""
    for n, verdict in ((1, False), (5, False), (6, True), (40, True)):
        difference = paired_difference([[1.0], [NAN]] * n, [[0.0], [9.0]] * n)
        assert (difference.reward_mean, difference.distinguishable) == (1.0, verdict)
        assert all(math.isnan(end) for end in difference.reward_ci)  # every prompt says the same: no spread
        assert paired_difference([[1.0]] * n + [[0.5]] * 90, [[0.0]] * n + [[0.5]] * 90).distinguishable is verdict
    same = paired_difference([[1.0]] * 40, [[1.0]] * 40)
    assert (same.reward_mean, same.distinguishable) == (0.0, False)


def test_samples_of_a_prompt_meet_each_other_and_a_tie_counts_half() -> None:
    """Prompt 1: 1 beats both 0s, 0 ties with both: 3/4. Prompt 2: both 2s tie with 2 and beat 1: 3/4. Prompt 3 has no
    value. Prompt 4: the 3 ties with 3 and loses to 4: 1/4. Half of all meetings are ties.
    """
    ours = [[1.0, 0.0], [2.0, 2.0], [NAN, NAN], [3.0, NAN]]
    rate = win_rate(ours, [[0.0, 0.0], [2.0, 1.0], [1.0, 1.0], [3.0, 4.0]])
    assert (rate.mean, rate.ties) == (pytest.approx((0.75 + 0.75 + 0.25) / 3), pytest.approx(0.5))


# ---- a reward model ----


def test_the_area_under_the_curve_counts_ordered_pairs_and_ties_half() -> None:
    assert roc_auc([0.35, 0.8], [0.1, 0.4]) == 0.75  # the example of scikit-learn's manual
    assert roc_auc([0.3, 0.5], [0.3]) == 0.75
    assert roc_auc([4.0], [5.0, 6.0]) == 0.0


def test_held_out_pairs_and_labels() -> None:
    """Differences 2, -1 and 0, of which the second is lost; a margin of 2 that is asked of one of 2."""
    found = pair_metrics(torch.tensor([3.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 1.0]), torch.zeros(3))
    assert (found["accuracy"], found["num_pairs"]) == (0.5, 3)
    assert found["margin"] == pytest.approx(1 / 3)
    assert found["loss"] == pytest.approx((math.log(1 + math.exp(-2)) + math.log(1 + math.e) + math.log(2)) / 3)
    asked = pair_metrics(torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([2.0], dtype=torch.float64))
    assert (asked["loss"], asked["margin"], asked["accuracy"]) == (pytest.approx(math.log(2)), 2.0, 1.0)
    found = label_metrics(torch.tensor([2.0, -1.0, 0.5, 0.0]), torch.tensor([1.0, 0.0, 0.0, 1.0]))
    assert found["margin"] == pytest.approx((2.0 + 0.0) / 2 - (-1.0 + 0.5) / 2)
    assert (found["accuracy"], found["auc"], found["num_rows"]) == (2.5 / 4, 0.75, 4)
    alone = label_metrics(torch.tensor([2.0, -1.0]), torch.tensor([1.0, 1.0]))
    assert (alone["accuracy"], {"margin", "auc"} & {*alone}) == (0.5, set())


def test_pairs_are_the_prompts_with_a_reward_on_both_sides() -> None:
    assert paired_difference([[1.0], [NAN], [1.0, NAN]], [[0.0], [1.0], [0.0, 0.0]]).pairs == 2
    assert paired_difference([[1.0], [2.0]], [[NAN], [NAN]]).pairs == 0


# ---- gains that few prompts cannot show ----

RIGHT_OR_WRONG = [0.0, 1.0, 1.0, 0.0]


def highest_is_above(values: list[float], prompts: int) -> bool:
    """Whether some evaluation of so many prompts, of these values, has an interval that ends below the highest one."""
    every = itertools.combinations_with_replacement(values, prompts)
    return any(t_interval(one)[1] < max(values) for one in every)


@pytest.mark.parametrize(
    ("values", "prompts", "needed"),
    [
        ([0.0, 1.0], 2, 5),
        ([0.0, 1.0], 4, 5),
        ([0.0, 1.0], 5, None),
        ([0.0, 0.5, 1.0], 2, 3),
        ([0.0, 0.5, 1.0], 3, None),
        ([i / 6 for i in range(7)], 2, 3),
        ([i / 7 for i in range(8)], 2, None),
        ([-3.0, 1.0], 4, 5),
    ],
)
def test_so_few_prompts_show_no_gain(values: list[float], prompts: int, needed: int | None) -> None:
    assert prompts_for_a_gain(values * 2, prompts=prompts, best=1.0) == needed
    assert highest_is_above(values, prompts) is (needed is None)
    assert needed is None or highest_is_above(values, needed)


@pytest.mark.parametrize(
    "rewards",
    [[0.1, 0.9, 0.2, 0.7], [1.0] * 8, [0.0, math.nan, 1.0, math.nan], []],
    ids=["differ", "equal", "NaN", "none"],
)
def test_rewards_that_do_not_tell_have_no_number_of_prompts(rewards: list[float]) -> None:
    assert prompts_for_a_gain(rewards, prompts=2, best=1.0) is None


def test_one_prompt_has_no_interval_and_any_better_reward_gains() -> None:
    assert prompts_for_a_gain(RIGHT_OR_WRONG, prompts=1, best=1.0) is None


def test_a_reward_that_can_go_higher_than_those_seen_can_gain() -> None:
    assert prompts_for_a_gain(RIGHT_OR_WRONG, prompts=2, best=1.0) == 5
    assert prompts_for_a_gain(RIGHT_OR_WRONG, prompts=2, best=10.0) is None
