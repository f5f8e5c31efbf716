"""The table of `tinyrl eval` shows no NaN, small numbers with their digits, and fits the terminal."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from tinyrl.cli.evaluate import render, table_lines
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.evaluation.result import (
    Against,
    ComparisonResult,
    EvalSide,
    TargetResult,
    TrainerMetrics,
)
from tinyrl.evaluation.statistics import PairedDifference, WinRate

NUMBERS = {"reward_mean": 0.5, "reward_ci": [0.4, 0.6], "mean_length": 6.0, "num_prompts": 64, "num_samples": 1}
RATE = WinRate(mean=0.5, ci=[0.4, 0.6], ties=0.0)


def side_of(target: str = "run/step-000002", *, greedy: dict[str, Any] | None = None, **more: Any) -> EvalSide:
    """Return a policy that was sampled, with more metrics or others."""
    found = Evaluation({**NUMBERS, **more}, greedy={"reward_mean": 1.0} if greedy is None else greedy)
    return EvalSide(target, sampled=found)


def paired(side: EvalSide, other: EvalSide, difference: PairedDifference, *, rate: WinRate = RATE) -> TargetResult:
    against = Against(difference=difference, win_rate=rate, left_out=0)
    return TargetResult(replace(side, against=against), other)


def shown(side: EvalSide, other: EvalSide | None = None) -> str:
    """Render a target and what it is compared with."""
    return render(TargetResult(side, other), as_json=False)


def test_a_missing_number_is_never_nan_and_small_ones_keep_their_digits() -> None:
    unknown = [math.nan, math.nan]
    nothing = PairedDifference(reward_mean=math.nan, reward_ci=unknown, pairs=0, distinguishable=False)
    no_rate = WinRate(mean=math.nan, ci=unknown, ties=math.nan)
    one = side_of(num_prompts=1, reward_mean=math.nan, reward_ci=unknown)
    result = paired(one, replace(one, target="b/step-000002"), nothing, rate=no_rate)
    assert "nan" not in render(result, as_json=False)
    assert json.loads(render(result, as_json=True))["reward_ci"] == [None, None]
    side = side_of(reward_mean=0.000321, reward_ci=[-0.0001, 0.0007], greedy={"reward_mean": 0.04})
    difference = PairedDifference(reward_mean=-0.00012, reward_ci=[-0.5, 0.00034], pairs=64, distinguishable=False)
    text = render(paired(side, side, difference, rate=no_rate), as_json=False)
    for part in ("0.000321 (0.04)", "-0.0001 to 0.0007", "-0.00012 (95 % interval -0.500 to +0.00034"):
        assert part in text


def test_a_column_is_as_wide_as_its_widest_cell() -> None:
    assert table_lines(["a", "base"], {"mean": ["1 to 2", "3"], "k": ["4", "5"]}, None) == [
        "           a  base",
        "mean  1 to 2     3",
        "k          4     5",
    ]


def test_names_are_shortened_from_their_beginning_where_they_have_no_room() -> None:
    name = "some-run/step-000060-again"  # 26 characters: 1 + 2 * 28 are 57 columns
    assert table_lines([name, name], {"k": ["1", "2"]}, 57)[0] == f"   {name}  {name}"
    assert table_lines([name, name], {"k": ["1", "2"]}, 56)[0] == "   …step-000060-again  …step-000060-again"


def test_columns_without_room_are_a_table_below() -> None:
    cells = {"k": ["1111", "2222", "3333"]}
    assert table_lines(["a", "b", "c"], cells, 13) == [
        "      a     b",
        "k  1111  2222",
        "",
        "      c",
        "k  3333",
    ]


def test_the_intervals_of_greedy_completions_are_a_line_of_their_own() -> None:
    side = side_of(greedy={"reward_mean": 1.0, "reward_ci": [0.9, 1.0]})
    lines = [line.split() for line in shown(side).splitlines()]
    assert ["reward_mean", "0.500", "(1.000)"] in lines
    assert ["reward_ci", "0.400", "to", "0.600"] in lines
    assert ["reward_ci,", "greedy", "0.900", "to", "1.000"] in lines


def compared(*, pairs: int, dropped: int, greedy: int) -> str:
    """Render two sides on 64 prompts, of which the second one has samples without a reward."""
    metrics = {**NUMBERS, "dropped": dropped}
    other = EvalSide("b/step-000002", Evaluation(metrics, greedy={"dropped": greedy}, why_dropped="agent died"))
    difference = PairedDifference(reward_mean=0.1, reward_ci=[0.0, 0.2], pairs=pairs, distinguishable=False)
    return render(paired(side_of(dropped=0, greedy={"dropped": 0}), other, difference), as_json=False)


@pytest.mark.parametrize(("interval", "is_said"), [([-1.0, -0.2], True), ([0.2, 1.0], True), ([-0.2, 1.0], False),
                                                   ([math.nan, math.nan], False)])  # fmt: skip
def test_an_interval_without_0_that_shows_no_difference_has_the_reason(interval: list[float], is_said: bool) -> None:
    difference = PairedDifference(reward_mean=0.4, reward_ci=interval, pairs=64, distinguishable=False)
    text = render(paired(side_of(), side_of(), difference), as_json=False)
    assert ("fewer than 6 prompts" in text) is is_said


def test_dropped_samples_are_a_warning_with_their_side_and_reason() -> None:
    text = compared(pairs=61, dropped=3, greedy=2)
    warnings = [line for line in text.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    for part in ("b/step-000002", "3 of 64", "2 of 64", "agent died"):
        assert part in warnings[0]
    assert "61 of 64" in text


def test_without_dropped_samples_there_is_no_warning_and_no_count_of_pairs() -> None:
    text = compared(pairs=64, dropped=0, greedy=0)
    assert "warning" not in text
    assert "of 64" not in text


def kl_caption(*names: str, several: bool = False) -> str:
    """Render sides with a KL; return the part of the caption about it."""
    sides = [side_of(name, kl=2.0) for name in names]
    text = render(ComparisonResult(sides), as_json=False) if several else shown(*sides)
    return text.partition("KL in nats")[2].partition(")")[0]


def test_a_row_of_kl_has_a_caption_that_says_whose_start_it_is_to() -> None:
    assert "where it started" in kl_caption("a")
    assert "where each started" in kl_caption("a", "b")
    assert "where a started" in kl_caption("a", "base")  # both columns are to the reference of a
    assert "where each started" in kl_caption("a", "b", "c", several=True)


def test_without_a_row_of_kl_there_is_no_caption_of_it() -> None:
    assert "KL" not in shown(side_of(), side_of())


def test_measures_against_references_of_their_own_have_a_caption() -> None:
    held: dict[str, Any] = {"loss": 0.5, "accuracy": 0.75, "num_pairs": 64}
    caption = "each one's own reference"
    own = TrainerMetrics(held, own_reference=True)
    assert caption in shown(EvalSide("a", measured=own), EvalSide("b", measured=own))
    assert caption not in shown(EvalSide("a", measured=TrainerMetrics(held)))  # of sft, which has none


def test_a_comparison_says_whose_rows_reward_and_limit_it_uses() -> None:
    several = ComparisonResult([side_of(name) for name in ("baseline", "a", "b")])
    assert "generation.max_new_tokens of baseline" in render(several, as_json=False)
    assert "generation.max_new_tokens of run/step-000002" in shown(side_of(), side_of("b"))
    assert "max_new_tokens" not in shown(side_of())  # nothing is compared
