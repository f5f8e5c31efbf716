"""Charts: which panels a run has, how numbers become curves, and the layout."""

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.tools.report.runs import ppo_metrics, write_run
from tinyrl.runs.records import read_run
from tinyrl.tools.report.charts import hover_svg, spread, values_by_step
from tinyrl.tools.report.panels import (
    MOST_MARKS,
    Line,
    Panel,
    cells,
    curve_of,
    panels_of,
    picked,
    smoothed,
    thinned,
)


def test_ppo_adds_the_critic(tmp_path: Path) -> None:
    panels = {panel.title: panel for panel in panels_of(read_run(write_run(tmp_path / "run", ppo_metrics(40))))}
    assert {"Value loss", "Explained variance"} <= panels.keys()
    assert panels["Explained variance"].unit == "1 is best (cut at \u22121)"
    assert "Cut at the length limit" not in panels  # zero throughout
    assert [line.label for line in panels["Time by phase"].lines] == [
        "update", "rollout", "reference", "values", "reward", "other",
    ]  # fmt: skip


def test_reward_functions_are_told_from_reward_statistics(tmp_path: Path) -> None:
    line = {"step": 1, "reward/mean": 1.0, "reward/std": 0.1, "reward/dropped": 0.0, "reward/zero_spread_groups": 0.0}
    one = panels_of(read_run(write_run(tmp_path / "a", [{**line, "reward/sorting": 1.0}])))
    assert [panel.title for panel in one] == ["Reward", "Spread of rewards"]
    two = panels_of(
        read_run(write_run(tmp_path / "b", [{**line, "reward/a": 1.0, "reward/b": 2, "reward/dropped": 3}]))
    )
    assert [panel.title for panel in two] == ["Reward", "Spread of rewards", "Rewards dropped", "Reward by function"]
    assert [line.label for line in two[-1].lines] == ["a", "b"]


def test_a_run_on_pairs_shows_accuracy_and_loss_first_and_both_sides_together(tmp_path: Path) -> None:
    """A falling reward of both sides is seen beside the margin, which grows; nothing is drawn twice."""
    metrics = [
        {
            "step": step,
            "preference/loss": 0.7 - step / 10,
            "rewards/accuracy": 0.5 + step / 10,
            "rewards/margin": step / 10,
            "rewards/chosen": -step / 10,
            "rewards/rejected": -step / 5,
            "policy/chosen_logprobs": -10.0 - step,
            "policy/rejected_logprobs": -10.0 - 2 * step,
            "eval/loss": 0.7,
            "eval/accuracy": 0.5,
            "eval/rewards/chosen": -0.1,
        }
        for step in (1, 2)
    ]
    panels = panels_of(read_run(write_run(tmp_path / "run", metrics, config={"method": "dpo"})))
    titles = ["Accuracy", "Loss", "Margin", "Rewards of both sides", "Log-probabilities"]
    assert [panel.title for panel in panels] == titles
    lines = {panel.title: [line.label for line in panel.lines] for panel in panels}
    assert lines["Loss"] == lines["Accuracy"] == ["training", "held-out"]
    assert lines["Rewards of both sides"] == lines["Log-probabilities"] == ["chosen", "rejected"]


def test_smoothing_keeps_lines_and_gaps() -> None:
    line = [2.0 * i + 1 for i in range(40)]
    assert smoothed(line) == pytest.approx(line)
    gap = [math.nan if i == 20 else value for i, value in enumerate(line)]
    result = smoothed(gap)
    assert math.isnan(result[20])
    assert result[19] == pytest.approx(39.0)
    # half = 2, weights 3 2 1: around the spike of 6 at 10 the fit is the mean 6*3/(1+2+3+2+1) = 2
    spike = [6.0 if i == 10 else 0.0 for i in range(21)]
    assert smoothed(spike)[10] == pytest.approx(2.0)
    assert smoothed([5.0]) == [5.0]
    assert all(0 <= value <= 1 for value in smoothed([1.0, 0.0] * 20))


def test_only_long_noisy_series_are_smoothed_and_thinned() -> None:
    points = [(step, float(step % 2)) for step in range(10)]
    assert curve_of(points, smooth=True).bold == [float(step % 2) for step in range(10)]
    assert thinned([(step, float(step)) for step in range(1000)])[:2] == [(1, 0.5), (3, 2.5)]
    assert len(thinned([(step, 0.0) for step in range(123_457)])) <= 500
    assert curve_of([(1, 4.0), (2, math.nan)], smooth=True).end == 4.0


def test_labels_are_spread_in_order() -> None:
    assert spread([0.5, 0.51, 0.1], gap=0.1) == pytest.approx([0.5, 0.6, 0.1])
    assert spread([0.98, 1.0], gap=0.1) == pytest.approx([0.9, 1.0])
    assert spread([0.3], gap=0.1) == [0.3]


def test_the_grid_has_no_hole() -> None:
    for count in range(1, 16):
        places = cells(count)
        taken = [
            (row, column)
            for cell in places
            for row in range(cell.row, cell.row + cell.height)
            for column in range(cell.column, cell.column + cell.width)
        ]
        assert len(places) == count
        assert len(taken) == len(set(taken))
        assert sorted(taken) == [(row, column) for row in range(max(taken)[0] + 1) for column in range(3)]


def test_picked_points_keep_the_ends_and_are_themselves() -> None:
    few = [(1, 0.5), (2, math.nan)]
    assert picked(few) == few
    many = [(step, math.nan if step % 2 else float(step)) for step in range(1001)]
    some = picked(many)
    assert len(some) == MOST_MARKS
    assert (some[0], some[-1]) == ((0, 0.0), (1000, 1000.0))
    assert set(some) <= {point for point in many if point[0] % 2 == 0}
    assert {b - a for (a, _), (b, _) in pairwise(some)} == {10, 12}  # of 500 even steps, every fifth or sixth
    assert picked([(step, math.nan) for step in range(1001)]) == []
    assert picked([(step, 1.0 if step == 7 else math.nan) for step in range(1001)]) == [(7, 1.0)]


def test_held_out_rewards_by_function_stand_beside_the_verifier(tmp_path: Path) -> None:
    """The same function has the same colour in training and held out; the verifier only where it is something else."""
    line = {"reward/mean": 0.5, "reward/b": 0.5, "reward/c": 0.25, "eval/reward/a": 1.0, "eval/reward/b": 0.5}
    metrics = [{"step": 1, **line, "eval/reward_mean": 0.75, "eval/verifier_mean": 0.25}]
    panels = {panel.key: panel for panel in panels_of(read_run(write_run(tmp_path / "a", metrics)))}
    held, train = panels["eval/functions"], panels["reward/functions"]
    assert [(line.label, line.role, line.points) for line in held.lines] == [
        ("a", "1", [(1, 1.0)]), ("b", "2", [(1, 0.5)]), ("verifier", "other", [(1, 0.25)]),
    ]  # fmt: skip
    assert [(line.label, line.role) for line in train.lines] == [("b", "2"), ("c", "3")]
    assert all(line.marked for line in held.lines)
    assert not any(line.marked for line in train.lines)
    metrics = [{"step": 1, "eval/reward_mean": 0.5, "eval/verifier_mean": 0.5, "eval/reward/a": 0.5}]
    assert [panel.key for panel in panels_of(read_run(write_run(tmp_path / "b", metrics)))] == ["reward/mean"]


def test_values_on_hovering_are_those_of_all_lines() -> None:
    held = Line("held-out", "held", [(0, 0.25), (4, 0.5)], {4: (0.4, 0.6)})
    panel = Panel("k", "T", "u", [Line("training", "train", [(1, 0.3), (2, math.nan), (4, 0.31234)]), held])
    assert values_by_step(panel) == {
        0: "step 0\nheld-out 0.250",
        1: "step 1\ntraining 0.300",
        4: "step 4\ntraining 0.312\nheld-out 0.500 (0.400 to 0.600)",
    }
    svg = hover_svg(panel, x=40, y=10, width=100, height=60, span=(0, 4))
    # places 40, 65, 140: edges half-way between them
    assert re.findall(r'<rect x="([^"]*)" y="10" width="([^"]*)" height="60">', svg) == [
        ("40.0", "12.5"), ("52.5", "50.0"), ("102.5", "37.5"),
    ]  # fmt: skip
