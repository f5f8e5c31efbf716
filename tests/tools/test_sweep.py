"""Sweeps: which runs they are, that each equals the single run to the bit, how they are judged, halved, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.cli.commands import app
from tinyrl.cli.train import config_of
from tinyrl.config.recipe import dump_config
from tinyrl.runs.records import VOLATILE, read_steps
from tinyrl.runs.run_dir import open_run
from tinyrl.tools.sweep import Member, Sweep, axes_of, halved, members, ranking, render, rungs, side_by_side

METRIC = "eval/reward_mean"

# ---- what a sweep is ----


def test_values_between_commas_are_axes_where_a_setting_does_not_take_them_as_one():
    words = ["starter-grpo", "run.seed=1,2,3", "optim.learning_rate=1e-3,3e-3", "grpo.group_size=8"]
    shared, axes = axes_of("grpo", words)
    assert shared == ["starter-grpo", "grpo.group_size=8"]
    assert axes == {"run.seed": ["1", "2", "3"], "optim.learning_rate": ["1e-3", "3e-3"]}
    words = ["task.name=reasoning_gym", "task.data=leg_counting,chain_sum", "generation.stop=[a,b]", "run.seed=1,2"]
    shared, axes = axes_of("grpo", words)
    assert axes == {"run.seed": ["1", "2"]}
    assert shared == words[:3]
    _, axes = axes_of("grpo", ["reward.functions=[{use: a.py:f, weight: 1}],[{use: a.py:g}]"])
    assert axes == {"reward.functions": ["[{use: a.py:f, weight: 1}]", "[{use: a.py:g}]"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.seed=1"], "what is to be swept"),
        (["run.seed=1,1"], "stands there twice"),
        ([f"run.seed={','.join(map(str, range(300)))}"], "at most 256"),
    ],
)
def test_what_is_no_sweep_is_refused(words: list[str], said: str):
    with pytest.raises(ValueError, match=said):
        axes_of("grpo", words)


def test_runs_are_named_by_what_they_differ_in(tmp_path: Path):
    sweep = Sweep("grpo", ["starter-grpo"], {"run.seed": ["1", "2"], "optim.learning_rate": ["1e-3", "3e-3"]}, False, 2)
    found = members(sweep, tmp_path, config_of=config_of)
    assert [one.path.name for one in found] == [
        "seed1-learning_rate1e-3", "seed1-learning_rate3e-3", "seed2-learning_rate1e-3", "seed2-learning_rate3e-3"
    ]  # fmt: skip
    assert {one.setting for one in found} == {"optim.learning_rate=1e-3", "optim.learning_rate=3e-3"}
    assert found[-1].config.optim.learning_rate == 3e-3
    models = Sweep("grpo", [], {"model.path": ["starter", str(tmp_path / "a" / "long" / "path")]}, False, 1)
    named = [one.path.name for one in members(models, tmp_path, config_of=lambda method, words: found[0].config)]
    assert named == ["path1", "path2"]
    sweep.write(tmp_path)
    assert Sweep.read(tmp_path) == sweep
    with pytest.raises(ValueError, match=r"is no sweep: it has no sweep.json"):
        Sweep.read(tmp_path / "other")
    with pytest.raises(ValueError, match="learning_rate"):
        members(Sweep("grpo", [], {"optim.learning_rate": ["-1", "1"]}, False, 1), tmp_path, config_of=config_of)


def test_as_many_runs_at_a_time_as_leave_no_core_waiting():
    assert [side_by_side(count, 2) for count in (1, 2, 3, 4, 5, 6)] == [2, 2, 3, 2, 3, 2]
    assert side_by_side(9, 8) == 9
    assert side_by_side(5, 1) == 1


def test_rungs_are_at_evaluations_and_halve():
    config = config_of("grpo", ["run.num_steps=60", "run.eval_every=10"])
    assert rungs(4, config) == [(20, 2), (30, 1)]
    assert rungs(1, config) == []
    assert rungs(5, config) == [(10, 3), (20, 2), (30, 1)]
    with pytest.raises(ValueError, match=r"set run\.eval_every"):
        rungs(4, config_of("grpo", ["run.eval_every=0"]))


# ---- judging, of records made by hand ----


def recorded(folder: Path, setting: str, seed: int, scores: dict[int, float], rewards: list[float]) -> Member:
    """A run with held-out `scores` by step, and the reward of each held-out prompt at all of them."""
    path = folder / f"{setting}-{seed}"
    path.mkdir(parents=True)
    lines = [{"step": step, METRIC: score} for step, score in scores.items()]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [
        {"step": step, "kind": "eval", "prompt_index": i, "prompt": f"p{i}", "sample": 0, "reward": reward}
        for step in scores
        for i, reward in enumerate(rewards)
    ]
    (path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Member(path, (), setting, str(seed), config_of("grpo", ["starter-grpo"]))


def of_scores(folder: Path, scores: dict[str, list[float]]) -> list[Member]:
    return [recorded(folder, name, i, {10: s}, [s]) for name, each in scores.items() for i, s in enumerate(each)]


def test_settings_are_told_apart_by_seeds_where_there_are_several(tmp_path: Path):
    runs = of_scores(tmp_path, {"a": [0.5, 0.6, 0.55], "b": [0.9, 1.0, 0.95], "c": [0.6, 0.95, 0.97]})
    best, second, last = ranking(runs)
    assert (best.setting, second.setting, last.setting) == ("b", "c", "a")
    assert last.difference == pytest.approx(-0.4)
    assert last.is_worse
    assert not second.is_worse  # by 0.3, 0.05 and -0.02
    said = render(runs)
    assert "by seed): not distinguishable" in said
    assert said.count("not distinguishable") == 1


def test_one_seed_is_told_apart_by_its_prompts(tmp_path: Path):
    even = [0.0, 1.0] * 20
    runs = [recorded(tmp_path, "a", 0, {10: 0.5}, even), recorded(tmp_path, "b", 0, {10: 1.0}, [1.0] * 40)]
    assert ranking(runs)[1].is_worse
    assert "by prompt, of one seed" in render(runs)
    same = [recorded(tmp_path / "s", "a", 0, {10: 0.5}, even), recorded(tmp_path / "s", "b", 0, {10: 0.51}, even)]
    assert not ranking(same)[1].is_worse


def test_a_setting_that_was_left_is_compared_where_it_was(tmp_path: Path):
    left = recorded(tmp_path, "a", 0, {10: 0.2}, [0.2] * 40)
    on = recorded(tmp_path, "b", 0, {10: 0.5, 20: 0.9}, [0.5] * 40)
    rows = ranking([left, on])
    assert [(row.setting, row.step) for row in rows] == [("b", 20), ("a", 10)]
    assert rows[1].difference == pytest.approx(-0.3)


def test_only_what_can_be_told_from_the_best_is_left(tmp_path: Path):
    scores = {"a": [0.9, 0.91], "b": [0.89, 0.92], "c": [0.5, 0.5], "d": [0.2, 0.25]}
    told = list[str]()
    assert set(halved(of_scores(tmp_path, scores), 10, keep=1, tell=told.append)) == {"a", "b"}
    assert len(told) == 2
    assert all("left" in line for line in told)


def test_a_score_that_is_missing_comes_last(tmp_path: Path):
    runs = of_scores(tmp_path, {"a": [float("nan")], "b": [0.1]})
    assert [row.setting for row in ranking(runs)] == ["b", "a"]
    assert render(runs)


# ---- whole sweeps ----


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("recipe")
    settings = running.config("grpo", tiny_model(folder / "model", "llama"), run={"num_steps": 4, "eval_every": 2})
    path = folder / "recipe.yaml"
    path.write_text(dump_config(settings))
    return str(path)


def swept(folder: Path, *words: str, expects: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tinyrl", "sweep", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == expects, done.stdout + done.stderr
    return done.stdout + done.stderr


def metrics(run: Path) -> dict[int, dict[str, Any]]:
    steps = read_steps(run / "metrics.jsonl", [])
    return {step: {k: v for k, v in line.items() if not k.startswith(VOLATILE)} for step, line in steps.items()}


def same(run: Path, single: Path) -> None:
    """Weights, metrics and samples are those of a single run."""
    assert metrics(run) == metrics(single)
    assert (run / "samples.jsonl").read_bytes() == (single / "samples.jsonl").read_bytes()
    last = sorted(single.glob("checkpoints/*"))[-1].name
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert (run / "checkpoints" / last / file).read_bytes() == (single / "checkpoints" / last / file).read_bytes()


@pytest.mark.slow
def test_a_sweep_equals_single_runs_to_the_bit(recipe: str, tmp_path: Path):
    said = swept(tmp_path, recipe, "run.seed=1,2", "optim.learning_rate=1e-2,1e-3", "--device", "cpu", "--name", "s")
    assert "4 runs" in said
    folder = tmp_path / "runs" / "s"
    assert (folder / "report.html").is_file()
    for seed, rate in ((1, "1e-2"), (2, "1e-3")):
        config = config_of("grpo", [recipe, f"run.seed={seed}", f"optim.learning_rate={rate}"])
        code, single, _ = running.train(config, tmp_path / "single", name=f"{seed}-{rate}")
        assert code == 0
        same(folder / f"seed{seed}-learning_rate{rate}", single.path)
    assert yaml.safe_load((folder / "seed1-learning_rate1e-2" / "config.yaml").read_text())["run"]["threads"] == 1
    again = swept(tmp_path, "--resume", str(folder))
    assert "optim.learning_rate=1e-2" in again  # nothing left to do, and the same table


@pytest.mark.slow
def test_a_sweep_that_halves_or_is_stopped_ends_as_single_runs(recipe: str, tmp_path: Path):
    words = [recipe, "run.seed=1,2", "optim.learning_rate=1e-2,1e-9", "--halve", "--name", "h", "--at-once", "1"]
    command = [sys.executable, "-m", "tinyrl", "sweep", *words, "--device", "cpu"]
    folder = tmp_path / "runs" / "h"
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("seed1-learning_rate1e-2: step 2"):
                os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 75
    swept(tmp_path, "--resume", str(folder))
    config = config_of("grpo", [recipe, "run.seed=2", "optim.learning_rate=1e-2"])
    _, single, _ = running.train(config, tmp_path / "single")
    same(folder / "seed2-learning_rate1e-2", single.path)
    assert json.loads((folder / "sweep.json").read_text())["halve"] is True


@pytest.mark.slow
def test_a_run_that_fails_does_not_end_the_others(recipe: str, tmp_path: Path):
    """A reward that raises in one of the settings stops that run alone, whose exit code the sweep ends with."""
    (tmp_path / "rewards.py").write_text(
        "def good(completions, **_):\n    return [float(len(set(c))) for c in completions]\n\n\n"
        "def bad(completions, **_):\n    raise RuntimeError('no')\n"
    )
    functions = ",".join(f"[{{use: {tmp_path / 'rewards.py'}:{name}}}]" for name in ("good", "bad"))
    said = swept(tmp_path, recipe, f"reward.functions={functions}", "--name", "f", "--device", "cpu", expects=2)
    assert "exit 2, see" in said
    assert "step 4, held-out" in said


def test_refusals(tmp_path: Path):
    for words, said in (
        (["grpo", "run.seed=1"], "what is to be swept"),
        (["--resume", str(tmp_path), "grpo"], "needs nothing else"),
        (["--resume", str(tmp_path)], "is no sweep"),
        (["grpo", "run.seed=1,2", "run.eval_every=0", "--halve"], "run.eval_every"),
    ):
        told = CliRunner().invoke(app, ["sweep", *words])
        assert told.exit_code == 2
        assert said in told.output


# ---- --until ----


def test_a_run_stops_where_it_is_told_and_goes_on_as_if_it_had_not(recipe: str, tmp_path: Path):
    from tinyrl.rollout.components import Options
    from tinyrl.training.launch import start

    config = config_of("grpo", [recipe])
    _, whole, _ = running.train(config, tmp_path, name="whole")
    launch = start(
        config, options=Options(device="cpu"), output_dir=str(tmp_path), name="run", overwrite=False, command=["test"]
    )
    assert launch.go(report=running.report, until=3) == 0
    run = open_run(launch.run.path)
    assert max(metrics(run.path)) == 3
    assert (run.checkpoints / "step-000003").is_dir()  # run.save_every=2 has none there
    assert running.go_on(run) == 0
    same(run.path, whole.path)
