"""Damage to the newest checkpoint of a real run: one warning, and a resume from the newest sound one.

It comes to the same end as an undamaged run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import running
from tests.trainers.test_resume import assert_same
from tinyrl.config.schema import Config
from tinyrl.runs.checkpoint import MANIFEST, list_checkpoints, problem_with
from tinyrl.runs.run_dir import RunDir

STEPS = 4


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def truncate(folder: Path) -> None:
    os.truncate(folder / "adapter_model.safetensors", 1000)


def flip_one_bit(folder: Path) -> None:
    """Of a weight, so that nothing but its value is wrong."""
    file = folder / "critic" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1 << 3
    file.write_bytes(content)


def killed_mid_save(folder: Path) -> None:
    """What a writer leaves that was killed before the manifest: the folder under its temporary name."""
    (folder / MANIFEST).unlink()
    folder.rename(folder.with_name(f".writing-{folder.name}"))


def copied_mid_save(folder: Path) -> None:
    """What another tool leaves that copied a folder while it was being written: no manifest, no generators."""
    (folder / MANIFEST).unlink()
    (folder / "random.safetensors").unlink()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty folder": (empty, "MANIFEST.json is missing"),
    "missing file": (lambda f: (f / "value_head.safetensors").unlink(), "value_head.safetensors is missing"),
    "truncated file": (truncate, "adapter_model.safetensors has 1000 bytes instead of"),
    "missing optimizer": (lambda f: (f / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    "missing generators": (lambda f: (f / "random.safetensors").unlink(), "random.safetensors is missing"),
    "one flipped bit": (flip_one_bit, "critic/adapter_model.safetensors is not what was written"),
    "unfinished, under its name": (copied_mid_save, "MANIFEST.json is missing"),
    "unfinished, under the writer's": (killed_mid_save, ""),
}


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


@pytest.fixture
def run(whole: RunDir, tmp_path: Path) -> RunDir:
    """A copy of the run, to be damaged."""
    return RunDir(shutil.copytree(whole.path, tmp_path / "run"))


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.wide
def test_a_damaged_newest_checkpoint_gives_way_with_one_warning(
    kind: str, run: RunDir, whole: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """No warning for what a killed writer leaves: that is not damage, and never was a checkpoint."""
    damage, problem = DAMAGE[kind]
    newest = list_checkpoints(run.checkpoints)[-1]
    damage(newest)
    assert running.go_on(run) == 0
    said = capsys.readouterr().err
    expected = [f"warning: step-00000{STEPS}: {problem}"] if problem else []
    lines = [line for line in said.splitlines() if "warning" in line]
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected, said
    assert all(line.endswith(f"; using step-00000{STEPS - 1} instead") for line in lines), said
    assert f"at step {STEPS - 1} of {STEPS} from step-00000{STEPS - 1}" in said
    assert_same(whole, run, STEPS)
    assert [problem_with(folder) for folder in list_checkpoints(run.checkpoints)[-2:]] == [None, None]


def test_several_damaged_checkpoints_are_one_warning_too(
    run: RunDir, whole: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """When none is sound the run begins again, with the random numbers it had."""
    for folder in list_checkpoints(run.checkpoints):
        flip_one_bit(folder)
    assert running.go_on(run) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(lines) == 1, lines
    assert lines[0].endswith("; using the start instead")
    assert_same(whole, run, STEPS)
