"""The lock of a run folder: held once, with the name of its holder, and released by its holder's end alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.test_run_dir import CONFIG, create
from tinyrl.runs.run_dir import LOCK, RunLock, check_new_run, create_run

HOLDER = """
import sys, time
from pathlib import Path
from tinyrl.runs.run_dir import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(1000)
"""


def test_it_is_held_once_and_taken_twice_by_its_holder(tmp_path: Path):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.take()
    first.take()
    with pytest.raises(ValueError, match=rf"run {tmp_path} is in use: process {os.getpid()} on .* since "):
        second.take()
    first.release()
    with second, pytest.raises(ValueError, match="is in use"):
        first.take()
    first.take()
    RunLock(tmp_path, wanted=False).take()  # beside it


def test_a_kill_releases_it(tmp_path: Path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=f"in use: process {holder.pid} on "):
        RunLock(tmp_path).take()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with RunLock(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / LOCK).read_text()


def test_a_link_is_not_followed(tmp_path: Path):
    (tmp_path / "precious").write_text("x")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        RunLock(tmp_path).take()
    assert (tmp_path / "precious").read_text() == "x"


def test_a_run_that_is_trained_is_not_overwritten(tmp_path: Path):
    run = create(tmp_path, "mine")
    for refused in (
        lambda: check_new_run(str(tmp_path), name="mine", overwrite=True),
        lambda: create_run(str(tmp_path), name="mine", config=CONFIG, overwrite=True),
    ):
        with pytest.raises(ValueError, match="mine is in use: process"):
            refused()
    assert (run.path / "config.yaml").is_file()
    run.lock.release()
    (tmp_path / ".overwritten-mine").mkdir()  # of a command that was killed while it overwrote
    again = create_run(str(tmp_path), name="mine", config=CONFIG, overwrite=True)
    assert [p.name for p in again.path.iterdir()] == [LOCK]
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(ValueError, match="is in use"):
        RunLock(again.path).take()


def test_a_folder_that_was_killed_before_it_was_a_run_is_overwritten(tmp_path: Path):
    """--overwrite is what the refusal recommends; where it would be refused too, it is not recommended."""
    half, other = tmp_path / "half", tmp_path / "other"
    for folder, names in ((half, (LOCK, "config.yaml.writing")), (other, ("config.yaml.writing", "precious"))):
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    with pytest.raises(ValueError, match=r"half exists. .* --overwrite$"):
        create(tmp_path, "half")
    with pytest.raises(ValueError, match=r"other exists. Choose another --name$"):
        create(tmp_path, "other")
    assert {p.name for p in create(tmp_path, "half", overwrite=True).path.iterdir()} == {LOCK, "config.yaml"}
