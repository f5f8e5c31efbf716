"""Two policies on the same prompts: differences and win rates by hand."""

import math
import random

import pytest

from tinyrl.evaluation.statistics import paired_difference, win_rates


def test_no_better_below_the_number_of_prompts_that_can_show_it() -> None:
    """Under policies alike five prompts all go one way in 2 / 2^5 = 6 % of cases, six in 3 %."""
    for n, verdict in ((1, False), (5, False), (6, True), (40, True)):
        difference = paired_difference([1.0, math.nan] * n, [0.0, 9.0] * n)
        assert (difference["reward_mean"], difference["distinguishable"]) == (1.0, verdict)
        assert all(math.isnan(end) for end in difference["reward_ci"])  # every prompt says the same: no spread
        assert paired_difference([1.0] * n + [0.5] * 90, [0.0] * n + [0.5] * 90)["distinguishable"] is verdict
    same = paired_difference([1.0] * 40, [1.0] * 40)
    assert (same["reward_mean"], same["distinguishable"]) == (0.0, False)


@pytest.mark.parametrize(("n", "p"), [(3, 0.5), (6, 0.5), (10, 0.95), (60, 0.95)])
def test_two_policies_alike_are_told_apart_in_no_more_than_5_percent(n: int, p: float) -> None:
    rng, told, rounds = random.Random(n), 0, 1000
    for _ in range(rounds):
        ours, other = ([float(rng.random() < p) for _ in range(n)] for _ in range(2))
        told += paired_difference(ours, other)["distinguishable"]
    assert told / rounds <= 0.07  # the standard deviation is 0.7 %


NAN = math.nan


def test_samples_of_a_prompt_meet_each_other_and_a_tie_counts_half() -> None:
    """Prompt 1: 1 beats both 0s, 0 ties with both: 3/4. Prompt 2: both 2s tie with 2 and beat 1: 3/4. Prompt 3 has no
    value. Prompt 4: the 3 ties with 3 and loses to 4: 1/4. Half of all meetings are ties.
    """
    ours = dict(reward=[[1.0, 0.0], [2.0, 2.0], [NAN, NAN], [3.0, NAN]])
    other = dict(reward=[[0.0, 0.0], [2.0, 1.0], [1.0, 1.0], [3.0, 4.0]])
    rate = win_rates(ours, other)["reward"]
    assert rate["mean"] == pytest.approx((0.75 + 0.75 + 0.25) / 3)
    assert rate["ties"] == pytest.approx(0.5)
    assert win_rates(other, ours)["reward"]["mean"] == pytest.approx(1 - rate["mean"])


def test_each_judge_of_both_sides_has_a_rate_with_an_interval() -> None:
    ours = dict(reward=[[1.0]] * 40, verifier=[[0.5]] * 40, alone=[[1.0]] * 40)
    other = dict(reward=[[0.0]] * 30 + [[2.0]] * 10, verifier=[[0.5]] * 40)
    rates = win_rates(ours, other)
    assert rates.keys() == {"reward", "verifier"}
    assert rates["verifier"]["mean"] == 0.5
    assert rates["verifier"]["ci"] == pytest.approx([0.348, 0.652], abs=1e-3)  # 0.5 t / sqrt(40 + t^2), t = 2.023
    assert rates["verifier"]["ties"] == 1.0
    assert rates["reward"]["mean"] == 0.75
    assert rates["reward"]["ci"] == pytest.approx([0.598, 0.858], abs=1e-3)  # Wilson's of 30 in 40
    assert rates["reward"]["ties"] == 0.0


def test_without_a_value_on_both_sides_the_rate_is_unknown() -> None:
    rate = win_rates(dict(reward=[[NAN], [1.0]]), dict(reward=[[1.0], [NAN]]))["reward"]
    assert all(math.isnan(value) for value in (rate["mean"], *rate["ci"], rate["ties"]))
