"""Disks that are full, read-only or too small, for real.

Training goes on, existing checkpoints stay sound, and what could not be written is written when there is room again.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.faults.children import Child, command, resumed, train
from tests.faults.disks import can_mount, mount_small_disk
from tests.training.test_resume import assert_same
from tinyrl.config.recipe import dump_config
from tinyrl.config.schema import Config
from tinyrl.runs.checkpoint import list_checkpoints, newest_sound, problem_with
from tinyrl.runs.run_dir import RunDir

STEPS, BATCH = 6, 16
DISK = 6_000_000  # bytes; three checkpoints of the tiny model take two

# An ordinary reward that also changes the disk: it runs at a known moment of the run, in its namespace.
REWARD = """
    import ctypes, os

    DISK, FULL_AT, ROOM_AT, READ_ONLY = {disk!r}, {full_at}, {room_at}, {read_only}
    batches = 0

    def variety(prompts, completions, **columns):
        global batches
        batches += len(prompts) == {batch}
        if len(prompts) == {batch} and os.path.isdir(DISK + "/run"):
            trouble()
        return [float(len(set(completion))) for completion in completions]

    def trouble():
        filler = DISK + "/filler"
        if batches == FULL_AT and READ_ONLY:
            libc = ctypes.CDLL(None, use_errno=True)
            disk, bind, remount, read_only = DISK.encode(), 4096, 32, 1
            assert libc.mount(disk, disk, None, bind, None) == 0, ctypes.get_errno()  # over the one with an open lock
            assert libc.mount(None, disk, None, bind | remount | read_only, None) == 0, ctypes.get_errno()
        elif batches == FULL_AT:
            with open(filler, "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
        elif batches == ROOM_AT:
            os.unlink(filler)
"""


@pytest.fixture(autouse=True)
def _may_mount(tmp_path_factory: pytest.TempPathFactory) -> None:
    if not can_mount(tmp_path_factory.getbasetemp()):
        pytest.skip("this system lets a test mount no file system, not even in a namespace of its own")


def settings_for(model: Path, disk: Path, **trouble: Any) -> Config:
    """Settings of a run on `disk`; at the training batch `full_at` the disk is full, at `room_at` it no longer is."""
    file = disk.with_name("rewards.py")
    known = {"full_at": 0, "room_at": 0, "read_only": False, "batch": BATCH, "disk": str(disk)}
    file.write_text(textwrap.dedent(REWARD).format(**{**known, **trouble}))
    return running.config(
        "grpo",
        model,
        reward={"functions": [{"use": f"{file}:variety"}]},
        run={"num_steps": STEPS, "save_every": 2, "eval_every": 2, "eval_prompts": 4},
    )


def train_on_small_disk(settings: Config, disk: Path, copy: Path, report: bool, size: int = DISK) -> None:
    """Train on a small disk, then copy its contents to where they outlive this process."""
    mount_small_disk(disk, size)
    running.whole_runs(report)
    try:
        code, *_ = running.train(settings, disk)
    finally:
        shutil.copytree(disk, copy)
    sys.exit(code)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The run on a disk with room."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "disk").mkdir()
    child = Child(train, settings_for(model, folder / "disk"), folder, output=folder / "said.txt")
    assert child.end() == 0, child.said
    return RunDir(folder / "run")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def on_small_disk(settings: Config, disk: Path, *, report: bool = False) -> tuple[int, RunDir, str]:
    """(exit code, a copy of the run, what was said) of a run on a small disk, with or without the report at its end."""
    copy = disk.with_name("copy")
    child = Child(train_on_small_disk, settings, disk, copy, report, output=disk.with_name("said.txt"))
    return child.end(), RunDir(copy / "run"), child.said


def warnings(said: str, of: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("warning: ") and of in line]


def test_a_disk_that_is_full_for_a_while_costs_one_checkpoint_and_no_line(
    model: Path, disk: Path, whole: RunDir
) -> None:
    settings = settings_for(model, disk, full_at=3, room_at=5)
    code, run, said = on_small_disk(settings, disk)
    assert code == 0, said
    assert len(warnings(said, "could not save step 4: ")) == len(warnings(said, "could not save")) == 1, said
    assert len(warnings(said, "cannot write to")) == 1, said
    assert [p.name for p in list_checkpoints(run.checkpoints)] == ["step-000000", "step-000002", "step-000006"]
    assert [problem_with(p) for p in list_checkpoints(run.checkpoints)] == [None] * 3
    assert_same(whole, run, STEPS)


def test_a_disk_that_stays_read_only_leaves_the_older_checkpoint_and_training_goes_on(
    model: Path, disk: Path, whole: RunDir
) -> None:
    """To the last step, without a report; with room again the run resumes from its last checkpoint. With one to keep
    there is none that could give way.
    """
    settings = settings_for(model, disk, full_at=5, read_only=True)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"keep_checkpoints": 1})})
    code, run, said = on_small_disk(settings, disk, report=True)
    assert code == 4
    assert f"step {STEPS}/{STEPS}" in said, said
    assert "Traceback" not in said
    assert len(warnings(said, f"could not save step {STEPS}: ")) == len(warnings(said, "could not save")) == 1, said
    assert len(warnings(said, "cannot write to")) == 1, said
    assert newest_sound(run.checkpoints) == (run.checkpoints / "step-000004", [])
    resumed(run)
    assert_same(whole, run, STEPS)


def command_on_small_disk(size: int, disk: Path, recipe: Path) -> None:
    """The command, with a disk of `size` bytes for its runs; at the end it lists what is on it."""
    mount_small_disk(disk, size)
    try:
        command("train", "grpo", str(recipe), "--output-dir", str(disk))
    finally:
        print("left on the disk:", os.listdir(disk))


def test_a_disk_that_is_too_small_is_said_before_the_first_step(model: Path, disk: Path) -> None:
    """300 kB, while a checkpoint of the tiny model needs more. No run is started that could not be saved."""
    recipe = disk.with_name("recipe.yaml")
    recipe.write_text(dump_config(settings_for(model, disk)))
    child = Child(command_on_small_disk, 300_000, disk, recipe, output=disk.with_name("said.txt"))
    assert child.end() == 4, child.said
    assert f"tinyrl: {disk}: a checkpoint takes about " in child.said
    assert "0.3 MB are free" in child.said
    assert "left on the disk: []" in child.said
    assert "Traceback" not in child.said
