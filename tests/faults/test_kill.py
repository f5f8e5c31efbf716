"""kill -9, for real, at any moment of a run and inside its saves.

What is left can be resumed, and ends, to the bit, as the run that was never killed.
"""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.faults.children import Child, before_call, go_on, resumed, train, workers_left
from tests.training.test_resume import assert_same
from tinyrl.config.schema import Config
from tinyrl.runs import checkpoint
from tinyrl.runs.checkpoint import list_checkpoints, problem_with
from tinyrl.runs.run_dir import RunDir

STEPS = 4
MOST_DRAWS = 30  # of a moment, until one comes after the beginning and before the end
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"grpo": {"num_epochs": 2, "minibatch_size": 8, "dynamic_sampling_rounds": 1}, "run": {"eval_every": 1}},
    "ppo": {
        "ppo": {"num_epochs": 3, "minibatch_size": 4, "target_kl": 6.0},
        "run": {"eval_every": 2},
    },
    "dpo": {
        "task": {"name": "rows", "data": "pairs.jsonl"},
        "lora": {"dropout": 0.1},
        "dpo": {"loss": "kto", "batch_size": 12},
        "run": {"eval_every": 1},
    },
}
PAIRS = [{"prompt": f"{n} of", "chosen": f" {n} and more", "rejected": " no"} for n in range(40)]


@dataclass
class Whole:
    """An undisturbed run."""

    settings: Config
    run: RunDir
    seconds: float  # from the start of its process to the end


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    """The uninterrupted run of a method, made once."""

    @cache
    def make(method: str) -> Whole:
        folder, sections = tmp_path_factory.mktemp(method), copy.deepcopy(METHODS[method])
        if "task" in sections:
            sections["task"]["data"] = str(folder / "pairs.jsonl")
            (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
        often = {"num_steps": STEPS, "save_every": 1, "eval_prompts": 4}
        settings = running.config(method, model, **{**sections, "run": {**often, **sections["run"]}})
        start = time.monotonic()
        child = Child(train, settings, folder, "whole", output=folder / "whole.txt")
        assert child.end() == 0, child.said
        return Whole(settings, RunDir(folder / "whole"), time.monotonic() - start)

    return make


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_until(settings: Config, folder: Path, call: str, number: int) -> None:
    """Train, and send SIGKILL to this process at the number-th call of os.<call>."""
    before_call(os, call, number, do=kill_myself)
    train(settings, folder)


def train_until_save(settings: Config, folder: Path, number: int) -> None:
    """Train, and send SIGKILL to this process when it begins to write its number-th checkpoint."""
    before_call(checkpoint, "write_checkpoint", number, do=kill_myself)
    train(settings, folder)


def go_on_until(path: Path, call: str, number: int) -> None:
    """The same of a run that is resumed."""
    before_call(os, call, number, do=kill_myself)
    go_on(path)


def killed_run(whole: Whole, folder: Path, draw: random.Random) -> tuple[RunDir, int]:
    """A run that was killed at a random moment after it had begun, and the number of its process."""
    for attempt in range(MOST_DRAWS):
        child = Child(train, whole.settings, folder, f"killed-{attempt}", output=folder / f"killed-{attempt}.txt")
        time.sleep(draw.random() * whole.seconds)
        code = child.kill()
        run = RunDir(folder / f"killed-{attempt}")
        assert code in (0, -signal.SIGKILL), child.said
        if code != 0 and (run.path / "config.yaml").exists():
            return run, child.pid
    raise AssertionError(f"none of {MOST_DRAWS} moments fell into the run")


def assert_whole_checkpoints(run: RunDir) -> None:
    """A kill, unlike damage, leaves nothing to warn about."""
    problems = {folder.name: problem_with(folder) for folder in list_checkpoints(run.checkpoints)}
    assert set(problems.values()) <= {None}, problems


def assert_killed_runs_resume(whole: Whole, folder: Path, *, times: int, seed: int) -> None:
    draw, pids = random.Random(seed), set()
    for number in range(times):
        (folder / str(number)).mkdir()
        run, pid = killed_run(whole, folder / str(number), draw)
        pids.add(pid)
        assert_whole_checkpoints(run)
        said = resumed(run)
        assert "warning: step" not in said
        assert_same(whole.run, run, STEPS)
        assert_whole_checkpoints(run)
    assert workers_left(pids) == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.wide
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(
    method: str, whole: Callable[[str], Whole], tmp_path: Path
) -> None:
    assert_killed_runs_resume(whole(method), tmp_path, times=2, seed=1)


@pytest.mark.release
def test_twenty_of_twenty_random_kills_are_resumed_to_the_bit(whole: Callable[[str], Whole], tmp_path: Path) -> None:
    assert_killed_runs_resume(whole("ppo"), tmp_path, times=20, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize(("call", "number"), [("fsync", 30), ("rename", 5), ("rmdir", 2)])
def test_a_kill_within_a_save_and_within_its_resume_loses_nothing(
    call: str, number: int, whole: Callable[[str], Whole], tmp_path: Path
) -> None:
    """At a call of a save or of the pruning after it; the resume at the first such call, too."""
    undisturbed, run = whole("grpo"), RunDir(tmp_path / "run")
    child = Child(train_until, undisturbed.settings, tmp_path, call, number, output=tmp_path / "said.txt")
    assert child.end() == -signal.SIGKILL, child.said
    assert_whole_checkpoints(run)
    Child(go_on_until, run.path, call, 1, output=tmp_path / "said.txt").end()
    assert_whole_checkpoints(run)
    assert "warning: step" not in resumed(run)
    assert_same(undisturbed.run, run, STEPS)


@pytest.mark.slow
def test_a_resume_that_was_killed_while_it_cut_the_records_holds_no_line_twice(
    whole: Callable[[str], Whole], tmp_path: Path
) -> None:
    """The line of step 2 is written and its checkpoint is not; metrics.jsonl is cut and samples.jsonl is not yet."""
    undisturbed, run = whole("grpo"), RunDir(tmp_path / "run")
    child = Child(train_until_save, undisturbed.settings, tmp_path, 3, output=tmp_path / "said.txt")
    assert child.end() == -signal.SIGKILL, child.said
    before = [file.stat().st_size for file in (run.metrics, run.samples)]
    assert Child(go_on_until, run.path, "truncate", 2, output=tmp_path / "said.txt").end() == -signal.SIGKILL
    assert run.metrics.stat().st_size < before[0]
    assert run.samples.stat().st_size == before[1]
    resumed(run)
    assert_same(undisturbed.run, run, STEPS)
