"""Evaluations end to end: what they count, by judge and by prompt."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.evaluation.evaluate import evaluate
from tinyrl.process.launched import Options
from tinyrl.rollout.load import load_collector
from tinyrl.rollout.prepared import prepare


def test_evaluation_is_repeatable_and_counts_what_it_says(tmp_path: Path) -> None:
    settings = running.config("grpo", tiny_model(tmp_path, "llama"))
    parts = load_collector(prepare(settings), options=Options(device="cpu"))
    first, second = (evaluate(parts, parts.eval_prompts[:6], samples=4) for _ in range(2))
    parts.close()
    assert first.metrics == second.metrics
    metrics = first.metrics
    assert (metrics["num_prompts"], metrics["num_samples"]) == (6, 4)
    assert {"pass@1", "pass@4", "majority@4", "kl", "entropy"} <= metrics.keys()
    assert first.greedy["reward_mean"] == second.greedy["reward_mean"]
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-5)  # the policy is the reference before training
    assert len(first.samples) == 6 * 4 + 6
    rewards = [line["reward"] for line in first.samples if line["kind"] == "eval"]
    assert metrics["reward_mean"] == pytest.approx(sum(rewards) / 24)
    assert first.rewards == [rewards[i : i + 4] for i in range(0, 24, 4)]


def test_each_reward_is_averaged_where_it_applies(tmp_path: Path) -> None:
    """Two rewards that read the prompt."""
    rows = [{"prompt": prompt, "answer": "yes"} for prompt in ("a1", "a4", "b12", "b345")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def size(prompts, completions, **columns):\n    return [float(len(p)) for p in prompts]\n\n\n"
        "def digit(prompts, completions, **columns):\n"
        "    return [float(p[1]) if p[0] == 'a' else None for p in prompts]\n"
    )
    rules = (("size", 2.0), ("digit", 1.0))
    functions = [{"use": f"{tmp_path}/rewards.py:{name}", "weight": weight} for name, weight in rules]
    path = str(tmp_path / "rows.jsonl")
    task = {"name": "rows", "data": path, "eval_data": path}
    model = tiny_model(tmp_path / "model", "llama")
    settings = running.config("grpo", model, task=task, reward={"functions": functions})
    parts = load_collector(prepare(settings), options=Options(device="cpu"))
    found = evaluate(parts, parts.eval_prompts, samples=2)
    parts.close()
    flat = found.flat()
    assert found.rewards == [[5.0, 5.0], [8.0, 8.0], [6.0, 6.0], [8.0, 8.0]]
    assert flat["eval/verifier_mean"] == 0.0  # not the reward here, so a judge of its own
    assert flat["eval/reward/size"] == flat["eval/greedy/reward/size"] == (2 + 2 + 3 + 4) / 4  # before its weight
    assert flat["eval/reward/digit"] == (1 + 4) / 2
    assert flat["eval/reward_mean"] == (5 + 8 + 6 + 8) / 4


def interval_of(folder: Path, rewards: str, **reward: Any) -> tuple[list[float], list[float]]:
    """Evaluate three prompts, "2", "4" and "9", whose answer is all that a model writes; return each one's reward, and
    their interval.
    """
    rows = [{"prompt": prompt, "answer": "none"} for prompt in ("2", "4", "9")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.py").write_text(rewards)
    path = str(folder / "rows.jsonl")
    task = {"name": "rows", "data": path, "eval_data": path, **reward.pop("task", {})}
    settings = running.config(
        "grpo", tiny_model(folder / "model", "llama"), task=task, reward={"functions": [], **reward}
    )
    parts = load_collector(prepare(settings), options=Options(device="cpu"))
    try:
        found = evaluate(parts, parts.eval_prompts)
    finally:
        parts.close()
    return [group[0] for group in found.rewards], found.metrics["reward_ci"]


TENTHS = "def tenth(prompts, completions, **columns):\n    return [int(prompt) / 10 for prompt in prompts]\n"


def test_scores_that_happen_to_be_between_0_and_1_have_the_interval_of_a_mean(tmp_path: Path) -> None:
    """Student's, by scipy: also beyond 1, where no share is."""
    from scipy.stats import t

    rewards, found = interval_of(tmp_path, TENTHS, functions=[{"use": f"{tmp_path / 'own.py'}:tenth"}])
    assert sorted(rewards) == pytest.approx([0.2, 0.4, 0.9])
    error = math.sqrt(((0.2 - 0.5) ** 2 + (0.4 - 0.5) ** 2 + (0.9 - 0.5) ** 2) / 2 / 3)
    assert found == pytest.approx(t.interval(0.95, 2, loc=0.5, scale=error))
    assert found[1] > 1.0


def test_verdicts_of_a_task_that_declares_them_have_wilsons_interval(tmp_path: Path) -> None:
    """By scipy, of 0 of 3."""
    from scipy.stats import binomtest

    rewards, found = interval_of(tmp_path, "")
    assert rewards == [0.0, 0.0, 0.0]
    wilson = binomtest(0, 3).proportion_ci(0.95, method="wilson")
    assert found == pytest.approx([wilson.low, wilson.high])


OWN_TASK = """
from tinyrl.tasks import Task


def halves(prompts, completions, **columns):
    return [0.5 if prompt == "4" else 1.0 for prompt in prompts]


TASK = Task(name="own", verify=halves, right_or_wrong=True)
"""


def test_a_score_between_fails_its_row_where_the_task_declares_verdicts(tmp_path: Path) -> None:
    rewards, _ = interval_of(tmp_path, OWN_TASK, task={"name": f"{tmp_path / 'own.py'}:TASK"})
    assert [reward for reward in rewards if not math.isnan(reward)] == [1.0, 1.0]


def test_samples_without_a_reward_are_counted_with_the_first_reason(tmp_path: Path) -> None:
    """One of three prompts fails, sampled twice and greedily once, and another has a reward of None."""
    rows = [{"prompt": prompt, "answer": "none"} for prompt in ("2", "4", "9", "7")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(
        "def fails(prompts, completions, **columns):\n"
        "    return [None if p == '7' else 1 / (int(p) - 4) for p in prompts]\n"
    )
    path = str(tmp_path / "rows.jsonl")
    settings = running.config(
        "grpo",
        tiny_model(tmp_path / "model", "llama"),
        task={"name": "rows", "data": path, "eval_data": path},
        reward={"functions": [{"use": f"{tmp_path / 'own.py'}:fails"}]},
    )
    parts = load_collector(prepare(settings), options=Options(device="cpu"))
    try:
        found = evaluate(parts, parts.eval_prompts, samples=2)
    finally:
        parts.close()
    assert (found.flat()["eval/dropped"], found.flat()["eval/greedy/dropped"]) == (4, 2)
    assert "ZeroDivisionError" in found.why_dropped
    assert "ZeroDivisionError" in found.dropped_warning()


def test_where_every_sample_has_a_reward_there_is_no_warning(tmp_path: Path) -> None:
    settings = running.config("grpo", tiny_model(tmp_path, "llama"))
    parts = load_collector(prepare(settings), options=Options(device="cpu"))
    try:
        found = evaluate(parts, parts.eval_prompts[:2])
    finally:
        parts.close()
    assert found.flat()["eval/dropped"] == found.flat()["eval/greedy/dropped"] == 0
    assert found.dropped_warning() == ""


def test_a_run_warns_of_held_out_samples_without_a_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reward fails on held-out prompts only: in evaluations, that of step 0 among them."""
    rows = [{"prompt": str(number), "answer": "none"} for number in range(1, 5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "0", "answer": "none"}) + "\n")
    (tmp_path / "own.py").write_text(
        "def inverse(prompts, completions, **columns):\n    return [1 / int(p) for p in prompts]\n"
    )
    settings = running.config(
        "grpo",
        tiny_model(tmp_path / "model", "llama"),
        task={"name": "rows", "data": f"{tmp_path}/rows.jsonl", "eval_data": f"{tmp_path}/held.jsonl"},
        reward={"functions": [{"use": f"{tmp_path / 'own.py'}:inverse"}]},
        run={"num_steps": 1},
    )
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    assert [line["eval/dropped"] for line in running.metrics(run)] == [1, 1]
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: held-out")]
    assert len(warnings) == 2
    assert "ZeroDivisionError" in warnings[0]
