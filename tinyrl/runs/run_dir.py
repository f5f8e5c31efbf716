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
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tinyrl.config.methods import METHODS
from tinyrl.config.recipe import dump_config, load_written_config
from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.runs.records import finite, json_lines
from tinyrl.text import did_you_mean, one_line, redact

LOCK = ".lock"
RECORDS = ("metrics", "samples", "tokens", "prompts", "failed_rewards")
PACKAGES = ("tinyrl", "torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")
MOST_OUTPUT = 1 << 20  # bytes of reward_output.log; beyond, the later half is kept
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RunLock:
    """The lock of a run folder; the system releases it when the process ends. Taking it twice is taking it once.

    `wanted`: False for a process that writes nothing; it takes no lock.
    """

    def __init__(self, folder: Path, *, wanted: bool = True) -> None:
        self.file, self.wanted = folder / LOCK, wanted
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

    __enter__, __exit__ = take, release


class RunDir:
    """One run on disk. Lines are appended whole; when the disk refuses one (full, gone), the run goes on: `warn` is
    called once, and the line joins the next. `writes`: False for a rank that only reads.
    """

    def __init__(self, path: Path, *, warn: Callable[[str], None] | None = None, writes: bool = True) -> None:
        self.path, self.name, self.writes = path, path.name, writes
        self.lock = RunLock(path, wanted=writes)
        self.checkpoints = path / "checkpoints"
        self._records = [path / f"{name}.jsonl" for name in RECORDS]
        self.metrics, self.samples, self.tokens, self.prompts, self.failed_rewards = self._records
        self.output = path / "reward_output.log"
        self.warn = warn or (lambda text: print(text, file=sys.stderr))
        self._unwritten: dict[Path, bytes] = {}
        self._resumed = False  # whether this process has appended to reward_output.log

    def write_config(self, config: Config) -> None:
        if self.writes:
            write_atomic(self.path / "config.yaml", dump_config(config))

    def read_config(self, overrides: Sequence[str] = ()) -> Config:
        """Read config.yaml with overrides laid over it. Raises ValueError where it is invalid."""
        return load_written_config(self.path / "config.yaml", overrides=overrides)

    def write_environment(self, facts: dict[str, Any]) -> None:
        """Write env.json, the result of `environment`."""
        if self.writes:
            write_atomic(self.path / "env.json", json.dumps(facts, indent=1) + "\n")

    def append_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        self.append(self.metrics, [{"step": step, **metrics}])

    def append_samples(self, samples: list[dict[str, Any]], *, turn: int = 0, most_bytes: float = math.inf) -> None:
        """Append the samples of a step. If they exceed `most_bytes`, the average budget of a step, append only those of
        every 2nd, 4th, 8th ... turn, and of turn 0: a rule of the step alone, so that a resume keeps the same ones.
        """
        every, size = 1, len(_lines(samples)) if turn else 0
        while size > every * most_bytes:
            every *= 2
        if turn % every == 0:
            self.append(self.samples, samples)

    def append_tokens(self, lines: Iterable[dict[str, Any]], *, most_bytes: float) -> None:
        """Append lines to tokens.jsonl, up to the first that would make it larger than `most_bytes`."""
        size = _length(self.tokens) + len(self._unwritten.get(self.tokens, b""))
        for line in lines:  # lazily: a full file costs one line
            size += len(_lines([line]))
            if size > most_bytes:
                return
            self.append(self.tokens, [line])

    def append(self, file: Path, rows: list[dict[str, Any]]) -> None:
        """Append lines to a record, or keep them for the next call where the disk refuses."""
        self._append(file, _lines(rows))

    def append_reward_output(self, text: str) -> None:
        """Append to reward_output.log; of more than MOST_OUTPUT bytes the later half is kept. A resume marks it and
        does not cut it: it may hold the reason of a crash.
        """
        mark = b"--- resumed ---\n" if not self._resumed and _length(self.output) else b""
        self._append(self.output, mark + text.encode("utf-8", errors="replace"))
        self._resumed = True
        if self.output in self._unwritten:
            self._unwritten[self.output] = b""  # not kept: there may be any amount of it
        elif self.writes and _length(self.output) > MOST_OUTPUT:
            with contextlib.suppress(OSError):
                end = self.output.read_bytes()[-MOST_OUTPUT // 2 :].partition(b"\n")[2]
                self.output.write_bytes(b"--- the beginning was left out ---\n" + end)

    def _append(self, file: Path, lines: bytes) -> None:
        if not self.writes:
            return
        warned, lines = bool(self._unwritten), self._unwritten.pop(file, b"") + lines
        length = _length(file)
        try:
            with file.open("ab") as out:
                out.write(lines)
        except OSError as error:
            with contextlib.suppress(OSError):  # half a line would make the next one unreadable too
                os.truncate(file, length)
            if not warned:
                self.warn(f"warning: cannot write to {file}: {error.strerror}; its lines are kept until that works")
            self._unwritten[file] = lines

    def lengths(self) -> dict[str, int]:
        """Return the bytes of the records for a checkpoint, flushed first: a power cut takes what is not on disk."""
        for file in filter(Path.exists, self._records):
            with file.open("rb") as record:
                os.fsync(record.fileno())
        return {file.name: _length(file) for file in self._records}

    def cut(self, lengths: dict[str, int], *, step: int = 0) -> list[str]:
        """Truncate the records to their lengths at the checkpoint of `step`, so that no step is recorded twice, and to
        whole lines. A shorter record is padded with a blank line, so that the lengths in older checkpoints stay true.

        Return a warning for each record that lost lines, or has lines that cannot be read.
        """
        self._unwritten.clear()
        self._resumed, notes = False, list[str]()
        for file in self._records if self.writes else ():
            length = lengths.get(file.name, 0)
            if not file.exists() and not length:
                continue
            file.touch()
            with file.open("rb") as record:
                kept = record.read(length).rfind(b"\n") + 1
            os.truncate(file, kept)
            if length > kept:
                notes.append(f"{file.name}: {length - kept:,} of its {length:,} bytes of up to step {step} are lost")
                with file.open("ab") as record:
                    record.write(b"\n".rjust(length - kept))
            for _ in json_lines(file, notes):
                pass
        return [f"warning: {note.removesuffix('.')}; the run goes on with the rest" for note in notes]


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(finite(row), ensure_ascii=True) + "\n" for row in rows).encode()


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


def environment(command: list[str], **facts: Any) -> dict[str, Any]:
    """Return the contents of env.json: versions, machine, git revision, and the command with URLs masked."""
    git = ["git", "rev-parse", "HEAD"]
    try:
        revision = subprocess.run(git, capture_output=True, text=True, timeout=5, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        revision = None
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "git": revision}
    return {"versions": versions(), **machine, "command": shlex.join(map(redact, command)), **facts}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


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
    is_folder, config = path.is_dir() and not path.is_symlink(), path / "config.yaml"
    first_lines = tuple(f"method: {method}\n".encode() for method in METHODS)
    is_run = is_folder and config.is_file() and config.read_bytes().startswith(first_lines)
    unfinished = {LOCK, "config.yaml.writing"}  # of a run that was killed before it had a config.yaml
    replaceable = is_run or (is_folder and {file.name for file in path.iterdir()} <= unfinished)
    if not overwrite:
        resume = f"Resume it with `tinyrl train --resume {path}`, choose" if is_run else "Choose"
        raise ValueError(
            f"run folder {path} exists. {resume} another --name{', or use --overwrite' if replaceable else ''}"
        )
    if not replaceable:
        raise ValueError(f"--overwrite: {path} is not a tinyrl run (no config.yaml of one), so it is left alone")
    if (path / LOCK).exists():
        with RunLock(path):  # raises where another process trains in it
            pass


def create_run(output_dir: str, *, name: str | None, config: Config, overwrite: bool) -> RunDir:
    """Make runs/<name>, locked; without a name <method>-<task>-<n>, counting up. Raises ValueError where it cannot be
    made: as `check_new_run`, and while another process trains in it.
    """
    check_new_run(output_dir, name=name, overwrite=overwrite)
    root, stem = Path(output_dir), f"{config.method}-{Path(config.task.name or '').stem}-"
    while True:
        there = [p.name.removeprefix(stem) for p in root.iterdir()] if root.is_dir() else []
        last = max((int(n) for n in there if re.fullmatch("[0-9]{1,9}", n)), default=0)
        run = RunDir(root / (name or f"{stem}{last + 1}"))
        try:
            if name is not None and run.path.exists():  # renamed before it is deleted: a kill leaves no half of a run
                going = run.path.with_name(f".overwritten-{name}")
                shutil.rmtree(going, ignore_errors=True)
                with RunLock(run.path):
                    run.path.rename(going)
                shutil.rmtree(going)
            run.path.mkdir(parents=True)
            run.lock.take()
            return run
        except OSError as error:
            if name is None and isinstance(error, FileExistsError):
                continue  # another run took the number at this moment
            raise ValueError(f"cannot create run folder {run.path}: {error.strerror}") from error


def run_of(path: Path) -> Path | None:
    """Return the run folder (one with config.yaml) that a RUN or CHECKPOINT argument means, or None."""
    folders, above = [path], path.absolute().parent
    if above.name == "checkpoints":
        folders.append(path.parent.parent if len(path.parts) > 2 else above.parent)
    return next((folder for folder in folders if os.path.isfile(folder / "config.yaml")), None)


def named_run(path: str) -> Path | None:
    """Return the run that a model's path names, itself or by a checkpoint; None for a model's folder or name."""
    folder = Path(os.path.expanduser(path))
    run = None if starter_path(path) else run_of(folder)
    has_weights = any(os.path.isfile(folder / name) for name in ("config.json", "adapter_config.json"))
    return None if run == folder and has_weights else run  # config.yaml is a common name


def meant_a_run(name: str) -> bool:
    """Return whether a name without a folder is nearly that of a run."""
    return not (os.path.lexists(name) or starter_path(name)) and bool(nearest_run(name))


def nearest_run(path: str | Path) -> str:
    """Return " Did you mean ...?" with a run beside `path`, or in runs/, of nearly that name; "" where none is near."""
    there = [str(found.parent) for found in Path(path).parent.glob("*/config.yaml") if found.parent != Path(path)]
    if not there and os.path.isfile(Path("runs") / path / "config.yaml"):
        return f" Did you mean `{Path('runs') / path}`?"
    return did_you_mean(str(path), there)


def open_run(path: str | Path, *, writes: bool = True) -> RunDir:
    """Return an existing run. Raises ValueError when the folder is not one."""
    folder = Path(path)
    if not os.path.isfile(folder / "config.yaml"):
        parent = run_of(folder)
        meant = f" Its run is {parent}" if parent else nearest_run(folder)
        what = "has no config.yaml" if os.path.lexists(folder) else "does not exist"
        raise ValueError(f"{folder} is not a run: it {what}.{meant}")
    return RunDir(folder, writes=writes)
