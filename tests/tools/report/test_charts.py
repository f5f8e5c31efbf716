"""Charts: which panels a run has, how numbers become curves, and the layout."""

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.tools.report.runs import write_run
from tinyrl.runs.metrics import Metric
from tinyrl.runs.records import read_run
from tinyrl.tools.report.charts import hover_svg, spread
from tinyrl.tools.report.panels import MOST_BARS, Line, Panel, cells, panels_of, picked, smoothed


def panels(folder: Path, metrics: list[dict[str, Any]], **config: Any) -> dict[str, Panel]:
    return {panel.metric.title: panel for panel in panels_of(read_run(write_run(folder, metrics, **config)))}


def labels(panel: Panel) -> list[str]:
    return [line.label for line in panel.lines]


def test_ppo_adds_the_critic(tmp_path: Path) -> None:
    line = {"value/loss": 4.0, "completion/truncated": 0.0, "time/update": 1.1, "time/rollout": 0.5, "time/total": 1.9}
    metrics = [{"step": i, **line, "value/explained_variance": i / 60 - 9 / (i + 1)} for i in range(1, 91)]
    found = panels(tmp_path / "run", metrics)
    assert [*found] == ["Value loss", "Explained variance", "Time by phase"]  # nothing that is zero throughout
    assert found["Explained variance"].metric.unit == "1 is best (cut at \u22121)"
    assert labels(found["Time by phase"]) == ["update", "rollout", "other"]
    assert {len(line.points) for line in found["Time by phase"].lines} == {MOST_BARS}


def test_reward_functions_are_told_from_reward_statistics(tmp_path: Path) -> None:
    line = {"step": 1, "reward/mean": 1.0, "reward/std": 0.1, "reward/dropped": 0.0, "reward/zero_spread_groups": 0.0}
    assert [*panels(tmp_path / "a", [{**line, "reward/sorting": 1.0}])] == ["Reward", "Spread of rewards"]
    two = panels(tmp_path / "b", [{**line, "reward/a": 1.0, "reward/b": 2, "reward/dropped": 3}])
    assert [*two] == ["Reward", "Spread of rewards", "Rewards dropped", "Reward by function"]
    assert labels(two["Reward by function"]) == ["a", "b"]


def test_a_run_on_pairs_shows_accuracy_and_loss_first_and_both_sides_together(tmp_path: Path) -> None:
    keys = "preference/loss rewards/accuracy rewards/margin rewards/chosen rewards/rejected policy/chosen_logprobs"
    keys += " policy/rejected_logprobs eval/loss eval/accuracy eval/rewards/chosen"
    metrics = [{"step": step, **dict.fromkeys(keys.split(), step / 10)} for step in (1, 2)]
    found = panels(tmp_path / "run", metrics, config={"method": "dpo"})
    assert [*found] == ["Accuracy", "Loss", "Margin", "Rewards of both sides", "Log-probabilities"]
    assert labels(found["Loss"]) == labels(found["Accuracy"]) == ["training", "held-out"]
    assert labels(found["Rewards of both sides"]) == labels(found["Log-probabilities"]) == ["chosen", "rejected"]


def test_held_out_rewards_by_function_stand_beside_the_verifier(tmp_path: Path) -> None:
    """The same function has the same colour in training and held out; the verifier only where it is something else."""
    line = {"reward/mean": 0.5, "reward/b": 0.5, "reward/c": 0.25, "eval/reward/a": 1.0, "eval/reward/b": 0.5}
    found = panels(tmp_path / "a", [{"step": 1, **line, "eval/reward_mean": 0.75, "eval/verifier_mean": 0.25}])
    held, train = found["Held-out reward by function"], found["Reward by function"]
    assert [(line.label, line.role, line.points) for line in held.lines] == [
        ("a", "1", [(1, 1.0)]), ("b", "2", [(1, 0.5)]), ("verifier", "other", [(1, 0.25)]),
    ]  # fmt: skip
    assert [(line.label, line.role) for line in train.lines] == [("b", "2"), ("c", "3")]
    assert all(line.measured for line in held.lines)
    metrics = [{"step": 1, "eval/reward_mean": 0.5, "eval/verifier_mean": 0.5, "eval/reward/a": 0.5}]
    assert [*panels(tmp_path / "b", metrics)] == ["Reward"]


def test_smoothing_keeps_lines_and_gaps() -> None:
    line = [2.0 * i + 1 for i in range(40)]
    assert smoothed(line) == pytest.approx(line)
    result = smoothed([math.nan if i == 20 else value for i, value in enumerate(line)])
    assert math.isnan(result[20])
    assert result[19] == pytest.approx(39.0)
    # half = 2, weights 3 2 1: around the spike of 6 at 10 the fit is the mean 6*3/(1+2+3+2+1) = 2
    assert smoothed([6.0 if i == 10 else 0.0 for i in range(21)])[10] == pytest.approx(2.0)
    assert smoothed([0.0, 1.0] * 9) == [0.0, 1.0] * 9  # few points stay as they are
    assert all(0 <= value <= 1 for value in smoothed([1.0, 0.0] * 20))


def test_labels_are_spread_in_order() -> None:
    assert spread([0.5, 0.51, 0.1], gap=0.1) == pytest.approx([0.5, 0.6, 0.1])
    assert spread([0.98, 1.0], gap=0.1) == pytest.approx([0.9, 1.0])
    assert spread([0.3], gap=0.1) == [0.3]


def test_the_grid_has_no_hole() -> None:
    for count in range(1, 16):
        places = cells(count)
        taken = [(row + i, column + j) for row, column, rows, columns in places
                 for i in range(rows) for j in range(columns)]  # fmt: skip
        assert len(places) == count
        assert len(taken) == len(set(taken))
        assert sorted(taken) == [(row, column) for row in range(max(taken)[0] + 1) for column in range(3)]


def test_picked_points_keep_the_ends_and_are_themselves() -> None:
    few = [(1, 0.5), (2, math.nan)]
    assert picked(few, 100) == few
    some = picked([(step, math.nan if step % 2 else float(step)) for step in range(1001)], 100)
    assert len(some) == 100
    assert (some[0], some[-1]) == ((0, 0.0), (1000, 1000.0))
    assert {b - a for (a, _), (b, _) in pairwise(some)} == {10, 12}  # of 500 even steps, every fifth or sixth
    assert picked([(step, 1.0 if step == 7 else math.nan) for step in range(1001)], 100) == [(7, 1.0)]


def test_values_on_hovering_are_those_of_all_lines() -> None:
    held = Line("held-out", "held", [(0, 0.25), (4, 0.5)], {4: (0.4, 0.6)}, measured=True)
    training = Line("training", "train", [(1, 0.3), (2, math.nan), (4, 0.31234)])
    svg = hover_svg(Panel(Metric("k"), [training, held]), (40, 10, 100, 60), (0, 4))
    assert re.findall(r"<title>([^<]*)</title>", svg) == [
        "step 0\nheld-out 0.250", "step 1\ntraining 0.300", "step 4\ntraining 0.312\nheld-out 0.500 (0.400 to 0.600)",
    ]  # fmt: skip
    # places 40, 65, 140: edges half-way between them
    assert re.findall(r'<rect x="([^"]*)" y="10" width="([^"]*)" height="60">', svg) == [
        ("40.0", "12.5"), ("52.5", "50.0"), ("102.5", "37.5"),
    ]  # fmt: skip
