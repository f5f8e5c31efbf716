"""The table of `tinyrl eval`: a row for each metric that there is, and no NaN."""

import json
import math
from typing import Any

from tinyrl.cli.evaluate import render

NUMBERS = {"reward_mean": 0.5, "reward_ci": [0.4, 0.6], "mean_length": 6.0, "num_prompts": 64, "num_samples": 1}
NOTHING = {"reward_mean": math.nan, "reward_ci": [math.nan] * 2, "distinguishable": False, "left_out": 9}


def result(**more: Any) -> dict[str, Any]:
    return {"target": "run/step-000002", **NUMBERS, "greedy": {"reward_mean": 1.0}, **more}


def test_a_row_is_a_metric_that_there_is() -> None:
    several = {"reward/short": 0.25, "reward/right": 0.75, "pass@1": 0.25, "environment/turns": 2.0}
    header, *rows, note = render(result(**several), as_json=False).splitlines()
    assert header.split() == ["run/step-000002"]
    names = ["reward_mean", "reward_ci", "mean_length", "reward/short", "reward/right", "pass@1", "turns"]
    assert [row.split()[0] for row in rows] == names
    assert rows[0].split() == ["reward_mean", "0.500", "(1.000)"]
    assert rows[1].split() == ["reward_ci", "0.400", "to", "0.600"]
    assert "64 prompts x 1" in note
    assert "reward/right" not in render(result(**{"reward/right": 0.5}), as_json=False)


def test_a_missing_number_is_never_nan_and_small_ones_keep_their_digits() -> None:
    rates = {"reward": {"mean": math.nan, "ci": [math.nan] * 2, "ties": math.nan}}
    one = result(num_prompts=1, reward_mean=math.nan, reward_ci=[math.nan] * 2)
    one |= {"other": {**one, "target": "b/step-000002"}, "difference": NOTHING, "win_rate": rates, "trained_on": 3}
    text = render(one, as_json=False)
    assert "nan" not in text
    for line in ("difference unknown", "left out: 9", "win rate by reward unknown", "trained on 3", "fewer than 30"):
        assert line in text
    assert json.loads(render(one, as_json=True))["reward_ci"] == [None, None]
    side = result(reward_mean=0.000321, reward_ci=[-0.0001, 0.0007], greedy={"reward_mean": 0.04})
    difference = {"reward_mean": -0.00012, "reward_ci": [-0.5, 0.00034], "distinguishable": False, "left_out": 0}
    text = render({**side, "other": side, "difference": difference, "win_rate": {}}, as_json=False)
    for shown in ("0.000321 (0.04)", "-0.0001 to 0.0007", "-0.00012 (95 % interval -0.500 to +0.00034"):
        assert shown in text


def test_what_a_trainer_measures_is_shown_beside_the_other_side() -> None:
    numbers = {"accuracy": 0.75, "num_pairs": 40}
    other = {"target": "b/step-000004", "held_out": {"accuracy": 0.5, "num_pairs": 40}, "trained_on": 7}
    text = render({"target": "a/step-000004", "held_out": numbers, "other": other}, as_json=False)
    assert [line.split() for line in text.splitlines()] == [
        ["a/step-000004", "b/step-000004"],
        ["accuracy", "0.750", "0.500"],
        ["num_pairs", "40", "40"],
        ["warning:", "b/step-000004", "was", "trained", "on", "7", "of", "the", "held-out", "prompts"],
    ]


def test_several_policies_are_columns_each_against_the_first() -> None:
    rates = {"reward": {"mean": 0.75, "ci": [0.5, 1.0], "ties": 0.25}}
    difference = {"reward_mean": 0.25, "reward_ci": [-0.1, 0.6], "distinguishable": False, "left_out": 0}
    others = [result(target=name, win_rate=rates, difference=difference) for name in ("b", "c")]
    header, *_, note, b1, b2, c1, c2 = render([result(target="a"), *others], as_json=False).splitlines()
    assert header.split() == ["a", "b", "c"]
    assert "KL" in note
    assert b1 == "b: difference +0.250 (95 % interval -0.100 to +0.600, paired by prompt): not distinguishable"
    assert b2 == "b: win rate by reward 0.750 (95 % interval 0.500 to 1.000, 25% ties)"
    assert (c1[0], c2[0]) == ("c", "c")
    assert json.loads(render(others, as_json=True))[0]["target"] == "b"
