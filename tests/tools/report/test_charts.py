"""Charts: which panels one run or several have, how numbers become curves, the layout, and the outcome's sentence."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tools.report.runs import grpo_run, write_run
from tinyrl.runs.metrics import Metric
from tinyrl.runs.records import read_run
from tinyrl.tools.report import differing, write_overlay
from tinyrl.tools.report.charts import hover_svg, spread
from tinyrl.tools.report.panels import (
    MOST_BARS,
    Line,
    Panel,
    cells,
    group_runs,
    outcome,
    overlaid,
    panels_of,
    phase_seconds,
    smoothed,
)


def panels(folder: Path, metrics: list[dict[str, Any]], **config: Any) -> dict[str, Panel]:
    return {panel.metric.title: panel for panel in panels_of(read_run(write_run(folder, metrics, **config)))}


def labels(panel: Panel) -> list[str]:
    return [line.label for line in panel.lines]


def test_panels_are_those_of_the_method(tmp_path: Path) -> None:
    line = {"value/loss": 4.0, "completion/truncated": 0.0, "time/update": 1.1, "time/rollout": 0.5, "time/total": 1.9}
    metrics = [{"step": i, **line, "value/explained_variance": i / 60 - 9 / (i + 1)} for i in range(1, 91)]
    found = panels(tmp_path / "ppo", metrics)
    assert [*found] == ["Value loss", "Explained variance", "Time by phase"]  # nothing that is zero throughout
    assert found["Explained variance"].metric.unit == "1 is best (cut at \u22121)"
    assert labels(found["Time by phase"]) == ["update", "rollout"]
    assert {len(line.points) for line in found["Time by phase"].lines} == {MOST_BARS}
    keys = "preference/loss rewards/accuracy rewards/margin rewards/chosen rewards/rejected eval/loss eval/accuracy"
    found = panels(tmp_path / "dpo", [{"step": step, **dict.fromkeys(keys.split(), step / 10)} for step in (1, 2)])
    assert [*found] == ["Accuracy", "Loss", "Margin", "Rewards of both sides"]
    assert labels(found["Loss"]) == labels(found["Accuracy"]) == ["training", "held-out"]
    assert labels(found["Rewards of both sides"]) == ["chosen", "rejected"]


def test_rewards_by_function_have_one_colour_in_training_and_held_out_beside_the_verifier(tmp_path: Path) -> None:
    line = {"step": 1, "reward/mean": 0.5, "reward/std": 0.1, "reward/dropped": 3.0, "eval/reward_mean": 0.75}
    by_function = {"reward/b": 0.5, "reward/c": 0.25, "eval/reward/a": 1.0, "eval/reward/b": 0.5}
    found = panels(tmp_path / "a", [{**line, **by_function, "eval/verifier_mean": 0.25}])
    lines = [(line.label, line.role, line.points) for line in found["Held-out reward by function"].lines]
    assert lines == [("a", "1", [(1, 1.0)]), ("b", "2", [(1, 0.5)]), ("verifier", "other", [(1, 0.25)])]
    assert [(line.label, line.role) for line in found["Reward by function"].lines] == [("b", "2"), ("c", "3")]
    one = panels(tmp_path / "b", [{**line, "reward/a": 0.5, "eval/reward/a": 0.75, "eval/verifier_mean": 0.75}])
    assert [*one] == ["Reward", "Spread of rewards", "Rewards dropped"]


def test_statistics_of_rewards_are_not_drawn_as_functions(tmp_path: Path) -> None:
    statistics = {f"reward/{name}": 0.5 for name in ("slowest_seconds", "known_prompts", "zero_spread_kept")}
    found = panels(tmp_path / "a", [{"step": 1, **statistics, "reward/a": 0.5, "reward/b": 0.25}])
    assert labels(found["Reward by function"]) == ["a", "b"]


def test_smoothing_is_a_weighted_mean_of_neighbours() -> None:
    assert smoothed([0.0, 1.0] * 9) == [0.0, 1.0] * 9  # few points stay as they are
    # half = 2, weights 1 2 3 2 1: a spike of 9 at 10 is 9 * 3/9 there, beside it 9 * 2/9 and 9 * 1/9
    assert smoothed([9.0 if i == 10 else 0.0 for i in range(21)])[8:13] == pytest.approx([1, 2, 3, 2, 1])
    assert smoothed([2.0 * i + 1 for i in range(40)]) == pytest.approx([2.0 * i + 1 for i in range(40)])
    gap = smoothed([math.nan if i == 10 else float(i) for i in range(21)])
    assert math.isnan(gap[10])
    assert gap[9] == pytest.approx((7 + 2 * 8 + 3 * 9 + 11) / 7)


def test_labels_are_spread_in_order_and_the_grid_has_no_hole() -> None:
    assert spread([0.5, 0.51, 0.1], gap=0.1) == pytest.approx([0.5, 0.6, 0.1])
    assert spread([0.98, 1.0], gap=0.1) == pytest.approx([0.9, 1.0])
    for count in range(1, 16):
        places = cells(count)
        taken = [(row + i, column + j) for row, column, rows, columns in places
                 for i in range(rows) for j in range(columns)]  # fmt: skip
        assert len(places) == count
        assert sorted(taken) == [(row, column) for row in range(max(taken)[0] + 1) for column in range(3)]


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


# ---- the outcome ----

FIRST: dict[str, Any] = {"step": 0, "eval/reward_mean": 0.5, "eval/reward_ci": [0.45, 0.55]}


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ([FIRST, {"step": 3, "eval/reward_mean": 0.99},
          {"step": 60, "eval/reward_mean": 0.9384, "eval/reward_ci": [0.921, 0.953], "eval/kl": 1.324}],
         ["rose from 0.500 to 0.938 in 60 steps", "0.921 to 0.953", "1.32 nats per response."]),
        ([FIRST, {"step": 9, "eval/reward_mean": 0.6, "eval/reward_ci": [0.55, 0.65], "objective/kl": 0.25}],
         ["went from 0.500 to 0.600 in 9 steps", "intervals overlap", "0.250 nats per response."]),
        ([FIRST, {"step": 9, "eval/reward_mean": 0.5, "eval/reward_ci": [0.55, 0.65]}], ["stayed at 0.500 in 9 steps"]),
        ([{"step": 0, "eval/reward_mean": 0.25}, {"step": 1, "reward/mean": 0.3}], ["is 0.250 at step 0", "once"]),
        ([{"step": step, "reward/mean": float(step)} for step in range(1, 21)],  # means of 1..5 and of 16..20
         ["Training reward rose from 3 to 18 in 19 steps", "no held-out"]),
    ],
)  # fmt: skip
def test_the_outcome_is_before_after_interval_and_kl(
    tmp_path: Path, lines: list[dict[str, Any]], parts: list[str]
) -> None:
    text = outcome(read_run(write_run(tmp_path / "run", lines)))
    assert [part for part in parts if part not in text] == [], text


def test_time_is_by_phase_the_longest_first(tmp_path: Path) -> None:
    line = {"time/total": 10.0, "time/rollout": 4.0, "time/update": 5.0, "time/rollout/reward": 3.0}
    run = read_run(write_run(tmp_path / "a", [{"step": step, **line} for step in (1, 2)]))
    assert [*phase_seconds(run).items()] == [
        ("update", {1: 5.0, 2: 5.0}), ("rollout", {1: 4.0, 2: 4.0}),
    ]  # fmt: skip
    many = {f"time/p{i}": float(i) for i in range(1, 10)} | {"time/total": 45.0, "time/evaluation": 99.0}
    phases = phase_seconds(read_run(write_run(tmp_path / "b", [{"step": 1, **many}])))
    assert [*phases] == ["evaluation", "p9", "p8", "p7", "p6", "p5", "p4", "p3"]  # as many as there are colours


# ---- several runs ----


def test_every_run_is_a_line_of_its_colour(tmp_path: Path) -> None:
    a = [{"step": 0, "eval/reward_mean": 0.2, "eval/reward_ci": [0.1, 0.3], "eval/kl": 1.0},
         {"step": 2, "reward/mean": 0.5}]  # fmt: skip
    b = [{"step": 5, "reward/mean": 0.75, "value/loss": 3.0, "objective/kl": 2.0, "eval/kl": 3.0,
          "eval/reward/x": 1.0, "eval/reward/y": 0.5}]  # fmt: skip
    runs = [write_run(tmp_path / name, lines, config={"name": name}) for name, lines in (("a", a), ("b", b))]
    found = overlaid(group_runs([read_run(run) for run in runs]))
    assert {
        (panel.metric.title, panel.metric.unit): [(line.label, line.role, line.points) for line in panel.lines]
        for panel in found
    } == {
        ("Reward", "held-out, higher is better"): [("A", "1", [(0, 0.2)])],
        ("Reward", "training, higher is better"): [("A", "1", [(2, 0.5)]), ("B", "2", [(5, 0.75)])],
        ("KL from the reference", "held-out, nats per response"): [("A", "1", [(0, 1.0)]), ("B", "2", [(5, 3.0)])],
        ("Value loss", "training, lower is better"): [("B", "2", [(5, 3.0)])],
        ("x", "held-out"): [("B", "2", [(5, 1.0)])],
        ("y", "held-out"): [("B", "2", [(5, 0.5)])],
    }
    assert found[0].lines[0].intervals == {0: (0.1, 0.3)}


def test_both_files_are_written_with_the_settings_that_differ_and_no_script(tmp_path: Path) -> None:
    one = {"optim": {"learning_rate": 0.001, "eps": 1e-8}, "grpo": {"group_size": 8}, "method": "grpo"}
    two = {"optim": {"learning_rate": 0.002, "eps": 1e-8}, "ppo": {"gamma": None}, "method": "grpo"}
    assert differing([one, two]) == {
        "optim.learning_rate": ["0.001", "0.002"],
        "grpo.group_size": ["8", None],
        "ppo.gamma": [None, "null"],
    }
    hostile = "<script>alert(1)<"
    first = grpo_run(tmp_path / "a" / hostile, steps=20)
    other = write_run(tmp_path / "b" / "two", [{"step": 1, "reward/mean": 0.5}], config=two)
    html, picture = write_overlay([first, other], tmp_path)
    assert (html, picture) == (tmp_path / "report.html", tmp_path / "report.png")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    text = html.read_text("utf-8")
    assert "<script" not in text
    assert "<tr><td>ppo.gamma</td><td>–</td><td>null</td></tr>" in text
    assert set(re.findall(r"var\((--\w+)\)", text)) <= set(re.findall(r"(--\w+):", text))
    assert not (first / "report.html").exists()


def test_more_runs_than_colours_are_refused(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{i}", [{"step": 1, "reward/mean": 0.5}], config={"n": i}) for i in range(9)]
    with pytest.raises(ValueError, match="at most 8"):
        write_overlay(runs, tmp_path)
    assert [path.is_file() for path in write_overlay(runs[:8], tmp_path / "new")] == [True, True]


def test_seeds_of_a_setting_are_one_line_with_their_mean_and_range(tmp_path: Path) -> None:
    paths = []
    for rate, rewards in ((0.1, (0.1, 0.2, 0.3)), (0.2, (0.4,))):
        for seed, reward in enumerate(rewards):
            config = {"method": "grpo", "optim": {"learning_rate": rate}, "run": {"seed": seed}}
            lines = [{"step": step, "reward/mean": reward * step, "eval/reward_mean": reward * step,
                      "eval/reward_ci": [0, 1]} for step in range(3 + seed)]  # fmt: skip
            paths.append(write_run(tmp_path / f"rate{rate}-seed{seed}", lines, config=config))
    runs = group_runs([read_run(path) for path in paths])
    assert [(one.letter, len(one.seeds)) for one in runs] == [("A", 3), ("B", 1)]
    [held, training] = [panel for panel in overlaid(runs) if panel.metric.title == "Reward"]
    for panel in (held, training):
        assert panel.lines[0].points == [(0, 0.0), (1, pytest.approx(0.2)), (2, pytest.approx(0.4))]
        assert panel.lines[0].intervals[2] == pytest.approx((0.2, 0.6))
    assert held.lines[1].intervals[2] == (0.0, 1.0)  # of one run the interval of its own prompts
    assert training.lines[1].intervals == {}
    assert "seeds from 0.200 to 0.600" in outcome(runs[0].run)
