"""Evaluations end to end: what they count, by judge and by prompt."""

import json
from pathlib import Path

import pytest

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.evaluation.evaluate import evaluate
from tinyrl.rollout.load import load_collector
from tinyrl.runs.launched import Options


def test_evaluation_is_repeatable_and_counts_what_it_says(tmp_path: Path) -> None:
    parts = load_collector(running.config("grpo", tiny_model(tmp_path, "llama")), options=Options(device="cpu"))
    first, second = (evaluate(parts, parts.eval_prompts[:6], samples=4) for _ in range(2))
    parts.close()
    assert first.metrics == second.metrics
    metrics = first.metrics
    assert (metrics["num_prompts"], metrics["num_samples"]) == (6, 4)
    assert {"pass@1", "pass@4", "majority@4", "kl", "entropy", "greedy"} <= metrics.keys()
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
    parts = load_collector(
        running.config("grpo", model, task=task, reward={"functions": functions}), options=Options(device="cpu")
    )
    found = evaluate(parts, parts.eval_prompts, samples=2)
    parts.close()
    flat = found.flat()
    assert found.rewards == [[5.0, 5.0], [8.0, 8.0], [6.0, 6.0], [8.0, 8.0]]
    assert flat["eval/verifier_mean"] == 0.0  # not the reward here, so a judge of its own
    assert flat["eval/reward/size"] == flat["eval/greedy/reward/size"] == (2 + 2 + 3 + 4) / 4  # before its weight
    assert flat["eval/reward/digit"] == (1 + 4) / 2
    assert flat["eval/reward_mean"] == (5 + 8 + 6 + 8) / 4
