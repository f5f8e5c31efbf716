"""kill -9, for real, at any moment of a run and inside its saves, and flipped bits in its checkpoints.

What is left can be resumed, and ends, to the bit, as the run that was never killed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import running
from tests.faults.children import Child, before_call, go_on, resumed, train, workers_left
from tests.faults.lookup_runs import CODE
from tests.tiny_vision import tiny_vision
from tests.training.test_resume import assert_same
from tests.training.test_vision_runs import settings as on_pictures
from tinyrl.config.schema import Config
from tinyrl.runs import checkpoint
from tinyrl.runs.checkpoint import list_checkpoints, problem_with
from tinyrl.runs.run_dir import RunDir

STEPS = 4
MOST_DRAWS = 30  # of a moment, until one comes after the beginning and before the end


class Whole(NamedTuple):
    """An undisturbed run."""

    settings: Config
    run: RunDir
    seconds: float  # from the start of its process to the end


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    ppo, often = {"num_epochs": 3, "minibatch_size": 4, "target_kl": 6.0}, {"num_steps": STEPS, "save_every": 1}
    run = {**often, "eval_prompts": 4, "eval_every": 2}
    settings = running.config("ppo", model, reward=running.IN_A_WORKER, ppo=ppo, run=run)
    start = time.monotonic()
    child = Child(train, settings, folder, "whole", output=folder / "whole.txt")
    assert child.end() == 0, child.said
    return Whole(settings, RunDir(folder / "whole"), time.monotonic() - start)


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_until(settings: Config, folder: Path, module: str, call: str, number: int) -> None:
    """Train, and send SIGKILL to this process at the number-th call of a function."""
    before_call(import_module(module), call, number, do=kill_myself, within=folder if call == "rmdir" else None)
    train(settings, folder)


def go_on_until(path: Path, call: str, number: int) -> None:
    """The same of a run that is resumed."""
    before_call(os, call, number, do=kill_myself, within=path if call == "rmdir" else None)
    go_on(path)


def killed_run(whole: Whole, folder: Path, draw: random.Random) -> tuple[RunDir, int]:
    """A run that was killed at a random moment after it had begun, and the number of its process."""
    for attempt in range(MOST_DRAWS):
        name = f"killed-{attempt}"
        child = Child(train, whole.settings, folder, name, output=folder / f"{name}.txt")
        time.sleep(draw.random() * whole.seconds)
        code, run = child.kill(), RunDir(folder / name)
        assert code in (0, -signal.SIGKILL), child.said
        if code != 0 and (run.path / "config.yaml").exists():
            return run, child.pid
    raise AssertionError(f"none of {MOST_DRAWS} moments fell into the run")


def assert_whole_checkpoints(run: RunDir) -> None:
    """A kill, unlike damage, leaves nothing to warn about."""
    problems = {folder.name: problem_with(folder) for folder in list_checkpoints(run.checkpoints)}
    assert set(problems.values()) <= {None}, problems


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.release)])
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(times: int, whole: Whole, tmp_path: Path) -> None:
    draw, pids = random.Random(times), set[int]()
    for number in range(times):
        (folder := tmp_path / str(number)).mkdir()
        run, pid = killed_run(whole, folder, draw)
        pids.add(pid)
        assert_whole_checkpoints(run)
        assert "warning: step" not in resumed(run)
        assert_same(whole.run, run, STEPS)
        assert_whole_checkpoints(run)
    assert workers_left(pids) == []


@pytest.mark.slow
@pytest.mark.parametrize(("call", "number"), [("fsync", 30), ("rmdir", 1)])
def test_a_kill_within_a_save_and_within_its_resume_loses_nothing(
    call: str, number: int, whole: Whole, tmp_path: Path
) -> None:
    """At a call of a save or of the pruning after it; the resume at the first such call, too."""
    run = RunDir(tmp_path / "run")
    child = Child(train_until, whole.settings, tmp_path, "os", call, number, output=tmp_path / "said.txt")
    assert child.end() == -signal.SIGKILL, child.said
    assert_whole_checkpoints(run)
    Child(go_on_until, run.path, call, 1, output=tmp_path / "said.txt").end()
    assert_whole_checkpoints(run)
    assert "warning: step" not in resumed(run)
    assert_same(whole.run, run, STEPS)


@pytest.mark.slow
def test_a_resume_that_was_killed_while_it_cut_the_records_holds_no_line_twice(whole: Whole, tmp_path: Path) -> None:
    """The line of step 2 is written and its checkpoint is not; metrics.jsonl is cut and samples.jsonl is not yet."""
    run = RunDir(tmp_path / "run")
    at = checkpoint.__name__, "write_checkpoint", 3
    child = Child(train_until, whole.settings, tmp_path, *at, output=tmp_path / "said.txt")
    assert child.end() == -signal.SIGKILL, child.said
    before = [file.stat().st_size for file in (run.metrics, run.samples)]
    assert Child(go_on_until, run.path, "truncate", 2, output=tmp_path / "said.txt").end() == -signal.SIGKILL
    assert run.metrics.stat().st_size < before[0]
    assert run.samples.stat().st_size == before[1]
    resumed(run)
    assert_same(whole.run, run, STEPS)


@pytest.mark.slow
def test_a_run_on_pictures_that_was_killed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    base = tiny_vision("smolvlm", tmp_path / "model")
    often = {"num_steps": STEPS, "save_every": 1, "eval_every": 2}
    (tmp_path / "length.py").write_text(CODE)
    reward = {"functions": [{"use": f"{tmp_path / 'length.py'}:length"}]}
    settings = on_pictures(base, tmp_path, num_steps=STEPS, reward=reward, run=often)
    code, whole, _ = running.train(settings, tmp_path, name="whole")
    assert code == 0
    at = checkpoint.__name__, "write_checkpoint", 3
    child = Child(train_until, settings, tmp_path, *at, output=tmp_path / "said.txt")
    assert child.end() == -signal.SIGKILL, child.said
    run = RunDir(tmp_path / "run")
    resumed(run)
    assert_same(whole, run, STEPS)


def flip_one_bit(folder: Path) -> None:
    """Of a weight, so that nothing but its value is wrong."""
    file = folder / "critic" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1 << 3
    file.write_bytes(content)


def test_a_damaged_checkpoint_gives_way_with_one_warning(whole: Whole, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(whole.run.path, tmp_path / "run"))
    flip_one_bit(list_checkpoints(run.checkpoints)[-1])
    [line] = [line for line in resumed(run).splitlines() if "critic/adapter_model.safetensors" in line]
    assert "warning" in line
    assert f"step-00000{STEPS - 1}" in line
    assert_same(whole.run, run, STEPS)
    assert [problem_with(folder) for folder in list_checkpoints(run.checkpoints)[-2:]] == [None, None]


@pytest.mark.slow
def test_a_run_of_damaged_checkpoints_is_left_as_it_is(whole: Whole, tmp_path: Path) -> None:
    """A resume would have nothing to go on from, and would begin the run again."""
    run = RunDir(shutil.copytree(whole.run.path, tmp_path / "run"))
    for folder in list_checkpoints(run.checkpoints):
        flip_one_bit(folder)
    records = run.lengths()
    command = [sys.executable, "-m", "tinyrl", "train", "--resume", str(run.path), "--device", "cpu"]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 2
    assert run.lengths() == records
