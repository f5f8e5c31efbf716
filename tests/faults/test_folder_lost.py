"""A run whose folder is renamed, replaced or deleted while it trains, or whose lock is: it stops and says where it is.

Nothing is written under the old name, and what another process does in the folder stays.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from tests import running
from tests.faults.children import Child, resumed, train, wait_for
from tests.training.test_resume import assert_same
from tinyrl.config.schema import Config
from tinyrl.runs.checkpoint import checkpoint_step, list_checkpoints
from tinyrl.runs.folders import LOCK
from tinyrl.runs.run_dir import RunDir

STEPS, BATCH = 4, 16

# An ordinary reward, which calls `trouble` at the third training batch, in a process that is not the one that trains.
REWARD = """
    import os, shutil, signal, time
    from pathlib import Path

    run, trained = Path({run!r}), {trained}
    batches = 0

    def variety(prompts, completions, **columns):
        global batches
        batches += len(prompts) == {batch}
        if batches == 3 and len(prompts) == {batch} and run.is_dir():
            trouble()
        return [float(len(set(completion))) for completion in completions]

    def trouble():
        {trouble}

    def unlock(lock, unlocked, go):
        if not unlocked.exists():
            lock.unlink()
            unlocked.touch()
            while not go.exists():
                time.sleep(0.01)
"""
RENAME = 'run.rename(run.with_name("renamed"))'
REPLACE = f"{RENAME}; shutil.copytree(run.with_name('renamed'), run)"
SIGNAL = f"{RENAME}; os.kill(trained, signal.SIGTERM)"
DELETE = "shutil.rmtree(run)"
UNLOCK = f"unlock(run / '{LOCK}', run.with_name('unlocked'), run.with_name('go'))"


def settings_for(model: Path, folder: Path, trouble: str = "") -> Config:
    facts = {"run": str(folder / "run"), "trained": os.getpid(), "batch": BATCH, "trouble": trouble or "pass"}
    (folder / "rewards.py").write_text(textwrap.dedent(REWARD).format(**facts))
    functions = [{"use": f"{folder / 'rewards.py'}:variety"}]
    often = {"num_steps": STEPS, "save_every": 1, "eval_every": 2, "eval_prompts": 4}
    return running.config("grpo", model, reward={"functions": functions}, run=often)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lines_of(run: RunDir) -> list[int]:
    return [line["step"] for line in running.metrics(run)]


@pytest.mark.parametrize("trouble", [RENAME, REPLACE, SIGNAL], ids=["renamed", "replaced", "renamed-and-stopped"])
@pytest.mark.wide
def test_a_run_whose_folder_is_renamed_stops_and_says_where_it_is(
    trouble: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, *_ = running.train(settings_for(model, tmp_path, trouble), tmp_path)
    moved = RunDir(tmp_path / "renamed")
    assert code == 4
    assert str(moved.path) in "".join(capfd.readouterr())
    assert lines_of(moved) == [0, 1, 2]
    assert [checkpoint_step(folder) for folder in list_checkpoints(moved.checkpoints)] == [0, 1, 2]
    assert (tmp_path / "run").exists() == (trouble == REPLACE)
    if trouble == REPLACE:
        assert tree(tmp_path / "run") == tree(moved.path)


def test_a_run_whose_folder_is_deleted_stops_and_makes_none(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, *_ = running.train(settings_for(model, tmp_path, DELETE), tmp_path)
    assert code == 4
    assert f"{tmp_path / 'run'} was deleted" in "".join(capfd.readouterr())
    assert {path.name for path in tmp_path.iterdir()} <= {"rewards.py", "__pycache__"}


@pytest.mark.slow
def test_a_renamed_run_goes_on_under_its_new_name_as_if_nothing_had_been(model: Path, tmp_path: Path) -> None:
    for name in ("whole", "lost"):
        (tmp_path / name).mkdir()
    whole = running.train(settings_for(model, tmp_path / "whole"), tmp_path / "whole")[1]
    assert running.train(settings_for(model, tmp_path / "lost", RENAME), tmp_path / "lost")[0] == 4
    moved = RunDir(tmp_path / "lost" / "renamed")
    assert running.go_on(moved) == 0
    assert_same(whole, moved, STEPS)


@pytest.mark.slow
def test_of_two_processes_in_one_folder_the_one_whose_lock_was_deleted_stops(model: Path, tmp_path: Path) -> None:
    """The second resumes the run to its end; then the first wakes up in the middle of its step."""
    first = Child(train, settings_for(model, tmp_path, UNLOCK), tmp_path, output=tmp_path / "first.txt")
    wait_for((tmp_path / "unlocked").exists, first)
    run = RunDir(tmp_path / "run")
    resumed(run)
    assert lines_of(run) == [0, 1, 2, 3, 4]
    before = tree(run.path)
    (tmp_path / "go").touch()
    assert first.end() == 4, first.said
    assert str(run.path / LOCK) in first.said
    assert tree(run.path) == before
