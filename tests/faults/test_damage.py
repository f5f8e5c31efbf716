"""A flipped bit in checkpoints of a real run: one warning, a resume from the newest sound one, and the same end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import running
from tests.training.test_resume import assert_same
from tinyrl.config.schema import Config
from tinyrl.runs.checkpoint import list_checkpoints, problem_with
from tinyrl.runs.run_dir import RunDir

STEPS = 4


def flip_one_bit(folder: Path) -> None:
    """Of a weight, so that nothing but its value is wrong."""
    file = folder / "critic" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1 << 3
    file.write_bytes(content)


def settings_for(model: Path, folder: Path) -> Config:
    """PPO on rows without answers, so that no gold answer can give a warning, and with enough held-out prompts."""
    for name, words in (("rows", list("abcdefghijkl")), ("eval", [f"w{i}" for i in range(30)])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"say {w}:"}) + "\n" for w in words))
    often = {"num_steps": STEPS, "save_every": 1, "eval_every": 2, "eval_prompts": 4}
    task = {"name": "rows", "data": str(folder / "rows.jsonl"), "eval_data": str(folder / "eval.jsonl")}
    return running.config("ppo", model, task=task, run=often)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("whole")
    code, run, _ = running.train(settings_for(model, folder), folder)
    assert code == 0
    return run


@pytest.mark.parametrize(("damaged", "instead"), [(1, f"step-00000{STEPS - 1}"), (9, "the start")])
@pytest.mark.wide
def test_damaged_checkpoints_give_way_with_one_warning(
    damaged: int, instead: str, whole: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest one, or all; then the run begins again with the random numbers it had."""
    run = RunDir(shutil.copytree(whole.path, tmp_path / "run"))
    for folder in list_checkpoints(run.checkpoints)[-damaged:]:
        flip_one_bit(folder)
    assert running.go_on(run) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert "critic/adapter_model.safetensors" in line
    assert instead in line
    assert_same(whole, run, STEPS)
    assert [problem_with(folder) for folder in list_checkpoints(run.checkpoints)[-2:]] == [None, None]
