"""The lock of a run folder: held once, told who holds it, released by its holder's end and by nothing else."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.test_run_dir import CONFIG, create
from tinyrl.runs import run_dir as locks
from tinyrl.runs.run_dir import LOCK, RunLock, check_new_run, create_run

HOLDER = """
import sys, time
from pathlib import Path
from tinyrl.runs.run_dir import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(1000)
"""


def test_a_second_one_is_told_who_holds_it(tmp_path: Path):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.take()
    first.take()  # its own already
    written = json.loads((tmp_path / LOCK).read_text())
    assert written["pid"] == os.getpid()
    said = f"process {os.getpid()} on {written['host']} trains in it since {written['since']}"
    with pytest.raises(ValueError, match="is in use") as caught:
        second.take()
    assert str(caught.value) == f"run {tmp_path} is in use: {said}. Stop it first, or wait for its end"
    assert json.loads((tmp_path / LOCK).read_text()) == written
    first.release()
    assert list(tmp_path.iterdir()) == []
    with second, pytest.raises(ValueError, match="is in use"):
        first.take()


def test_a_kill_releases_it_and_what_it_leaves_is_no_lock(tmp_path: Path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=f"in use: process {holder.pid} on "):
        RunLock(tmp_path).take()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert (tmp_path / LOCK).exists()
    with RunLock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff"])
def test_a_holder_that_could_not_write_who_it_is_holds_it_all_the_same(tmp_path: Path, content: bytes):
    with RunLock(tmp_path):
        (tmp_path / LOCK).write_bytes(content)
        with pytest.raises(ValueError, match="is in use: another process trains in it"):
            RunLock(tmp_path).take()


def test_a_file_that_its_holder_deletes_just_then_is_not_taken_for_the_lock(tmp_path: Path, monkeypatch):
    """Opened before the holder's end and locked after it: somebody else may have made and locked the next file."""
    first, second, third = RunLock(tmp_path), RunLock(tmp_path), RunLock(tmp_path)
    first.take()
    plain, calls = locks.fcntl.flock, []

    def slow(file, how):
        calls.append(file)
        if len(calls) == 1:
            first.release()
            third.take()
        return plain(file, how)

    monkeypatch.setattr(locks.fcntl, "flock", slow)
    with pytest.raises(ValueError, match="is in use"):
        second.take()
    third.release()


def test_a_link_is_not_followed(tmp_path: Path):
    (tmp_path / "precious").write_text("x")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        RunLock(tmp_path).take()
    assert (tmp_path / "precious").read_text() == "x"


def test_a_file_system_without_locks_is_said_and_used(tmp_path: Path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with RunLock(tmp_path):
        assert "its file system has no locks" in capsys.readouterr().err


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
    check_new_run(str(tmp_path), name="mine", overwrite=True)
    again = create_run(str(tmp_path), name="mine", config=CONFIG, overwrite=True)
    assert [p.name for p in again.path.iterdir()] == [LOCK]
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_was_killed_before_it_was_a_run_is_overwritten(tmp_path: Path):
    """--overwrite is what the refusal recommends; where it would be refused too, it is not recommended."""
    half, other = tmp_path / "half", tmp_path / "other"
    for folder, names in ((half, (LOCK, "config.yaml.writing")), (other, ("config.yaml.writing", "precious"))):
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    with pytest.raises(ValueError, match=r"half exists. Choose another --name, or use --overwrite$"):
        create(tmp_path, "half")
    with pytest.raises(ValueError, match=r"other exists. Choose another --name$"):
        create(tmp_path, "other")
    assert {p.name for p in create(tmp_path, "half", overwrite=True).path.iterdir()} == {LOCK, "config.yaml"}


def test_what_a_killed_overwrite_left_is_deleted_by_the_next(tmp_path: Path):
    create(tmp_path, "mine").lock.release()
    (tmp_path / ".overwritten-mine").mkdir()
    (tmp_path / ".overwritten-mine" / "config.yaml").touch()
    create(tmp_path, "mine", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
