"""A report of several runs: their lines in the same charts, what differs, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.tools.report.runs import grpo_run, write_run
from tinyrl.runs.records import read_run
from tinyrl.tools.report import differing, overlay_values, page_html, write_overlay
from tinyrl.tools.report.panels import RunGroup, group_runs, outcome, overlaid


def runs_of(folder: Path, *metrics: list[dict[str, Any]], samples: Any = None) -> list[RunGroup]:
    configs = [{"method": "grpo", "optim": {"learning_rate": 10.0**-i}} for i in range(1, len(metrics) + 1)]
    folders = [
        write_run(folder / f"run-{i}", lines, config=config, samples=samples[i] if samples else None)
        for i, (lines, config) in enumerate(zip(metrics, configs, strict=True))
    ]
    return group_runs([read_run(one) for one in folders])


def page(runs: list[RunGroup]) -> str:
    return page_html([], **overlay_values(runs))


def test_every_run_is_a_line_of_its_colour(tmp_path: Path) -> None:
    a = [{"step": 0, "eval/reward_mean": 0.2, "eval/reward_ci": [0.1, 0.3]}, {"step": 2, "reward/mean": 0.5}]
    b = [{"step": 5, "reward/mean": 0.75, "value/loss": 3.0, "eval/reward/x": 1.0, "eval/reward/y": 0.5}]
    panels = overlaid(runs_of(tmp_path, a, b))
    lines = {
        (panel.metric.title, panel.metric.unit): [(line.label, line.role, line.points) for line in panel.lines]
        for panel in panels
    }
    assert lines == {
        ("Reward", "held-out, higher is better"): [("A", "1", [(0, 0.2)])],
        ("Reward", "training, higher is better"): [("A", "1", [(2, 0.5)]), ("B", "2", [(5, 0.75)])],
        ("Value loss", "training, lower is better"): [("B", "2", [(5, 3.0)])],
        ("x", "held-out reward"): [("B", "2", [(5, 1.0)])],
        ("y", "held-out reward"): [("B", "2", [(5, 0.5)])],
    }
    assert panels[0].lines[0].intervals == {0: (0.1, 0.3)}
    assert panels[0].lines[0].measured


def test_only_settings_that_differ_are_shown(tmp_path: Path) -> None:
    one = {"optim": {"learning_rate": 0.001, "eps": 1e-8}, "grpo": {"group_size": 8}, "method": "grpo"}
    two = {"optim": {"learning_rate": 0.002, "eps": 1e-8}, "ppo": {"gamma": None}, "method": "grpo"}
    assert differing([one, two]) == {
        "optim.learning_rate": ["0.001", "0.002"],
        "grpo.group_size": ["8", None],
        "ppo.gamma": [None, "null"],
    }
    assert differing([one, one]) == {}
    runs = runs_of(tmp_path, [{"step": 1, "reward/mean": 0.5}], [{"step": 3, "reward/mean": 0.25}])
    html = page(runs)
    assert "<tr><td>optim.learning_rate</td><td>0.1</td><td>0.01</td></tr>" in html
    assert "<td>method</td>" not in html
    assert "that only some runs have" not in html
    other = write_run(tmp_path / "other", [{"step": 1, "reward/mean": 0.5}], config={"method": "grpo", "a": 1, "b": 2})
    folded = page([runs[0], RunGroup("B", "2", "other", read_run(other), [read_run(other)])]).partition("<details>")[2]
    assert "3 settings that only some runs have" in folded
    assert "<tr><td>b</td><td>–</td><td>2</td></tr>" in folded
    assert "the runs have the same config.yaml" in page([runs[0], runs[0]])


def test_both_files_are_written_and_hold_no_script(tmp_path: Path) -> None:
    hostile = "<script>alert(1)<"
    one, two = grpo_run(tmp_path / "a" / hostile, steps=20), grpo_run(tmp_path / "b" / "two", steps=30)
    html, picture = write_overlay([one, two], tmp_path)
    assert (html, picture) == (tmp_path / "report.html", tmp_path / "report.png")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    text = html.read_text("utf-8")
    assert "<script" not in text
    assert set(re.findall(r"var\((--\w+)\)", text)) <= set(re.findall(r"(--\w+):", text))
    assert not (one / "report.html").exists()


def test_what_cannot_be_laid_over_each_other_is_refused(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{i}", [{"step": 1, "reward/mean": 0.5}]) for i in range(9)]
    with pytest.raises(ValueError, match=r"9 runs are too many for one report: at most 8 can be told apart\."):
        write_overlay(runs, tmp_path)
    with pytest.raises(ValueError, match=r"r0 is named twice; name each run once\."):
        write_overlay([runs[0], runs[1], tmp_path / "r1" / ".." / "r0"], tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        write_overlay(runs[:2], tmp_path / "none")
    with pytest.raises(ValueError, match="is a run's folder, whose own report would be lost"):
        write_overlay(runs[:2], runs[2])
    assert not list(tmp_path.rglob("report.html"))
    write_overlay(runs[:8], tmp_path)  # as many as there are colours


# ---- several seeds of a setting ----


def seeds_of(folder: Path, rate: float, *rewards: float) -> list[Path]:
    found = []
    for seed, reward in enumerate(rewards):
        config = {"method": "grpo", "optim": {"learning_rate": rate}, "run": {"seed": seed}}
        lines = [
            {"step": step, "reward/mean": reward * step, "eval/reward_mean": reward * step, "eval/reward_ci": [0, 1]}
            for step in range(3 + seed)
        ]
        found.append(write_run(folder / f"rate{rate}-seed{seed}", lines, config=config))
    return found


def test_seeds_of_a_setting_are_one_line_with_their_mean_and_range(tmp_path: Path) -> None:
    paths = [*seeds_of(tmp_path, 0.1, 0.1, 0.2, 0.3), *seeds_of(tmp_path, 0.2, 0.4)]
    runs = group_runs([read_run(path) for path in paths])
    assert [(one.letter, len(one.seeds)) for one in runs] == [("A", 3), ("B", 1)]
    assert runs[0].name == "rate0.1-seed0 and 2 more seeds"
    [held, training] = [panel for panel in overlaid(runs) if panel.metric.title == "Reward"]
    for panel in (held, training):
        assert panel.lines[0].points == [(0, 0.0), (1, pytest.approx(0.2)), (2, pytest.approx(0.4))]
        assert panel.lines[0].intervals[2] == pytest.approx((0.2, 0.6))
    assert held.lines[1].intervals[2] == (0.0, 1.0)  # of one run the interval of its own prompts
    assert training.lines[1].intervals == {}
    assert "seeds from 0.200 to 0.600" in outcome(runs[0].run)
    html, picture = write_overlay(paths, tmp_path)
    assert "4 runs" in html.read_text("utf-8")
    assert picture.read_bytes()[:4] == b"\x89PNG"
