"""Charts: which panels one run or several have, how numbers become curves, the layout, and the outcome's sentence."""

import math
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tests.tools.report.runs import grpo_run, write_run
from tinyrl.runs.metrics import Metric
from tinyrl.runs.records import read_run
from tinyrl.tools.report import differing, seed_tables, write_overlay
from tinyrl.tools.report.charts import (
    STYLE,
    ZOOM,
    draw,
    fitted,
    fitted_unit,
    hover_svg,
    spread,
    text_width,
    wrapped,
)
from tinyrl.tools.report.panels import (
    MOST_BARS,
    Line,
    Panel,
    bar_spans,
    cells,
    group_runs,
    outcome,
    overlaid,
    panel_of,
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
    metrics = [{"step": i, **line, "value/explained_variance": i / 60 - 9 / (i + 1)} for i in range(1, 121)]
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
    assert [*one] == ["Reward", "Reward standard deviation", "Rewards dropped"]


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


# ---- bars and axes ----


def drawn(panel: Panel) -> Axes:
    """The axes of a panel that was drawn into a figure of its own."""
    figure = Figure(figsize=(6, 4))
    draw(figure, panel, (0, 0, 432, 288), (-0.5, 10.5), named=True)
    return figure.axes[0]


def test_bars_reach_half_way_to_their_neighbours_with_one_gap() -> None:
    # half-way: 0.5 1.5 3 6 8.5 9.5; the gap is 18 % of the narrowest
    wanted = [(0.59, 1.41), (1.59, 2.91), (3.09, 5.91), (6.09, 8.41), (8.59, 9.41)]
    assert bar_spans([1, 2, 4, 8, 9]) == [pytest.approx(span) for span in wanted]


def test_the_bars_of_few_steps_are_narrow() -> None:
    assert bar_spans([7]) == [pytest.approx((6.9, 7.1))]
    assert bar_spans([1, 3]) == [pytest.approx((0.6, 1.4)), pytest.approx((2.6, 3.4))]  # 40 % of a distance of 2


def test_layers_of_time_are_drawn_at_the_spans_of_their_steps() -> None:
    layers = [Line("update", "1", [(1, 2.0), (2, 3.0), (4, 1.0)]), Line("rollout", "2", [(1, 1.0), (2, 1.0), (4, 0.5)])]
    patches = drawn(Panel(Metric("time"), layers, stacked=True)).patches
    bars = [patch.get_bbox() for patch in patches if isinstance(patch, Rectangle)]
    # three bars are 60 % of the narrowest distance, which is 1
    spans = [(0.7, 1.3), (1.7, 2.8), (3.2, 4.8)] * 2
    heights = [(0, 2), (0, 3), (0, 1), (2, 3), (3, 4), (1, 1.5)]
    assert [(bar.x0, bar.x1) for bar in bars] == [pytest.approx(span) for span in spans]
    assert [(bar.y0, bar.y1) for bar in bars] == [pytest.approx(height) for height in heights]


def held_out(values: list[float], intervals: list[tuple[float, float]], **about: Any) -> Panel:
    points = list(enumerate(values))
    line = Line("held-out", "held", points, dict(enumerate(intervals)), measured=True)
    [panel] = panel_of(Metric("k", unit="higher is better", **about), [line])
    return panel


def test_intervals_of_equal_values_are_cut_and_the_chart_says_so() -> None:
    panel = held_out([1.0, 1.0], [(0.51, 1.0), (0.51, 1.0)])  # Wilson's of four right answers of four
    assert panel.shown_range == pytest.approx((0.95, 1.0))  # half a tenth of the value
    assert panel.metric.unit == "higher is better (intervals cut)"
    assert drawn(panel).get_ylim() == pytest.approx((0.946, 1.004))  # 8 % of 0.05 to either side


def test_the_interval_of_a_single_point_is_shown_whole() -> None:
    panel = held_out([1.0], [(0.51, 1.0)])
    assert panel.shown_range == (0.51, 1.0)
    assert panel.metric.unit == "higher is better"


def test_intervals_that_leave_the_values_room_are_shown_whole() -> None:
    panel = held_out([0.4, 0.8], [(0.3, 0.5), (0.5, 0.95)])
    assert panel.shown_range == (0.3, 0.95)
    assert panel.metric.unit == "higher is better"
    assert drawn(panel).get_ylim() == pytest.approx((0.248, 1.002))


def test_what_is_cut_at_a_floor_and_of_intervals_is_said_together() -> None:
    panel = held_out([-9.0, 0.0], [(-9.0, 5.0), (0.0, 0.5)], floor=-1.0)
    assert panel.shown_range == (-1.5, 0.5)  # values from -1 to 0, half as much to either side
    assert panel.metric.unit == "higher is better (cut at \u22121, intervals cut)"


def test_a_line_without_intervals_has_the_axis_of_its_values() -> None:
    assert held_out([0.25, 0.5], []).shown_range == (0.25, 0.5)


# ---- texts of the picture ----


def test_a_text_is_as_wide_as_matplotlib_draws_it() -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(dpi=72 * ZOOM)
        for text, size, weight in (("Cut at the length limit", 12.2, "bold"), ("held-out, nats", 11.0, "normal")):
            extent = figure.text(0, 0, text, size=size, weight=weight).get_window_extent()
            assert text_width(text, size=size, bold=weight == "bold") == pytest.approx(extent.width / ZOOM, abs=1.0)


def test_a_text_without_room_is_cut_to_what_has_room() -> None:
    room = text_width("nats per…", size=11)
    assert fitted("nats per response", room, size=11) == "nats per…"
    assert fitted("nats per response", 1.0, size=11) == ""
    assert fitted("nats per response", text_width("nats per response", size=11), size=11) == "nats per response"


def test_a_unit_without_room_loses_its_last_parts() -> None:
    whole = text_width("held-out, nats per response", size=11)
    assert fitted_unit("held-out, nats per response", whole) == "held-out, nats per response"
    assert fitted_unit("held-out, nats per response", whole - 1) == "held-out"


def test_lines_break_between_words_where_the_next_has_no_room() -> None:
    room = text_width("A  run: rose", size=12.8)
    assert wrapped("A  run: rose from unspeakable to 2", room, size=12.8) == [
        "A  run: rose",
        "from",
        "unspeakable",
        "to 2",
    ]


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
        ([{"step": 0, "eval/loss": 1.3851}, {"step": 9, "eval/loss": 1.3854}], ["stayed at 1.39 in 9 steps"]),
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


def test_the_outcome_begins_with_the_step_after_which_the_reward_changed(tmp_path: Path) -> None:
    lines = [FIRST, {"step": 9, "eval/reward_mean": 0.5}]
    run = write_run(tmp_path / "run", lines)
    unchanged = outcome(read_run(run))
    (run / "env.json").write_text('{"reward_changed": [4]}')
    before, after, sentence = outcome(read_run(run)).partition(unchanged)
    assert "after step 4" in before
    assert (after, sentence) == (unchanged, "")


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


def test_seeds_have_a_table_with_their_mean_and_its_t_interval(tmp_path: Path) -> None:
    """Of 0.2, 0.4 and 0.6: 0.4 -+ 4.303 * 0.2 / sqrt(3). What not all have is left out."""
    paths = []
    for seed, reward in enumerate((0.2, 0.4, 0.6)):
        line = {
            "step": 5 + seed,
            "eval/reward_mean": reward,
            "eval/mean_length": 3.0,
            "eval/kl": 1.0 if seed > 0 else None,
        }
        paths.append(write_run(tmp_path / f"{seed}", [line], config={"method": "grpo", "run": {"seed": seed}}))
    [table] = seed_tables(paths)
    assert table.columns == ["seed 0", "seed 1", "seed 2", "mean", "95 % t interval"]
    assert table.rows == {
        "Steps": ["5", "6", "7", "", ""],
        "Reward": ["0.200", "0.400", "0.600", "0.400", "\u22120.0968 to 0.897"],
        "Length": ["3", "3", "3", "3", "equal"],
    }
    assert seed_tables(paths[:1]) == []


def test_seeds_of_a_command_are_called_by_their_folder_and_others_by_the_first(tmp_path: Path) -> None:
    def named(*places: str) -> str:
        lines = [{"step": 1, "reward/mean": 0.5}]
        for seed, place in enumerate(places):
            write_run(tmp_path / place, lines, config={"method": "grpo", "run": {"seed": seed}})
        [group] = group_runs([read_run(tmp_path / place) for place in places])
        return group.name

    assert named("two/seed-0", "two/seed-1") == "two, 2 seeds"
    assert named("a", "b", "c") == "a and 2 more seeds"
    assert named("three/seed-0", "four/seed-0") == "three/seed-0 and 1 more seed"


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
    assert "95 % t interval over seeds \u22120.0968 to 0.897" in outcome(runs[0].run)
