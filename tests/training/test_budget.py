"""The micro-batch budget, run.micro_batch_tokens, in every pass through a model of every method and phase."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.tiny_models import TinyModels
from tinyrl.config.schema import Config
from tinyrl.models.micro_batches import SequenceLengths

BUDGET = 77
RUN = {"num_steps": 1, "eval_prompts": 4, "micro_batch_tokens": BUDGET, "threads": 1}


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The budget of every plan that is made."""
    made: list[int] = []
    plan = SequenceLengths.plan

    def noted(self: SequenceLengths, rows: Sequence[int], *, max_tokens: int) -> list[list[int]]:
        made.append(max_tokens)
        return plan(self, rows, max_tokens=max_tokens)

    monkeypatch.setattr(SequenceLengths, "plan", noted)
    return made


def test_methods_that_sample(tiny: TinyModels, budgets: list[int], tmp_path: Path) -> None:
    """Values, rescoring, update, evaluation and a reward model of its own."""
    reward: dict[str, Any] = {"functions": [], "model": str(tiny.reward("llama"))}
    settings = running.config("ppo", tiny("llama"), run=RUN, reward=reward)
    assert running.train(settings, tmp_path)[0] == 0
    assert len(budgets) >= 8
    assert set(budgets) == {BUDGET}


def test_methods_that_learn_from_text(tiny: TinyModels, budgets: list[int], tmp_path: Path) -> None:
    rows = [{"prompt": f"{letter}:", "chosen": "yes", "rejected": "no"} for letter in "abcdefghij" * 2]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"data": str(tmp_path / "rows.jsonl")}
    values = {"method": "dpo", "model": {"path": str(tiny("llama"))}, "task": task, "run": RUN}
    assert running.train(Config.model_validate(values), tmp_path)[0] == 0
    assert len(budgets) >= 3  # before, update, after
    assert set(budgets) == {BUDGET}
