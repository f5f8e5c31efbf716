"""Held-out numbers during a run: none asked for, few prompts, no verifier."""

import json
from pathlib import Path

import pytest

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.config.schema import Config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 rows with 10 different prompts, as text, as pairs, and for sampling: a tenth of the prompts is one."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [{"prompt": f"{i % 10}:", "completion": "aa", "chosen": "aa", "rejected": "b", "n": i} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def settings(method: str, model: Path, rows: Path, **run: int) -> Config:
    run = {"num_steps": 2, "threads": 1, **run}
    if method in running.METHODS:
        return running.config(method, model, task={"name": "rows", "data": str(rows)}, run=run)
    values = {"method": method, "model": {"path": str(model)}, "task": {"data": str(rows)}, "run": run}
    return Config.model_validate(values)


@pytest.mark.whole
@pytest.mark.parametrize("method", ["grpo", "dpo"])
def test_no_held_out_prompts_asked_for_is_no_evaluation(method: str, model: Path, rows: Path, tmp_path: Path) -> None:
    code, run, _ = running.train(settings(method, model, rows, eval_prompts=0), tmp_path)
    assert code == 0
    assert not [key for line in running.metrics(run) for key in line if key.startswith("eval/")]
    assert len(running.metrics(run)) == 3
    assert (run.path / "report.html").is_file()
