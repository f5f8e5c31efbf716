"""The table of `tinyrl eval` shows no NaN, and small numbers with their digits."""

import json
import math
from typing import Any

from tinyrl.cli.evaluate import render

NUMBERS = {"reward_mean": 0.5, "reward_ci": [0.4, 0.6], "mean_length": 6.0, "num_prompts": 64, "num_samples": 1}
NOTHING = {"reward_mean": math.nan, "reward_ci": [math.nan] * 2, "distinguishable": False, "left_out": 9}


def result(**more: Any) -> dict[str, Any]:
    return {"target": "run/step-000002", **NUMBERS, "greedy": {"reward_mean": 1.0}, **more}


def test_a_missing_number_is_never_nan_and_small_ones_keep_their_digits() -> None:
    rate = {"mean": math.nan, "ci": [math.nan] * 2, "ties": math.nan}
    one = result(num_prompts=1, reward_mean=math.nan, reward_ci=[math.nan] * 2)
    one |= {"other": {**one, "target": "b/step-000002"}, "difference": NOTHING, "win_rate": rate}
    assert "nan" not in render(one, as_json=False)
    assert json.loads(render(one, as_json=True))["reward_ci"] == [None, None]
    side = result(reward_mean=0.000321, reward_ci=[-0.0001, 0.0007], greedy={"reward_mean": 0.04})
    difference = {"reward_mean": -0.00012, "reward_ci": [-0.5, 0.00034], "distinguishable": False, "left_out": 0}
    text = render({**side, "other": side, "difference": difference, "win_rate": rate}, as_json=False)
    for shown in ("0.000321 (0.04)", "-0.0001 to 0.0007", "-0.00012 (95 % interval -0.500 to +0.00034"):
        assert shown in text
