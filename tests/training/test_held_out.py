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
@pytest.mark.parametrize("method", ["grpo", "ppo", "sft", "reward", "dpo"])
@pytest.mark.wide
def test_no_held_out_prompts_asked_for_is_no_evaluation(
    method: str, model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, run, _ = running.train(settings(method, model, rows, eval_prompts=0), tmp_path)
    assert code == 0
    assert not [key for line in running.metrics(run) for key in line if key.startswith("eval/")]
    assert len(running.metrics(run)) == 3
    assert (run.path / "report.html").is_file()
    shown = capsys.readouterr()
    assert ("tinyrl eval" in shown.out) == (method in running.METHODS)
    assert "held out" not in shown.err


@pytest.mark.parametrize("method", ["grpo", "sft", "reward", "dpo"])
@pytest.mark.wide
def test_few_held_out_prompts_are_said_before_the_first_step(
    method: str, model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running.train(settings(method, model, rows, num_steps=1), tmp_path)
    assert "warning: only 1 different prompt is held out, so held-out scores say little" in capsys.readouterr().err


@pytest.mark.whole
@pytest.mark.slow
def test_a_run_without_a_verifier_says_nothing_of_one(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run, _ = running.train(settings("grpo", model, rows, num_steps=1), tmp_path)
    shown = capsys.readouterr()
    for text in (shown.out, shown.err, run.metrics.read_text(), (run.path / "report.html").read_text()):
        assert "pass@1" not in text
        assert "verifier_mean" not in text
        assert "nan" not in text.lower().split()
    assert "eval/reward/variety" in run.metrics.read_text()
    assert "not enough prompts for an interval" in (run.path / "report.html").read_text()
