"""The commands as people type them, in processes of their own, on the embedded default with a few steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FEW = ["run.num_steps=2", "run.eval_prompts=16", "run.threads=1"]


def tinyrl(*arguments: str, folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tinyrl", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stderr[-2000:]
    return done


@pytest.fixture(scope="module")
def grpo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    done = tinyrl("train", "grpo", *FEW, folder=folder)
    run = folder / "runs" / "grpo-sort-1"
    assert "held-out reward, mean" in done.stdout
    assert "tinyrl eval runs/grpo-sort-1 --vs base" in done.stdout
    assert "step 2/2" in done.stderr  # one line a step where there is no terminal
    return run


def test_a_run_starts_from_another(grpo_run: Path) -> None:
    folder = grpo_run.parent.parent
    tinyrl("train", "--from", "runs/grpo-sort-1@2", "run.num_steps=3", "--name", "longer", folder=folder)
    longer = grpo_run.parent / "longer"
    assert f"forked_from: {grpo_run.resolve()}@2" in (longer / "config.yaml").read_text()
    first, second = ((run / "metrics.jsonl").read_text().splitlines() for run in (grpo_run, longer))
    assert (second[:3], len(second)) == (first, 4)


def test_a_run_leaves_what_design_says(grpo_run: Path) -> None:
    left = {p.name for p in grpo_run.iterdir()}
    assert {
        "config.yaml",
        "env.json",
        "metrics.jsonl",
        "samples.jsonl",
        "checkpoints",
        "report.html",
        "report.png",
    } <= left
    lines = [json.loads(line) for line in (grpo_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {
        "reward/mean",
        "reward/std",
        "reward/sort",
        "reward/zero_spread_groups",
        "policy/entropy",
        "policy/clipfrac",
        "policy/approx_kl",
        "policy/sampling_gap",
        "optim/grad_norm",
        "completion/mean_length",
        "completion/truncated",
        "time/rollout",
        "time/update",
        "time/total",
        "tokens_per_second",
        "memory/peak_gb",
    } <= lines[1].keys()
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
    needed = {
        "reward_mean",
        "reward_median",
        "reward_std",
        "reward_ci",
        "pass@1",
        "pass@2",
        "majority@2",
        "kl",
        "entropy",
        "mean_length",
        "truncated",
        "num_prompts",
        "num_samples",
        "greedy",
        "other",
        "difference",
    }
    assert needed <= result.keys()
    assert result["difference"]["reward_mean"] == pytest.approx(result["reward_mean"] - result["other"]["reward_mean"])
    text = tinyrl(*arguments, folder=grpo_run).stdout
    assert "paired by prompt" in text
    assert result["target"][-len("/step-000000") :] in text
    start = json.loads(tinyrl(*arguments[:2], "--vs", "start", "--num-prompts", "8", "--json", folder=grpo_run).stdout)
    assert start["other"]["target"] == "start"


@pytest.mark.slow
def test_eval_by_another_reward(grpo_run: Path, tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("def short(completions, **columns): return [-len(c) for c in completions]\n")
    arguments = ("eval", str(grpo_run), "reward.functions=[{use: short.py:short}]", "--vs", "start")
    arguments = (*arguments, "--num-prompts", "16", "--save-samples", "samples.jsonl", "--json")
    result = json.loads(tinyrl(*arguments, folder=tmp_path).stdout)
    assert result["reward_mean"] == result["reward/short"] != result["other"]["reward_mean"]
    assert result["win_rate"].keys() == {"reward", "verifier"}
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 4 * 16


@pytest.mark.slow
def test_a_run_against_itself_is_not_distinguishable(grpo_run: Path) -> None:
    text = tinyrl("eval", str(grpo_run), "--vs", str(grpo_run), "--num-prompts", "16", folder=grpo_run).stdout
    assert "not distinguishable" in text


@pytest.mark.slow
def test_ppo_with_the_embedded_reward_model(tmp_path: Path) -> None:
    done = tinyrl("train", "ppo", *FEW, "ppo.num_prompts=16", "ppo.minibatch_size=8", folder=tmp_path)
    assert "held-out reward, mean" in done.stdout
    lines = (tmp_path / "runs" / "ppo-reviews-1" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert {"value/loss", "value/explained_variance", "value/grad_norm", "objective/kl", "reward/model"} <= last.keys()


@pytest.mark.slow
def test_own_rows_and_reward(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "letters: {a} b sorted:"}}\n' for a in "cdefghij"))
    (tmp_path / "rewards.py").write_text(
        "def score(prompts, completions, **columns):\n    return [float(len(c)) for c in completions]\n"
    )
    arguments = ["task.data=rows.jsonl", "reward.functions=[{use: rewards.py:score}]", "generation.max_new_tokens=8"]
    dry = tinyrl("train", "grpo", *arguments, "--dry-run", folder=tmp_path).stdout
    assert "nonsense" in dry
    assert "letters:" in dry
    assert not (tmp_path / "runs").exists()
    tinyrl("train", "grpo", *arguments, *FEW, "grpo.num_prompts=4", folder=tmp_path)
    assert (tmp_path / "runs" / "grpo-rows-1" / "report.html").exists()


def test_recipes_and_tasks_are_listed_by_the_command(tmp_path: Path) -> None:
    assert "starter-grpo" in tinyrl("recipes", folder=tmp_path).stdout
    assert "knights_and_knaves" in tinyrl("tasks", folder=tmp_path).stdout


def test_report_of_a_run(grpo_run: Path) -> None:
    (grpo_run / "report.png").unlink()
    tinyrl("report", str(grpo_run), folder=grpo_run)
    assert (grpo_run / "report.png").exists()
