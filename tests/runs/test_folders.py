"""Files and folders that are written whole, without following links, and what killed writers leave of them."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tinyrl.runs.folders import LOCK, FolderLock, open_file, sweep, write_atomic, written_whole

HEX = "0123456789abcdef"
ROOT = Path(__file__).parents[2]
HOLD = "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def held(file: Path) -> subprocess.Popen[bytes]:
    """Another process that holds the lock of a file until its input ends."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    return holder


# ---- files ----


@pytest.mark.parametrize("name", ["config.yaml", "report.html", "report.png"])
def test_a_link_at_a_name_of_a_file_being_written_is_not_followed(name: str, tmp_path: Path) -> None:
    (target := tmp_path / "target").write_text("precious")
    for link in (f"{name}.writing", f".writing-{name}-{HEX}", name):
        (tmp_path / link).symlink_to(target)
    write_atomic(tmp_path / name, "new")
    assert target.read_text() == "precious"
    assert (tmp_path / name).read_text() == "new"
    assert not (tmp_path / name).is_symlink()


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.html"
    plain = os.fsync

    def write_another(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", plain)
        write_atomic(file, "second")
        assert file.read_text() == "second"

    monkeypatch.setattr(os, "fsync", write_another)
    write_atomic(file, "first")
    assert file.read_text() == "first"
    assert names_in(tmp_path) == {"report.html"}


def test_what_a_killed_writer_left_of_a_file_goes_with_the_next_one_and_what_is_written_now_stays(
    tmp_path: Path,
) -> None:
    left, live, empty = (tmp_path / f".writing-report.html-{digit * 16}" for digit in "123")
    empty.touch()
    others = [f".writing-report.png-{HEX}", ".writing-report.html-mine", "report.html.writing"]
    for name in (left.name, live.name, *others):
        (tmp_path / name).write_text("half")
    with held(live):
        write_atomic(tmp_path / "report.html", "new")
    assert names_in(tmp_path) == {"report.html", live.name, *others}


def test_no_link_and_no_pipe_is_opened_as_a_file_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=f"{tmp_path / name}"):
            open_file(tmp_path / name, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    os.close(open_file(tmp_path / "file", os.O_RDONLY))


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    (target := tmp_path / "target").write_text("precious")
    (run := tmp_path / "run").mkdir()
    (run / LOCK).symlink_to(target)
    with pytest.raises(OSError, match=f"{run / LOCK}"):
        FolderLock(run).take()
    assert target.read_text() == "precious"


# ---- folders ----


def fill(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model").write_text(text)
    return folder


def hidden(root: Path, kind: str, name: str) -> Path:
    """What a killed writer left: a folder with the lock that it held."""
    folder = fill(root / f".{kind}-{name}-{HEX}", kind)
    (folder / LOCK).write_text("process 1 on another machine since then")
    return folder


def test_an_older_folder_stands_until_the_new_one_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "merged"
    for text in ("old", "new"):
        with written_whole(folder) as writing:
            fill(writing, text)
            assert not folder.exists() or (folder / "model").read_text() == "old"
        assert (folder / "model").read_text() == text
    with pytest.raises(FileNotFoundError), written_whole(folder) as writing:
        (fill(writing, "wrong") / "no such file").read_text()
    assert (folder / "model").read_text() == "new"
    assert names_in(tmp_path) == {"merged"}
    assert names_in(folder) == {"model"}


def test_an_older_folder_is_put_back_where_the_new_one_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill(tmp_path / "merged", "old")
    plain = os.rename

    def fails(source: Path, target: Path) -> None:
        if source.name.startswith(".writing-"):
            raise OSError(5, "Input/output error")
        plain(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="Input/output"), written_whole(folder) as writing:
        fill(writing, "new")
    assert (folder / "model").read_text() == "old"
    assert names_in(tmp_path) == {"merged"}


def test_what_killed_writers_left_is_swept_and_folders_of_others_stay(tmp_path: Path) -> None:
    hidden(tmp_path, "writing", "merged")
    hidden(tmp_path, "deleting", "merged")
    hidden(tmp_path, "aside", "merged")  # the new one is in its place
    (tmp_path / f".writing-empty-{HEX}").mkdir()
    (tmp_path / f".writing-unlocked-{HEX}").mkdir()
    (tmp_path / f".writing-unlocked-{HEX}" / LOCK).touch()
    fill(tmp_path / "merged", "new")
    live = hidden(tmp_path, "writing", "model")
    mine = fill(tmp_path / ".writing-merged-draft", "mine")
    outside = fill(tmp_path / "outside", "precious")
    (tmp_path / f".deleting-link-{HEX}").symlink_to(outside)
    with held(live / LOCK):
        sweep(tmp_path)
    assert names_in(tmp_path) == {"merged", live.name, mine.name, "outside", f".deleting-link-{HEX}"}
    assert names_in(outside) == names_in(mine) == {"model"}
    assert (tmp_path / "merged" / "model").read_text() == "new"


@pytest.mark.parametrize(("owner", "call"), [(os, "open"), (fcntl, "flock")])
def test_a_new_folder_that_another_process_sweeps_before_it_is_locked_is_made_again(
    owner: ModuleType, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its lock is made, and before the lock is held."""
    plain = getattr(owner, call)
    swept = list[str]()

    def sweeping(*arguments: Any, **named: Any) -> Any:
        if not swept and (call == "flock" or ".writing-" in str(arguments[0])):
            monkeypatch.setattr(owner, call, plain)
            swept.extend(names_in(tmp_path))
            sweep(tmp_path)
        return plain(*arguments, **named)

    monkeypatch.setattr(owner, call, sweeping)
    with written_whole(tmp_path / "merged") as writing:
        assert writing.name not in swept
        fill(writing, "new")
    assert len(swept) == 1
    assert names_in(tmp_path) == {"merged"}


def test_a_folder_that_gave_way_to_one_that_never_came_is_put_back(tmp_path: Path) -> None:
    hidden(tmp_path, "writing", "merged")
    hidden(tmp_path, "aside", "merged")
    sweep(tmp_path)
    assert (tmp_path / "merged" / "model").read_text() == "aside"
    assert not [name for name in names_in(tmp_path) if name.startswith(".")]


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from tinyrl.runs import folders

    path, call, number, by = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    plain, calls = getattr(os, call), 0
    if by == signal.SIGHUP:
        signal.signal(by, signal.SIG_DFL)  # nohup has it ignored

    def killed(*arguments, **named):
        global calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), by)
        return plain(*arguments, **named)

    with folders.written_whole(path) as writing:
        (writing / "model").write_text("new")
        setattr(os, call, killed)
        if call == "getpid":
            os.getpid()
"""
CASES = [
    ("rename", 2, signal.SIGKILL), ("rename", 1, signal.SIGKILL), ("rename", 3, signal.SIGKILL),
    ("unlink", 1, signal.SIGKILL), ("rmdir", 1, signal.SIGKILL),
]  # fmt: skip


def killed_writer(folder: Path, call: str, number: int, by: signal.Signals) -> int:
    code = "\n".join(line.removeprefix("    ") for line in KILLED.splitlines())
    command = [sys.executable, "-c", code, str(folder), call, str(number), str(int(by))]
    return subprocess.run(command, capture_output=True, cwd=ROOT, check=False).returncode


@pytest.mark.parametrize(("call", "number", "by"), CASES)
@pytest.mark.wide
def test_a_writer_that_is_killed_leaves_a_whole_folder_and_nothing_that_the_next_one_does_not_sweep(
    call: str, number: int, by: signal.Signals, tmp_path: Path
) -> None:
    """Before and between the renames, and while the older one is deleted."""
    folder = fill(tmp_path / "merged", "old")
    assert killed_writer(folder, call, number, by) == -by
    sweep(tmp_path)
    assert names_in(tmp_path) == {"merged"}
    assert (folder / "model").read_text() in ("old", "new")
    with written_whole(folder) as writing:
        fill(writing, "newer")
    assert names_in(folder) == {"model"}


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.wide
def test_a_signal_that_ends_a_writer_leaves_what_was_there(by: signal.Signals, tmp_path: Path) -> None:
    folder = fill(tmp_path / "merged", "old")
    assert killed_writer(folder, "getpid", 1, by) == -by
    assert names_in(tmp_path) == {"merged"}
    assert (folder / "model").read_text() == "old"


def test_of_several_that_replace_one_folder_one_succeeds(tmp_path: Path) -> None:
    """The second finds the older folder held while the first puts its own in place."""
    folder = fill(tmp_path / "merged", "old")
    with FolderLock(folder), pytest.raises(ValueError, match="in use"), written_whole(folder) as writing:
        fill(writing, "new")
    assert (folder / "model").read_text() == "old"
