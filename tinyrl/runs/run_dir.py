"""Write run folders: config.yaml, env.json, checkpoints/, and records (JSON lines).

metrics.jsonl has a line per step, samples.jsonl completions, tokens.jsonl some of them token by token, prompts.jsonl
which training prompts were tried and solved, failed_rewards.jsonl completions without a reward; reward_output.log is
what reward functions printed. The process that trains in a run holds the folder and its lock; records are opened in the
folder that it holds, without following links.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tinyrl.config.recipe import CONFIG, GIVEN, dump_config, dump_given, load_written_config
from tinyrl.config.schema import Config
from tinyrl.runs.folders import LOCK, FolderLock, file_stat, move_into_place, new_folder, open_file, write_atomic
from tinyrl.runs.records import is_run, json_lines, json_object, json_safe, not_a_run

RECORDS = ("metrics", "samples", "tokens", "prompts", "failed_rewards")
BLOCK = 1 << 16  # bytes read at a time, from the end of a record
TAKEN_NAMES = ("base", "start", "teacher", "policy", "self")  # each has a meaning where a model is asked for
IS_THERE = (errno.EEXIST, errno.ENOTEMPTY)  # errors of a rename to a folder that is not empty
MOST_OUTPUT = 1 << 20  # bytes of reward_output.log; beyond, the later half is kept
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RunDir:
    """One run on disk. Lines are appended whole; when the disk refuses one (full, gone), the run goes on with a
    warning, and the line joins the next. Where the folder was renamed or deleted, or its lock was, what writes raises
    FolderLost. writes: False for a rank that only reads; lock: of the folder, where it is held already.
    """

    def __init__(self, path: Path, *, writes: bool = True, lock: FolderLock | None = None) -> None:
        self.path = path
        self.name = path.name
        self.writes = writes
        self.lock = lock or FolderLock(path, wanted=writes)
        self.checkpoints = path / "checkpoints"
        self._records = [path / f"{name}.jsonl" for name in RECORDS]
        self.metrics, self.samples, self.tokens, self.prompts, self.failed_rewards = self._records
        self.output = path / "reward_output.log"
        self._unwritten: dict[Path, bytes] = {}
        self._unflushed: set[Path] = set()

    def write_config(self, config: Config) -> None:
        if self.writes:
            self.lock.check()
            write_atomic(self.path / CONFIG, dump_config(config))
            given = dump_given(config)
            if given is not None:
                write_atomic(self.path / GIVEN, given)

    def read_config(self) -> Config:
        """Read config.yaml, and what was given of it. Raises ValueError where it is invalid."""
        return load_written_config(self.path / CONFIG)

    def write_environment(self, facts: dict[str, Any]) -> None:
        """Write env.json: facts of provenance.py."""
        if self.writes:
            self.lock.check()
            write_atomic(self.path / "env.json", json.dumps(facts, indent=1) + "\n")

    def read_environment(self) -> dict[str, Any]:
        """Return the facts of env.json; none where it is gone or damaged."""
        try:
            return json_object(self.path / "env.json")
        except (OSError, ValueError):
            return {}

    def append_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        self.append(self.metrics, [{"step": step, **metrics}])

    def append(self, file: Path, rows: Iterable[dict[str, Any]], *, most_bytes: float = math.inf) -> None:
        """Append lines to a record, up to the first that would make it larger than `most_bytes`. Lines that the disk
        refuses are kept for the next call.
        """
        self.lock.check()
        size = self._length(file) + len(self._unwritten.get(file, b""))
        lines = list[bytes]()
        for row in rows:  # lazily: a full file costs one line
            line = json.dumps(json_safe(row)).encode() + b"\n"
            size += len(line)
            if size > most_bytes:
                break
            lines.append(line)
        if self.writes and lines:
            self._write(file, b"".join(lines))

    def _write(self, file: Path, lines: bytes) -> None:
        warned = bool(self._unwritten)
        lines = self._unwritten.pop(file, b"") + lines
        length = self._length(file)
        self._unflushed.add(file)
        try:
            with open(self._open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as out:
                out.write(lines)
        except OSError as error:
            with contextlib.suppress(OSError):  # half a line would make the next one unreadable too
                self._truncate(file, length)
            if not warned:
                what = f"warning: cannot write to {file}: {error.strerror}; its lines are kept until that works"
                print(what, file=sys.stderr)
            self._unwritten[file] = lines

    def append_reward_output(self, text: str) -> None:
        """Append to reward_output.log; of more than MOST_OUTPUT bytes the later half is kept, and what the disk refuses
        is lost.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        with contextlib.suppress(OSError), open(self._open(self.output, flags), "a+b") as out:
            out.write(text.encode("utf-8", errors="replace"))
            if (length := out.tell()) > MOST_OUTPUT:
                out.seek(length - MOST_OUTPUT // 2)
                end = out.read().partition(b"\n")[2]
                out.truncate(0)
                out.write(b"--- the beginning was left out ---\n" + end)

    def lengths(self) -> dict[str, int]:
        """Return the bytes of each record."""
        return {file.name: self._length(file) for file in self._records}

    def flush(self) -> None:
        """Put the records that were written since the last flush on disk: a power cut takes what is not there."""
        for file in sorted(self._unflushed):
            with contextlib.suppress(FileNotFoundError), open(self._open(file, os.O_RDONLY), "rb") as record:
                os.fsync(record.fileno())
        self._unflushed.clear()

    def cut(self, lengths: dict[str, int]) -> list[str]:
        """Truncate the records to their lengths at a checkpoint, so that no step is recorded twice, and to whole lines.
        Return a warning for each that is gone or had lost lines.
        """
        self.lock.check()
        self._unwritten.clear()
        notes = list[str]()
        for file in self._records if self.writes else ():
            length = lengths.get(file.name, 0)
            kept = self._whole_lines(file, length)
            if kept is not None:
                self._truncate(file, kept)
            if length > (kept or 0):
                lost = f"{length - (kept or 0):,} of its {length:,} bytes at the checkpoint are lost"
                gone = "the file is gone, " if kept is None else ""
                notes.append(f"warning: {file.name}: {gone}{lost}; the run goes on with the rest")
        return notes

    def _open(self, file: Path, flags: int) -> int:
        return open_file(file, flags, folder=self.lock.descriptor)

    def _length(self, file: Path) -> int:
        """Return the bytes of a record; 0 where there is none."""
        found = file_stat(file, folder=self.lock.descriptor)
        return 0 if found is None else found.st_size

    def _truncate(self, file: Path, length: int) -> None:
        descriptor = self._open(file, os.O_WRONLY)
        try:
            os.truncate(descriptor, length)
        finally:
            os.close(descriptor)

    def _whole_lines(self, file: Path, length: int) -> int | None:
        """Return how many of the first `length` bytes of a record are whole lines; None where there is no record."""
        if file_stat(file, folder=self.lock.descriptor) is None:
            return None
        with open(self._open(file, os.O_RDONLY), "rb") as record:
            end = min(length, os.fstat(record.fileno()).st_size)
            while end > 0:
                start = max(0, end - BLOCK)
                record.seek(start)
                newline = record.read(end - start).rfind(b"\n")
                if newline >= 0:
                    return start + newline + 1
                end = start
        return 0

    def check_files(self) -> None:
        """Raise ValueError where what a run writes is a link, or is not a regular file."""
        for file in (*self._records, self.output):
            found = file_stat(file, folder=self.lock.descriptor)
            if found is not None and stat.S_ISLNK(found.st_mode):
                where = f"{file} is a link to {os.readlink(file)}"
                raise ValueError(f"{where}, and a run writes no file outside its folder: put the file itself there")
            if found is not None and not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{file} is not a regular file; move it away to go on with this run")

    def last_step(self) -> int:
        """Return the last step in any of the records; 0 where there is none."""
        return max((line["step"] for file in self._records for line in json_lines(file, [])), default=0)


# ---- which folder is a run ----


def check_new_run(output_dir: str, *, name: str | None, overwrite: bool) -> None:
    """Raise ValueError when a run called `name` (None: the next default name) cannot be made in `output_dir`.

    Nothing outside `output_dir` is ever made or deleted, and only a tinyrl run or an empty folder is overwritten.
    """
    root = Path(output_dir)
    if name is not None:
        check_name(name, root=root)
    folder = next(p for p in (root, *root.absolute().parents) if os.path.lexists(p))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"--output-dir {root}: {folder} is not a folder that can be written to")
    if name is None or not os.path.lexists(path := root / name):
        return
    try:
        _check_replaced(path, overwrite=overwrite)
    except FileNotFoundError:  # another process is replacing it
        raise ValueError(f"--name {name}: {path} is in use: another process replaces it at this moment") from None


def check_name(name: str, *, root: Path) -> None:
    """Raise ValueError for a name that no run can have, in a folder `root`."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"--name {name!r}: a run's name is made of at most 100 letters, digits, '.', '_' and '-', starts with a "
            f"letter or digit, and stays inside {root}/"
        )
    if name in TAKEN_NAMES:
        raise ValueError(f"--name {name}: this word means another model where a run is asked for; choose another name")


def _check_replaced(path: Path, *, overwrite: bool) -> None:
    """Raise ValueError where a new run cannot take the place of what is at `path`: of a folder that is empty it can, of
    a run with `overwrite`.
    """
    is_folder = path.is_dir() and not path.is_symlink()
    config = path / "config.yaml"
    is_run = is_folder and config.is_file() and config.read_bytes().startswith(b"method: ")
    is_empty = is_folder and {file.name for file in path.iterdir()} <= {LOCK}  # which a killed start may leave
    if not is_run and not is_empty:
        raise ValueError(f"--name {path.name}: {path} exists and is not a tinyrl run, so it is left alone")
    if is_run and not overwrite:
        resume = f"resume it with `tinyrl train --resume {path}`, "
        raise ValueError(f"run folder {path} exists: {resume}choose another --name, or use --overwrite")
    if (path / LOCK).exists():
        with FolderLock(path):  # raises where another process trains in it
            pass


def create_run(output_dir: str, *, name: str | None, config: Config, overwrite: bool) -> RunDir:
    """Make runs/<name> with its config.yaml, locked; without a name <method>-<task>-<n>, counting up. The folder
    appears whole. Raises ValueError where it cannot be made: as `check_new_run`, while another process trains in it,
    and where another process makes it at this moment.
    """
    check_new_run(output_dir, name=name, overwrite=overwrite)
    root = Path(output_dir)
    stem = run_stem(config)
    path = root / (name or stem)
    try:
        made = new_folder(path)
        try:
            write_atomic(made.folder / CONFIG, dump_config(config))
            given = dump_given(config)
            if given is not None:
                write_atomic(made.folder / GIVEN, given)
            if name is None:
                _take_number(made, stem)
            else:
                _take_place(made, path)
        except BaseException:
            shutil.rmtree(made.folder, ignore_errors=True)
            made.release()
            raise
    except OSError as error:
        raise ValueError(f"cannot create run folder {path}: {error.strerror}") from error
    return RunDir(made.folder, lock=made)


def run_stem(config: Config) -> str:
    """Return how the default names of a configuration's runs begin; a number follows."""
    return f"{config.method}-{Path(config.task.name or '').stem}-"


def next_name(root: Path, stem: str) -> str:
    """Return `stem` with the next free number in a folder."""
    there = [other.name.removeprefix(stem) for other in root.iterdir()] if root.is_dir() else []
    last = max((int(n) for n in there if re.fullmatch("[0-9]{1,9}", n)), default=0)
    return f"{stem}{last + 1}"


def _take_place(made: FolderLock, path: Path) -> None:
    """Rename a new run's folder to `path`, in place of a run that is there."""
    try:
        move_into_place(made, path)
    except OSError as error:
        if error.errno not in IS_THERE:
            raise
        raise ValueError(f"run folder {path} exists: another process made it at this moment") from None


def _take_number(made: FolderLock, stem: str) -> None:
    """Rename a new run's folder to `stem` with the next free number."""
    root = made.folder.parent
    while True:
        try:
            made.rename(root / next_name(root, stem))
            return
        except OSError as error:  # another run may take the number at this moment
            if error.errno not in IS_THERE:
                raise


def open_run(path: str | Path, *, writes: bool = True) -> RunDir:
    """Return an existing run. Raises ValueError when the folder is not one."""
    folder = Path(path)
    if not is_run(folder):
        raise ValueError(not_a_run(folder))
    return RunDir(folder, writes=writes)
