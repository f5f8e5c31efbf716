"""Evaluations end to end: what they count, by judge and by prompt."""

import json
import math
from pathlib import Path

import pytest

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.evaluation.evaluate import Evaluation, evaluate
from tinyrl.rollout.load import load_collector
from tinyrl.runs.launched import Options


def test_evaluation_is_repeatable_and_counts_what_it_says(tmp_path: Path) -> None:
    parts = load_collector(running.config("grpo", tiny_model(tmp_path, "llama")), options=Options(device="cpu"))
    first, second = (evaluate(parts, num_prompts=6, samples=4) for _ in range(2))
    parts.close()
    assert first.metrics == second.metrics
    metrics = first.metrics
    assert metrics["num_prompts"] == 6
    assert metrics["num_samples"] == 4
    assert {"pass@1", "pass@4", "majority@4", "kl", "entropy", "greedy"} <= metrics.keys()
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-5)  # the policy is the reference before training
    assert len(first.samples) == 6 * 4 + 6
    rewards = [line["reward"] for line in first.samples if line["kind"] == "eval"]
    assert metrics["reward_mean"] == pytest.approx(sum(rewards) / 24)
    # reward_ci is over prompts, whose means are these
    assert first.by_prompt == pytest.approx([sum(rewards[i : i + 4]) / 4 for i in range(0, 24, 4)])


def own_evaluation(tmp_path: Path, rows: list[dict]) -> Evaluation:
    """One evaluation on rows of one's own, judged by two rewards that read the prompt."""
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
    try:
        return evaluate(parts, num_prompts=8, samples=2)
    finally:
        parts.close()


def test_what_each_judge_says_is_kept_by_prompt_and_averaged_where_it_applies(tmp_path: Path) -> None:
    found = own_evaluation(tmp_path, [{"prompt": p, "answer": "yes"} for p in ("a1", "a4", "b12", "b345")])
    values, flat = found.values, found.flat()
    assert values["reward/size"] == [[2.0, 2.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]
    assert values["reward/digit"][:2] == [[1.0, 1.0], [4.0, 4.0]]
    assert all(math.isnan(value) for prompt in values["reward/digit"][2:] for value in prompt)
    assert values["reward"] == [[5.0, 5.0], [8.0, 8.0], [6.0, 6.0], [8.0, 8.0]]
    assert values["verifier"] == [[0.0, 0.0]] * 4  # not the reward here, so a judge of its own
    assert flat["eval/reward/size"] == flat["eval/greedy/reward/size"] == (2 + 2 + 3 + 4) / 4  # before its weight
    assert flat["eval/reward/digit"] == (1 + 4) / 2
    assert flat["eval/reward_mean"] == (5 + 8 + 6 + 8) / 4


def test_rows_without_an_answer_do_not_count_as_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = own_evaluation(tmp_path, [{"prompt": f"a{i}", "answer": ""} for i in range(4)]).flat()
    assert not [key for key in flat if "pass@" in key or "verifier" in key or "answers" in key or "majority" in key]
    monkeypatch.setattr("tinyrl.tasks.rows.normalised_text", lambda text: "no" if text == "no" else "yes")
    answers = ["yes", "yes", "no", None]
    flat = own_evaluation(tmp_path, [{"prompt": f"a{i}", "answer": answer} for i, answer in enumerate(answers)]).flat()
    assert flat["eval/pass@1"] == flat["eval/pass@2"] == flat["eval/verifier_mean"] == pytest.approx(2 / 3)
