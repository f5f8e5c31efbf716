"""The commands as people type them, in processes of their own, on the embedded default with a few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.children import Child
from tinyrl.cli.commands import main

FEW = ["run.num_steps=2", "run.eval_prompts=16", "run.threads=1"]


def tinyrl(*arguments: str, folder: Path, typed: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinyrl", *arguments]
    done = subprocess.run(command, cwd=folder, input=typed, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr[-2000:]
    return done


def type_command(folder: Path, *arguments: str) -> None:
    os.chdir(folder)
    sys.argv = ["tinyrl", *arguments]
    main()


@pytest.fixture(scope="module")
def grpo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default run, by its command; the process is forked from one that has imported everything."""
    folder = tmp_path_factory.mktemp("grpo")
    child = Child(type_command, folder, "train", "grpo", *FEW, output=folder / "said.txt")
    assert child.end() == 0, child.said
    run = folder / "runs" / "grpo-sort-1"
    assert "held-out reward, mean" in child.said
    assert "tinyrl eval runs/grpo-sort-1 --vs base" in child.said
    assert "step 2/2" in child.said  # one line a step where there is no terminal
    return run


@pytest.mark.slow
def test_a_run_starts_from_another(grpo_run: Path) -> None:
    folder = grpo_run.parent.parent
    tinyrl("train", "--from", "runs/grpo-sort-1@2", "run.num_steps=3", "--name", "longer", folder=folder)
    longer = grpo_run.parent / "longer"
    assert json.loads((longer / "env.json").read_text())["forked_from"] == f"{grpo_run.resolve()}@2"
    assert json.loads((grpo_run / "env.json").read_text())["forked_from"] is None
    first, second = ((run / "metrics.jsonl").read_text().splitlines() for run in (grpo_run, longer))
    assert (second[:3], len(second)) == (first, 4)


def test_a_run_leaves_what_design_says(grpo_run: Path) -> None:
    left = {p.name for p in grpo_run.iterdir()}
    files = (
        "config.yaml env.json metrics.jsonl samples.jsonl prompts.jsonl tokens.jsonl checkpoints report.html report.png"
    )
    assert {*files.split()} <= left
    lines = [json.loads(line) for line in (grpo_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {"reward/mean", "reward/sort", "policy/entropy", "optim/grad_norm", "time/total"} <= lines[1].keys()
    assert {"eval/reward_mean", "eval/reward_median", "eval/reward_ci", "eval/pass@1", "eval/kl"} <= lines[2].keys()
    assert 0.1 < lines[0]["eval/pass@1"] < 0.8  # the embedded model knows the task, and makes mistakes
    environment = json.loads((grpo_run / "env.json").read_text())
    assert environment["threads"] == 1
    assert environment["versions"]["torch"]
    assert (grpo_run / "report.html").read_text().count("<svg") >= 4


@pytest.mark.slow
def test_eval_vs_base_as_json_and_for_people(grpo_run: Path) -> None:
    arguments = ("eval", str(grpo_run), "--vs", "base", "--num-prompts", "32", "--samples", "2")
    result = json.loads(tinyrl(*arguments, "--json", folder=grpo_run).stdout)
    needed = {"reward_mean", "reward_ci", "pass@2", "majority@2", "kl", "greedy", "other", "difference"}
    assert needed <= result.keys()
    assert result["difference"]["reward_mean"] == pytest.approx(result["reward_mean"] - result["other"]["reward_mean"])
    text = tinyrl(*arguments, folder=grpo_run).stdout
    assert "paired by prompt" in text
    assert result["target"][-len("/step-000000") :] in text
    start = json.loads(tinyrl(*arguments[:2], "--vs", "start", "--num-prompts", "8", "--json", folder=grpo_run).stdout)
    assert start["other"]["target"] == "start"


@pytest.mark.slow
def test_several_targets_are_one_table(grpo_run: Path) -> None:
    first = str(grpo_run / "checkpoints" / "step-000002")
    words = ("eval", first, str(grpo_run), "--num-prompts", "16", "--json")
    baseline, same = json.loads(tinyrl(*words, folder=grpo_run).stdout)
    assert "win_rate" not in baseline
    assert (same["reward_mean"], same["win_rate"]["mean"]) == (baseline["reward_mean"], 0.5)
    assert "not distinguishable" in tinyrl("eval", first, "--vs", first, "--num-prompts", "16", folder=grpo_run).stdout


@pytest.mark.slow
def test_ppo_with_the_embedded_reward_model(tmp_path: Path) -> None:
    done = tinyrl("train", "ppo", *FEW, "ppo.num_prompts=16", "ppo.minibatch_size=8", folder=tmp_path)
    assert "held-out reward, mean" in done.stdout
    lines = (tmp_path / "runs" / "ppo-reviews-1" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert {"value/loss", "value/explained_variance", "value/grad_norm", "objective/kl", "reward/model"} <= last.keys()


@pytest.mark.slow
def test_a_run_is_reported_exported_and_talked_to(grpo_run: Path) -> None:
    (grpo_run / "report.png").unlink()
    tinyrl("report", str(grpo_run), folder=grpo_run)
    assert (grpo_run / "report.png").exists()
    words = ("export", str(grpo_run), "--merge", "--dtype", "float32")
    lines = tinyrl(*words, folder=grpo_run).stdout.splitlines()
    assert lines[0] == f"{grpo_run}/export/merged-float32"
    assert f"serve      vllm serve {grpo_run}/export/merged-float32" in lines
    tinyrl(*words, folder=grpo_run)  # an export may be replaced
    asked = "letters: b a sorted:\n/reward\n"
    assert "reward " in tinyrl("chat", str(grpo_run), "--device", "cpu", folder=grpo_run, typed=asked).stdout
    named = tinyrl("chat", str(grpo_run.parent / "grpo-sort-2"), folder=grpo_run, code=2).stderr
    assert f"Did you mean `{grpo_run}`?" in named
    assert "task, environment" in tinyrl("chat", str(grpo_run), "optim.learning_rate=1", folder=grpo_run, code=2).stderr
