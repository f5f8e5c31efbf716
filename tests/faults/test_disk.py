"""Disks that are full or read-only, for real.

Training goes on, existing checkpoints stay sound, and what could not be written is written when there is room again.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.faults.children import Child, resumed, train
from tests.training.test_resume import assert_same
from tinyrl.config.schema import Config
from tinyrl.runs.checkpoint import checkpoint_step, list_checkpoints, newest_sound, problem_with
from tinyrl.runs.run_dir import RunDir
from tinyrl.training.run_state import CheckpointState

STEPS, BATCH = 6, 16
DISK = 6_000_000  # bytes; three checkpoints of the tiny model take two
NO_MOUNT = 77  # an exit code

# An ordinary reward that also changes the disk: it runs at a known moment of the run, in its namespace.
REWARD = """
    import ctypes, os

    DISK, FULL_AT, ROOM_AT, READ_ONLY, LEFT = {disk!r}, {full_at}, {room_at}, {read_only}, {left}
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
            libc, disk = ctypes.CDLL(None), DISK.encode()
            bind, remount, read_only = 4096, 32, 1
            assert libc.mount(disk, disk, None, bind, None) == 0  # over the one with an open lock
            assert libc.mount(None, disk, None, bind | remount | read_only, None) == 0
        elif batches == FULL_AT:
            with open(filler, "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    file.truncate(file.tell() - LEFT)
        elif batches == ROOM_AT:
            os.unlink(filler)
"""


def mount_small_disk(folder: Path) -> None:
    """Mount a tmpfs at `folder`, for this process and its children, and gone with them. OSError where that fails."""

    def check(returned: int) -> None:
        if returned != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    new_mounts, new_users, recursive, private = 0x00020000, 0x10000000, 0x4000, 0x40000
    if libc.unshare(new_mounts) != 0:  # only root may; others may as the root of a user namespace of their own
        check(libc.unshare(new_mounts | new_users))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    check(libc.mount(None, b"/", None, recursive | private, None))
    check(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={DISK}".encode()))


def settings_for(model: Path, disk: Path, **trouble: Any) -> Config:
    """Settings of a run on `disk`; at the training batch `full_at` the disk is full but for `left` bytes, at `room_at`
    it no longer is.
    """
    file = disk.with_name("rewards.py")
    known = {"full_at": 0, "room_at": 0, "read_only": False, "left": 0, "batch": BATCH, "disk": str(disk)}
    file.write_text(textwrap.dedent(REWARD).format(**{**known, **trouble}))
    return running.config(
        "grpo",
        model,
        reward={"functions": [{"use": f"{file}:variety"}]},
        run={"num_steps": STEPS, "save_every": 2, "eval_every": 2, "eval_prompts": 4},
    )


def train_on_small_disk(settings: Config, disk: Path, copy: Path, with_report: bool) -> None:
    """Train on a small disk, then copy its contents to where they outlive this process."""
    try:
        mount_small_disk(disk)
    except OSError:
        sys.exit(NO_MOUNT)
    running.whole_runs(with_report)
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


def on_small_disk(settings: Config, disk: Path, *, with_report: bool = False) -> tuple[int, RunDir, str]:
    """(exit code, a copy of the run, its output) of a run on a small disk."""
    copy = disk.with_name("copy")
    child = Child(train_on_small_disk, settings, disk, copy, with_report, output=disk.with_name("said.txt"))
    if (code := child.end()) == NO_MOUNT:
        pytest.skip("this system lets a test mount no file system, not even in a namespace of its own")
    return code, RunDir(copy / "run"), child.said


def test_a_disk_that_is_full_for_a_while_costs_one_checkpoint_and_no_line(
    model: Path, disk: Path, whole: RunDir
) -> None:
    settings = settings_for(model, disk, full_at=3, room_at=5)
    code, run, said = on_small_disk(settings, disk)
    assert code == 0, said
    assert said.count("could not save step 4: ") == said.count("could not save") == 1, said
    assert said.count("cannot write to") == 1, said
    assert [p.name for p in list_checkpoints(run.checkpoints)] == ["step-000000", "step-000002", "step-000006"]
    assert [problem_with(p) for p in list_checkpoints(run.checkpoints)] == [None] * 3
    assert_same(whole, run, STEPS)


def test_on_a_disk_without_room_for_one_more_checkpoint_the_oldest_gives_way(
    model: Path, disk: Path, whole: RunDir
) -> None:
    """There is room for the lines of records, and the checkpoints of steps 0, 2 and 4 are there."""
    code, run, said = on_small_disk(settings_for(model, disk, full_at=5, left=200_000), disk)
    assert code == 0, said
    assert "could not save" not in said
    best = CheckpointState.read(run.checkpoints / "step-000006").run.best
    assert best is not None
    freed = 2 if best.step == 0 else 0
    assert said.count(f"step-{freed:06d} was deleted") == said.count("was deleted") == 1, said
    assert [checkpoint_step(p) for p in list_checkpoints(run.checkpoints)] == sorted({0, 2, 4, 6} - {freed})
    assert [problem_with(p) for p in list_checkpoints(run.checkpoints)] == [None] * 3
    assert_same(whole, run, STEPS)


@pytest.mark.slow  # Fast: the two full disks above, and what gives way in training/test_saver.py.
def test_a_disk_that_stays_read_only_leaves_the_older_checkpoint_and_training_goes_on(
    model: Path, disk: Path, whole: RunDir
) -> None:
    """To the last step, with a report that cannot be written; with room again the run resumes from its last checkpoint.
    With one to keep there is none that could give way.
    """
    settings = settings_for(model, disk, full_at=5, read_only=True)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"keep_checkpoints": 1})})
    code, run, said = on_small_disk(settings, disk, with_report=True)
    assert code == 4
    assert "Traceback" not in said
    assert said.count(f"could not save step {STEPS}: ") == said.count("could not save") == 1, said
    assert newest_sound(run.checkpoints) == (run.checkpoints / "step-000004", [])
    resumed(run)
    assert_same(whole, run, STEPS)
