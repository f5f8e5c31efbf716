"""Prompts whose group was all right give their place to others for some epochs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import running
from tests.tiny_models import TinyModels
from tests.trainers.test_on_policy import write_reward
from tinyrl.config.sections import TaskConfig
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.trainers.choice import SolvedPrompts, Tried, choice_of
from tinyrl.training.state import Controllers, read_state

PROMPTS = [PreparedPrompt(i, {"prompt": f"p{i}"}, f"p{i}", f"p{i}", [1], "") for i in range(4)]
NAN = float("nan")


def of(record: dict[str, int] | None = None, **task: Any) -> SolvedPrompts:
    settings = TaskConfig.model_validate({"skip_solved": 1, **task})
    return SolvedPrompts(settings, PROMPTS, num_prompts=2, seed=0, record={} if record is None else record)


def see(solved: SolvedPrompts, step: int, rows: list[int], rewards: list[float]) -> dict[str, float]:
    """A step that sampled two completions for each of these prompts; its metrics."""
    tried = Tried(solved.task.solved_reward)
    tried.look([PROMPTS[i] for i in rows], torch.tensor(rewards))
    return solved.keep(step, tried)


def test_a_group_is_solved_when_all_its_rewards_are_right() -> None:
    solved = of(solved_reward=0.5)
    metrics = see(solved, 0, [0, 1, 2, 3], [1.0, 0.5, 1.0, 0.4, NAN, 1.0, NAN, NAN])
    assert metrics == {"reward/skipped_prompts": 0.0}
    assert solved.skipped(0) == {0, 2}


def test_it_is_left_out_for_its_epochs_and_then_tried_again() -> None:
    """Four prompts, two a step: an epoch is two steps. Solved in epoch 1 it is left out in epochs 1 to 3."""
    solved = of(skip_solved=2)
    see(solved, 2, [0], [1.0, 1.0])
    assert [bool(solved.skipped(step)) for step in range(2, 10)] == [True] * 6 + [False] * 2
    assert see(solved, 8, [0], [1.0, 0.0]) == {"reward/skipped_prompts": 0.0}
    assert solved.record == {}


def test_a_prompt_with_two_groups_is_solved_when_both_are() -> None:
    for first in (0.0, 1.0):
        solved = of()
        see(solved, 0, [0, 0], [first, 1.0, 1.0, 1.0])
        assert solved.skipped(0) == ({0} if first else set())


def test_a_row_is_known_by_what_it_holds() -> None:
    solved = of()
    see(solved, 0, [0], [1.0, 1.0])
    moved = of(solved.record)
    moved.prompts = [replace(PROMPTS[1], index=0), replace(PROMPTS[0], index=1)]
    assert moved.skipped(0) == {1}


def test_nothing_is_looked_at_unless_it_is_asked_for() -> None:
    settings = running.config("grpo", Path("model"), task={"skip_solved": 0})
    choice = choice_of(settings, PROMPTS, Controllers())
    tried = Tried(1.0)
    tried.look(PROMPTS[:1], torch.ones(2))
    assert choice.keep(0, tried) == choice.record == {}


def drawn(run: running.RunDir) -> dict[int, list[int]]:
    """Which prompts each step sampled, by samples.jsonl, that has four completions of each."""
    steps: dict[int, list[int]] = {}
    for line in map(json.loads, run.samples.read_text().splitlines()):
        if line.get("kind") == "train":
            steps.setdefault(line["step"], []).append(line["prompt_index"])
    return {step: rows[::4] for step, rows in steps.items()}


@pytest.mark.parametrize("refill_rounds", [0, 1])
@pytest.mark.wide
def test_a_run_leaves_out_what_is_solved_and_keeps_what_is_not(
    refill_rounds: int, tiny: TinyModels, tmp_path: Path
) -> None:
    """Two of eight prompts are always right, two always wrong, the others vary; four are drawn a step, so that an
    epoch is two steps.
    """
    rows = [{"prompt": f"letters: {a} b sorted:", "answer": a} for a in "aabbcdef"]
    rows = [{**row, "number": i} for i, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    varied = "1.0 if a == 'a' else 0.0 if a == 'b' else len(set(c)) / 100"
    (tmp_path / "rewards.py").write_text(
        f"def score(prompts, completions, answer, **columns):\n"
        f"    return [{varied} for a, c in zip(answer, completions)]\n"
    )
    data = str(tmp_path / "rows.jsonl")
    settings = running.config(
        "grpo",
        tiny("llama"),
        task={"name": "rows", "data": data, "eval_data": data, "skip_solved": 1, "max_samples": None},
        reward={"functions": [{"use": f"{tmp_path / 'rewards.py'}:score"}]},
        grpo={"refill_rounds": refill_rounds},
        run={"num_steps": 8, "eval_every": 0, "eval_prompts": 0, "save_every": 4},
    )
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    steps = drawn(run)
    assert all(len(set(rows)) == 4 for rows in steps.values())
    # Epochs 0 and 2 (steps 1, 2 and 5, 6) try the solved ones; 1 and 3 leave them out, and draw others instead.
    late = [row for step in (3, 4, 7, 8) for row in steps[step]]
    assert not {0, 1} & {*late}
    skipped = [line["reward/skipped_prompts"] for line in running.metrics(run)[1:]]
    assert skipped[2:4] == skipped[6:8] == [2.0, 2.0]
    if not refill_rounds:
        assert {2, 3} <= {*late}  # all wrong: they come as before
        assert {0, 1} <= {row for step in (5, 6) for row in steps[step]}
    kept = read_state(run.checkpoints / "step-000004").run.controllers.solved
    assert set(kept.values()) == {0}
    assert len(kept) == 2


def test_where_all_is_solved_prompts_come_as_before(tiny: TinyModels, tmp_path: Path) -> None:
    reward = write_reward(tmp_path, "[1.0] * len(completions)")
    runs = []
    for skip in (0, 5):
        task = {"max_samples": 6, "skip_solved": skip}
        settings = running.config("grpo", tiny("llama"), reward=reward, task=task, run={"eval_every": 0})
        runs.append(drawn(running.train(settings, tmp_path, name=f"skip-{skip}")[1]))
    assert runs[0][1] == runs[1][1]
    assert {len(rows) for rows in runs[1].values()} == {4}
    assert runs[0][3] == runs[1][3]  # all six are solved after two steps
