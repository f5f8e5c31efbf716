"""Write run folders: config.yaml, env.json, checkpoints/, and records (JSON lines).

metrics.jsonl has a line a step, samples.jsonl completions, tokens.jsonl some of them token by token, prompts.jsonl
which training prompts were tried and solved, failed_rewards.jsonl completions without a reward; reward_output.log is
what reward functions printed. The process that trains in a run holds the lock .lock.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tinyrl.config.recipe import dump_config, load_written_config
from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.runs.records import json_lines, json_object, json_safe, nearest_run
from tinyrl.text import one_line

LOCK = ".lock"
RECORDS = ("metrics", "samples", "tokens", "prompts", "failed_rewards")
MOST_OUTPUT = 1 << 20  # bytes of reward_output.log; beyond, the later half is kept
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RunLock:
    """The lock of a run folder; the system releases it when the process ends. Taking it twice is taking it once.

    `wanted`: False for a process that writes nothing; it takes no lock.
    """

    def __init__(self, folder: Path, *, wanted: bool = True) -> None:
        self.file = folder / LOCK
        self.wanted = wanted
        self._lock = FileLock(self.file, timeout=0, thread_local=False)

    def take(self) -> RunLock:
        """Raise ValueError, naming the holder, when another process holds it; OSError where no file can be made."""
        if self.wanted and not self._lock.is_locked:
            try:
                self._lock.acquire()
            except Timeout:
                holder = one_line(self.file.read_text("utf-8", "replace"), 200) or "another process"
                message = f"run {self.file.parent} is in use: {holder} trains in it. Stop it first, or wait for its end"
                raise ValueError(message) from None
            with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                self.file.write_text(f"process {os.getpid()} on {platform.node()} since {now}")
        return self

    def release(self, *_: object) -> None:
        self._lock.release()

    __enter__ = take
    __exit__ = release


class RunDir:
    """One run on disk. Lines are appended whole; when the disk refuses one (full, gone), the run goes on with a
    warning, and the line joins the next. `writes`: False for a rank that only reads.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path = path
        self.name = path.name
        self.writes = writes
        self.lock = RunLock(path, wanted=writes)
        self.checkpoints = path / "checkpoints"
        self._records = [path / f"{name}.jsonl" for name in RECORDS]
        self.metrics, self.samples, self.tokens, self.prompts, self.failed_rewards = self._records
        self.output = path / "reward_output.log"
        self._unwritten: dict[Path, bytes] = {}
        self._unflushed: set[Path] = set()

    def write_config(self, config: Config) -> None:
        if self.writes:
            write_atomic(self.path / "config.yaml", dump_config(config))

    def read_config(self, overrides: Sequence[str] = ()) -> Config:
        """Read config.yaml with overrides laid over it. Raises ValueError where it is invalid."""
        return load_written_config(self.path / "config.yaml", overrides=overrides)

    def write_environment(self, facts: dict[str, Any]) -> None:
        """Write env.json: facts of provenance.py."""
        if self.writes:
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
        size = _length(file) + len(self._unwritten.get(file, b""))
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
        length = _length(file)
        self._unflushed.add(file)
        try:
            with file.open("ab") as out:
                out.write(lines)
        except OSError as error:
            with contextlib.suppress(OSError):  # half a line would make the next one unreadable too
                os.truncate(file, length)
            if not warned:
                what = f"warning: cannot write to {file}: {error.strerror}; its lines are kept until that works"
                print(what, file=sys.stderr)
            self._unwritten[file] = lines

    def append_reward_output(self, text: str) -> None:
        """Append to reward_output.log; of more than MOST_OUTPUT bytes the later half is kept, and what the disk refuses
        is lost.
        """
        with contextlib.suppress(OSError):
            with self.output.open("ab") as out:
                out.write(text.encode("utf-8", errors="replace"))
            if _length(self.output) > MOST_OUTPUT:
                end = self.output.read_bytes()[-MOST_OUTPUT // 2 :].partition(b"\n")[2]
                self.output.write_bytes(b"--- the beginning was left out ---\n" + end)

    def lengths(self) -> dict[str, int]:
        """Return the bytes of each record."""
        return {file.name: _length(file) for file in self._records}

    def flush(self) -> None:
        """Put the records that were written since the last flush on disk: a power cut takes what is not there."""
        for file in sorted(self._unflushed):
            with contextlib.suppress(FileNotFoundError), file.open("rb") as record:
                os.fsync(record.fileno())
        self._unflushed.clear()

    def cut(self, lengths: dict[str, int]) -> list[str]:
        """Truncate the records to their lengths at a checkpoint, so that no step is recorded twice, and to whole lines.
        Return a warning for each that is gone or had lost lines.
        """
        self._unwritten.clear()
        notes = list[str]()
        for file in self._records if self.writes else ():
            length = lengths.get(file.name, 0)
            kept = 0
            if file.exists():
                with file.open("rb") as record:
                    kept = record.read(length).rfind(b"\n") + 1
                os.truncate(file, kept)
            if length > kept:
                lost = f"{length - kept:,} of its {length:,} bytes at the checkpoint are lost"
                gone = "" if file.exists() else "the file is gone, "
                notes.append(f"warning: {file.name}: {gone}{lost}; the run goes on with the rest")
        return notes

    def last_step(self) -> int:
        """Return the last step in any of the records; 0 where there is none."""
        return max((line["step"] for file in self._records for line in json_lines(file, [])), default=0)


def _length(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f"{path.name}.writing")
    try:
        with temporary.open("wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ---- which folder is a run ----


def check_new_run(output_dir: str, *, name: str | None, overwrite: bool) -> None:
    """Raise ValueError when a run called `name` (None: the next default name) cannot be made in `output_dir`.

    Nothing outside `output_dir` is ever made or deleted, and only a tinyrl run or an empty folder is overwritten.
    """
    root = Path(output_dir)
    if name is not None and not _NAME.fullmatch(name):
        raise ValueError(
            f"--name {name!r}: a run's name is made of at most 100 letters, digits, '.', '_' and '-', starts with a "
            f"letter or digit, and stays inside {root}/"
        )
    folder = next(p for p in (root, *root.absolute().parents) if os.path.lexists(p))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"--output-dir {root}: {folder} is no folder that can be written to")
    if name is None or not os.path.lexists(path := root / name):
        return
    is_folder = path.is_dir() and not path.is_symlink()
    config = path / "config.yaml"
    is_run = is_folder and config.is_file() and config.read_bytes().startswith(b"method: ")
    if not is_run and not (is_folder and {file.name for file in path.iterdir()} <= {LOCK}):  # alone: of a killed start
        raise ValueError(f"--name {name}: {path} exists and is not a tinyrl run, so it is left alone")
    if not overwrite:
        resume = f"resume it with `tinyrl train --resume {path}`, " if is_run else ""
        raise ValueError(f"run folder {path} exists: {resume}choose another --name, or use --overwrite")
    if (path / LOCK).exists():
        with RunLock(path):  # raises where another process trains in it
            pass


def create_run(output_dir: str, *, name: str | None, config: Config, overwrite: bool) -> RunDir:
    """Make runs/<name>, locked; without a name <method>-<task>-<n>, counting up. Raises ValueError where it cannot be
    made: as `check_new_run`, and while another process trains in it.
    """
    check_new_run(output_dir, name=name, overwrite=overwrite)
    root = Path(output_dir)
    stem = f"{config.method}-{Path(config.task.name or '').stem}-"
    while True:
        there = [p.name.removeprefix(stem) for p in root.iterdir()] if root.is_dir() else []
        last = max((int(n) for n in there if re.fullmatch("[0-9]{1,9}", n)), default=0)
        run = RunDir(root / (name or f"{stem}{last + 1}"))
        try:
            if name is not None and run.path.exists():
                with RunLock(run.path):
                    shutil.rmtree(run.path)
            run.path.mkdir(parents=True)
            run.lock.take()
            return run
        except OSError as error:
            if name is None and isinstance(error, FileExistsError):
                continue  # another run took the number at this moment
            raise ValueError(f"cannot create run folder {run.path}: {error.strerror}") from error


def run_of(path: Path) -> Path | None:
    """Return the run folder (one with config.yaml) that a RUN or CHECKPOINT argument means, or None."""
    above = path.absolute().parent
    folders = (path, above.parent) if above.name == "checkpoints" else (path,)
    return next((folder for folder in folders if os.path.isfile(folder / "config.yaml")), None)


def named_run(path: str) -> Path | None:
    """Return the run that a model's path names, itself or by a checkpoint; None for a model's folder or name."""
    folder = Path(os.path.expanduser(path))
    run = None if starter_path(path) else run_of(folder)
    has_weights = any(os.path.isfile(folder / name) for name in ("config.json", "adapter_config.json"))
    return None if run == folder and has_weights else run  # config.yaml is a common name


def open_run(path: str | Path, *, writes: bool = True) -> RunDir:
    """Return an existing run. Raises ValueError when the folder is not one."""
    folder = Path(path)
    if not os.path.isfile(folder / "config.yaml"):
        what = "has no config.yaml" if os.path.lexists(folder) else "does not exist"
        raise ValueError(f"{folder} is not a run: it {what}.{nearest_run(folder)}")
    return RunDir(folder, writes=writes)
