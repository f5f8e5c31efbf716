"""kill -9, for real, at any moment of a run and inside its saves.

What is left can be resumed, and ends, to the bit, as the run that was never killed.
"""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.faults.children import Child, before_call, go_on, resumed, train, workers_left
from tests.trainers.test_resume import assert_same
from tinyrl.config.schema import Config
from tinyrl.runs import checkpoint
from tinyrl.runs.checkpoint import list_checkpoints, problem_with
from tinyrl.runs.run_dir import RunDir

STEPS = 4
MOST_DRAWS = 30  # of a moment, until one comes after the beginning and before the end
SAVING = ("fsync", "rename", "rmdir")  # what a save and the pruning after it are made of
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"grpo": {"num_epochs": 2, "minibatch_size": 8, "refill_rounds": 1}, "run": {"eval_every": 1}},
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
    calls: dict[str, int]  # how often it called each function of SAVING


@pytest.fixture(scope="module")
def wholes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    """The uninterrupted run of each method."""
    return {method: whole_run(method, model, tmp_path_factory.mktemp(method)) for method in METHODS}


def whole_run(method: str, model: Path, folder: Path) -> Whole:
    sections = copy.deepcopy(METHODS[method])
    if "task" in sections:
        sections["task"]["data"] = str(folder / "pairs.jsonl")
        (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    often = {"num_steps": STEPS, "save_every": 1, "eval_prompts": 4}
    settings = running.config(method, model, **{**sections, "run": {**often, **sections["run"]}})
    first = Child(train_counting, settings, folder, folder / "calls.json", output=folder / "first.txt")
    assert first.end() == 0, first.said  # it warms the disk's cache up, too
    start = time.monotonic()
    child = Child(train, settings, folder, "whole", output=folder / "whole.txt")
    assert child.end() == 0, child.said
    seconds = time.monotonic() - start
    return Whole(settings, RunDir(folder / "whole"), seconds, json.loads((folder / "calls.json").read_text()))


def train_counting(settings: Config, folder: Path, counts: Path) -> None:
    """Train, and write down how often each function of SAVING was called."""
    calls: dict[str, int] = dict.fromkeys(SAVING, 0)
    for name in SAVING:
        count_calls(name, calls)
    code, *_ = running.train(settings, folder, name="first")
    counts.write_text(json.dumps(calls))
    sys.exit(code)


def count_calls(name: str, calls: dict[str, int]) -> None:
    plain = getattr(os, name)

    def counting(*arguments: Any, **named: Any) -> Any:
        calls[name] += 1
        return plain(*arguments, **named)

    setattr(os, name, counting)


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


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


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
    method: str, wholes: dict[str, Whole], tmp_path: Path
) -> None:
    assert_killed_runs_resume(wholes[method], tmp_path, times=2, seed=1)


@pytest.mark.release
def test_twenty_of_twenty_random_kills_are_resumed_to_the_bit(wholes: dict[str, Whole], tmp_path: Path) -> None:
    assert_killed_runs_resume(wholes["ppo"], tmp_path, times=20, seed=2)


def assert_killed_saves_resume(whole: Whole, folder: Path, *, call: str, number: int) -> None:
    """Kill a run at a call of a save; kill its resume at the first such call, too; then let it end."""
    folder.mkdir()
    run = RunDir(folder / "run")
    child = Child(train_until, whole.settings, folder, call, number, output=folder / "said.txt")
    assert child.end() == -signal.SIGKILL, child.said
    if not (run.path / "config.yaml").exists():
        return  # nothing had begun
    assert_whole_checkpoints(run)
    Child(go_on_until, run.path, call, 1, output=folder / "said.txt").end()
    assert_whole_checkpoints(run)
    assert "warning: step" not in resumed(run)
    assert_same(whole.run, run, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("call", SAVING)
def test_a_kill_at_any_call_of_a_save_loses_nothing(call: str, wholes: dict[str, Whole], tmp_path: Path) -> None:
    whole = wholes["grpo"]
    number = random.Random(call).randint(1, whole.calls[call])
    assert_killed_saves_resume(whole, tmp_path / call, call=call, number=number)


@pytest.mark.slow
def test_a_resume_that_was_killed_while_it_cut_the_records_holds_no_line_twice(
    wholes: dict[str, Whole], tmp_path: Path
) -> None:
    """The line of step 2 is written and its checkpoint is not; metrics.jsonl is cut and samples.jsonl is not yet."""
    whole, run = wholes["grpo"], RunDir(tmp_path / "run")
    child = Child(train_until_save, whole.settings, tmp_path, 3, output=tmp_path / "said.txt")
    assert child.end() == -signal.SIGKILL, child.said
    before = [file.stat().st_size for file in (run.metrics, run.samples)]
    assert Child(go_on_until, run.path, "truncate", 2, output=tmp_path / "said.txt").end() == -signal.SIGKILL
    assert run.metrics.stat().st_size < before[0]
    assert run.samples.stat().st_size == before[1]
    resumed(run)
    assert_same(whole.run, run, STEPS)
