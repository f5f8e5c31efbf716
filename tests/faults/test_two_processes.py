"""Two processes on one run folder: the second is refused with the first one's number, and loses it nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import running
from tests.faults.children import Child, command, resumed, train, wait_for
from tests.trainers.test_resume import assert_same
from tinyrl.config.recipe import dump_config
from tinyrl.config.schema import Config
from tinyrl.runs.run_dir import RunDir

STEPS = 8


@pytest.fixture
def settings(model: Path) -> Config:
    return running.config("grpo", model, run={"num_steps": STEPS, "save_every": 1, "eval_prompts": 4})


def refused(child: Child, by: Child, run: RunDir) -> None:
    assert child.end() == 2, child.said
    said = [line for line in child.said.splitlines() if line.startswith("tinyrl: ")]
    assert [line.partition(" on ")[0] for line in said] == [f"tinyrl: run {run.path} is in use: process {by.pid}"]
    assert "Traceback" not in child.said


@pytest.mark.slow
def test_a_run_that_is_trained_is_neither_resumed_nor_overwritten_and_a_kill_frees_it(
    settings: Config, tmp_path: Path
) -> None:
    whole = Child(train, settings, tmp_path, "whole", output=tmp_path / "whole.txt")
    assert whole.end() == 0, whole.said
    (tmp_path / "recipe.yaml").write_text(dump_config(settings))
    run = RunDir(tmp_path / "run")
    first = Child(train, settings, tmp_path, output=tmp_path / "first.txt")
    wait_for(run.metrics.exists, first)
    first.send(signal.SIGSTOP)
    again = ("train", "grpo", str(tmp_path / "recipe.yaml"), "--output-dir", str(tmp_path), "--name", "run")
    refused(Child(command, "train", "--resume", str(run.path), output=tmp_path / "second.txt"), first, run)
    refused(Child(command, *again, "--overwrite", output=tmp_path / "third.txt"), first, run)
    assert first.kill() == -signal.SIGKILL
    resumed(run)
    assert_same(RunDir(tmp_path / "whole"), run, STEPS)
    assert not (run.path / ".lock").exists()
