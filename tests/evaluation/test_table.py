"""The table of `tinyrl eval`: what it shows, and what it says instead of a number that is not there."""

import json
import math
from typing import Any

from tinyrl.evaluation.table import render, render_comparison

NUMBERS: dict[str, Any] = {
    "reward_mean": 0.5,
    "reward_median": 0.5,
    "reward_std": 0.1,
    "reward_ci": [0.4, 0.6],
    "mean_length": 6.0,
    "num_prompts": 64,
    "num_samples": 1,
}


def result(**more: Any) -> dict[str, Any]:
    return {"target": "run/step-000002", **NUMBERS, "greedy": {"reward_mean": 1.0}, **more}


def first_words(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines()]


def test_a_run_without_a_verifier_has_no_row_for_it() -> None:
    assert first_words(render(result(), as_json=False))[1:] == [
        "reward_mean",
        "reward_median",
        "reward_std",
        "mean_length",
        "(greedy",
    ]


def test_several_rewards_have_a_row_each_and_one_has_none() -> None:
    several = result(**{"reward/short": 0.25, "reward/right": 0.75})
    assert "reward/short                         0.250" in render(several, as_json=False)
    assert "reward/right" in render(several, as_json=False)
    assert "reward/right" not in render(result(**{"reward/right": 0.5}), as_json=False)


def test_few_prompts_are_said_and_nan_is_not() -> None:
    one = result(num_prompts=1, reward_std=math.nan, reward_ci=[math.nan, math.nan])
    difference = {"reward_mean": 0.25, "reward_ci": [math.nan] * 2, "distinguishable": False, "left_out": 9}
    one |= {"other": {**one, "target": "b/step-000002"}, "difference": difference}
    text = render(one, as_json=False)
    assert "reward 95 % interval unknown: too few prompts or no spread)" in text
    assert "difference +0.250 (95 % interval unknown: too few prompts or no spread, paired by prompt): not dist" in text
    assert "left out: 9 held-out prompts that b/step-000002 was trained on" in text
    assert "warning: fewer than 30 prompts say little" in text
    assert "nan" not in text
    assert json.loads(render(one, as_json=True))["reward_ci"] == [None, None]


def test_no_reward_on_either_side_is_said() -> None:
    difference = {"reward_mean": math.nan, "reward_ci": [math.nan] * 2, "distinguishable": False, "left_out": 0}
    text = render(result(other=result(), difference=difference), as_json=False)
    assert text.splitlines()[-1] == "difference unknown: no prompt has a reward on both sides"


def test_what_a_trainer_measures_is_shown_beside_the_other_side() -> None:
    numbers = {"accuracy": 0.75, "num_pairs": 40}
    other = {"target": "b/step-000004", "held_out": {"accuracy": 0.5, "num_pairs": 40}, "trained_on": 7}
    text = render({"target": "a/step-000004", "held_out": numbers, "other": other}, as_json=False)
    assert text.splitlines() == [
        " " * 18 + "           a/step-000004           b/step-000004",
        "accuracy                             0.750                   0.500",
        "num_pairs                               40                      40",
        "warning: b/step-000004 was trained on 7 of the held-out prompts",
    ]


def test_win_rates_and_prompts_that_were_trained_on() -> None:
    rates = {
        "reward": {"mean": 0.625, "ci": [0.5, 0.75], "ties": 0.0},
        "verifier": {"mean": 0.5, "ci": [math.nan] * 2, "ties": 1.0},
        "reward/size": {"mean": math.nan, "ci": [math.nan] * 2, "ties": math.nan},
    }
    lines = render(result(win_rate=rates, trained_on=3), as_json=False).splitlines()
    assert lines[-4:] == [
        "win rate by reward 0.625 (95 % interval 0.500 to 0.750)",
        "win rate by verifier 0.500 (95 % interval unknown: too few prompts or no spread, 100% ties)",
        "win rate by reward/size unknown: no prompt has a value on both sides",
        "warning: run/step-000002 was trained on 3 of these prompts",
    ]


def test_a_comparison_has_a_row_for_the_baseline_and_each_policy() -> None:
    rates = {"reward": {"mean": 0.75, "ci": [0.5, 1.0], "ties": 0.0}}
    first = {"policy": "runs/text", **NUMBERS, "reward_median": 1.25, "kl": 0.0}
    rows = [first, {**first, "policy": "runs/short", "kl": 2.5, "win_rate": rates}]
    header, *lines, note = render_comparison(rows, as_json=False).splitlines()
    assert header.split() == ["policy", "reward", "median", "KL", "length", "wins", "by", "reward"]
    assert lines[0].split() == ["runs/text", "0.500", "(0.400", "to", "0.600)", "1.250", "0.000", "6.0", "-"]
    assert lines[1].split()[5:] == ["1.250", "2.500", "6.0", "0.750", "(0.500", "to", "1.000)"]
    assert len({len(line) for line in (header, *lines)}) == 1
    assert "64 prompts x 1" in note
    assert json.loads(render_comparison(rows, as_json=True))[0]["policy"] == "runs/text"
