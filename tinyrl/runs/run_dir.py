"""The writer of run folders: config.yaml, env.json, checkpoints/, and records, a line a step or a completion.

metrics.jsonl is the record of a run; samples.jsonl has texts, tokens.jsonl some of them token by token, prompts.jsonl
which training prompts were tried and solved, failed_rewards.jsonl completions without a reward, reward_output.log what
reward functions printed. One process at a time trains in a run: it holds an flock on .lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
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
from typing import Any, BinaryIO

from tinyrl.config.methods import METHODS
from tinyrl.config.recipe import dump_config, load_written_config
from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.runs.records import json_lines, lost_lines
from tinyrl.text import HIDDEN, SECRET, did_you_mean, one_line, redact

BLOCK = 1 << 16  # bytes read at a time, from the end of a record
_WRITING = ".writing"  # ends the name of a file that is not whole yet
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
LOCK = ".lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems mounted without them
PACKAGES = ("tinyrl", "torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")
MOST_OUTPUT = 1 << 20  # bytes of reward_output.log, of which the later half is kept when there is more
RESUMED = "--- resumed ---\n"
CUT = "--- the beginning was left out ---\n"


class RunLock:
    """The lock of one run folder, which the system releases when the process ends: a kill, a crash or a power cut
    leaves a file behind and no lock. To take it twice is to take it once; `with` takes and releases it.

    `wanted`: False for a process beside the one that holds it; nothing is taken then.
    """

    def __init__(self, folder: Path, *, wanted: bool = True) -> None:
        self.folder, self.wanted = folder, wanted
        self._file: BinaryIO | None = None

    def __enter__(self) -> RunLock:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self) -> None:
        """Raise ValueError, with who holds it, when another process does; OSError where the folder takes no file."""
        while self.wanted and self._file is None:
            file = open(self.folder / LOCK, "r+b", buffering=0, opener=_open_own)  # noqa: SIM115  open while held
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with file:
                    holder = _holder(file)
                raise ValueError(f"run {self.folder} is in use: {holder}. Stop it first, or wait for its end") from None
            except OSError as error:
                if error.errno not in WITHOUT_LOCKS:
                    raise
                unsure = "its file system has no locks; see that no other process trains in it"
                print(f"warning: {self.folder}: {unsure}", file=sys.stderr)
            if self._is(file):  # else its holder deleted it, or the folder, after it was opened here
                us = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
                with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
                    os.ftruncate(file.fileno(), 0)
                    os.pwrite(file.fileno(), json.dumps(us).encode(), 0)
                self._file = file

    def release(self) -> None:
        """Let others train in the folder. The file is deleted while it is locked, so nobody can hold a deleted one."""
        file, self._file = self._file, None
        if file is not None:
            with file, contextlib.suppress(OSError):  # the folder is gone, or can no longer be written to
                if self._is(file):
                    (self.folder / LOCK).unlink()

    def _is(self, file: BinaryIO) -> bool:
        try:
            return os.path.samestat((self.folder / LOCK).stat(), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False


def _open_own(path: str, flags: int) -> int:
    """Open for reading and writing, made where it is not there, and never what a link points to."""
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def _holder(file: BinaryIO) -> str:
    """Return who holds a lock, from what the holder wrote into it."""
    try:
        holder: dict[str, Any] = json.loads(os.pread(file.fileno(), 4096, 0))
        pid, host, since = (one_line(str(holder[name]), 80) for name in ("pid", "host", "since"))
    except (ValueError, KeyError, TypeError):
        return "another process trains in it"
    return f"process {pid} on {host} trains in it since {since}"


class RunDir:
    """One run on disk. Lines are appended whole, and a resume cuts the files to where its checkpoint stood. When the
    disk refuses a line (full, gone), the run goes on: `warn` is called once, and the line joins the next.

    `writes`: False for a process beside the one that trains in it, which reads only.
    """

    def __init__(self, path: Path, *, warn: Callable[[str], None] | None = None, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self.lock = RunLock(path, wanted=writes)
        self.checkpoints = path / "checkpoints"
        self.metrics, self.samples = path / "metrics.jsonl", path / "samples.jsonl"
        self.tokens, self.prompts = path / "tokens.jsonl", path / "prompts.jsonl"
        self.failed_rewards = path / "failed_rewards.jsonl"
        self._records = (self.metrics, self.samples, self.tokens, self.prompts, self.failed_rewards)
        self.warn = warn or (lambda text: print(text, file=sys.stderr))
        self._unwritten: dict[Path, str] = {}
        self._resumed = self._refused = False  # reward_output.log: gone on with; not writable, and said

    @property
    def name(self) -> str:
        return self.path.name

    def write_config(self, config: Config) -> None:
        """Write config.yaml, which everything about the run can be rebuilt from."""
        if self.writes:
            write_whole(self.path / "config.yaml", dump_config(config))

    def read_config(self, overrides: Sequence[str] = ()) -> Config:
        """The run's configuration with overrides laid over it. Raises ValueError when config.yaml was made invalid."""
        return load_written_config(self.path / "config.yaml", overrides=overrides)

    def write_environment(self, facts: dict[str, Any]) -> None:
        """Write env.json, what `environment` gives."""
        if self.writes:
            write_whole(self.path / "env.json", json.dumps(facts, indent=1) + "\n")

    def append_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        self._append(self.metrics, [{"step": step, **metrics}])

    def append_samples(self, samples: list[dict[str, Any]], *, turn: int = 0, most_bytes: float = math.inf) -> None:
        """Add the lines of a step to samples.jsonl, or none of them: where they are more than `most_bytes`, which a
        step has on average, only every 2nd, 4th, 8th ... `turn` has lines, and 0. That follows from the step alone, so
        a run that is resumed keeps the same ones.
        """
        every, size = 1, sum(len(_as_line(row)) for row in samples) if turn else 0
        while size > every * most_bytes:
            every *= 2
        if turn % every == 0:
            self._append(self.samples, samples)

    def append_tokens(self, lines: Iterable[dict[str, Any]], *, most_bytes: float) -> None:
        """Add lines to tokens.jsonl, up to the first that would make it larger than `most_bytes`."""
        size = _length(self.tokens) + len(self._unwritten.get(self.tokens, ""))
        fitting = []
        for line in lines:  # lazily: a full file costs one line
            size += len(_as_line(line))
            if size > most_bytes:
                break
            fitting.append(line)
        if fitting:
            self._append(self.tokens, fitting)

    def append_prompts(self, step: int, prompts: list[list[Any]]) -> None:
        """Add the line of a step to prompts.jsonl: of each prompt its index, its key, how often tried and solved."""
        self._append(self.prompts, [{"step": step, "prompts": prompts}])

    def append_failed_rewards(self, rows: list[dict[str, Any]]) -> None:
        self._append(self.failed_rewards, rows)

    def append_reward_output(self, text: str) -> None:
        """Add whole lines to reward_output.log, whose end is kept where there is too much, for people. A resume goes on
        after a line that says so: unlike the records it is not cut, for it may hold the reason of a crash.
        """
        file = self.path / "reward_output.log"
        try:
            there = _length(file)
            text = text if self._resumed or not there else RESUMED + text
            self._resumed = True
            with file.open("ab+") as out:
                out.write(text.encode("utf-8", errors="replace"))
                if out.tell() > MOST_OUTPUT:
                    out.seek(-MOST_OUTPUT // 2, os.SEEK_END)
                    write_whole(file, CUT + out.read().partition(b"\n")[2].decode("utf-8", "replace"))
        except OSError as error:
            if not self._refused:
                self.warn(f"warning: what the reward prints cannot be written to {file}: {error.strerror}")
            self._refused = True

    def lengths(self) -> dict[str, int]:
        """Bytes of the records for a checkpoint, flushed first: a power cut takes what is not on the disk itself."""
        there = [file for file in self._records if file.exists()]
        for file in there:
            with file.open("rb") as record:
                os.fsync(record.fileno())
        return {file.name: _length(file) for file in self._records}

    def cut(self, lengths: dict[str, int], *, step: int = 0) -> list[str]:
        """Forget what was recorded after a checkpoint, so that curves hold no step twice, and half a line at the end,
        which would spoil the next. Where the checkpoint counts more than is left, marks take the place of what is lost.

        `step`: the checkpoint's. A sentence for each record that lost something, or has lines that cannot be read.
        """
        self._unwritten.clear()
        self._resumed = False
        return [note for file in self._records if self.writes for note in _cut(file, lengths.get(file.name, 0), step)]

    def _append(self, file: Path, rows: list[dict[str, Any]]) -> None:
        if not self.writes:
            return
        text = "".join(_as_line(row) for row in rows)
        told = bool(self._unwritten)
        text = self._unwritten.pop(file, "") + text
        length = _length(file)
        try:
            with file.open("a", encoding="utf-8") as out:
                out.write(text)
        except OSError as error:
            with contextlib.suppress(OSError):  # half a line would make the next one unreadable too
                os.truncate(file, length)
            if not told:
                self.warn(f"warning: cannot write to {file}: {error.strerror}; its lines are kept until that works")
            self._unwritten[file] = text


def finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _as_line(row: dict[str, Any]) -> str:
    return json.dumps(finite(row), ensure_ascii=True) + "\n"


def _length(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _cut(file: Path, length: int, step: int) -> list[str]:
    """Leave the whole lines of the first `length` bytes of a record, and marks in the place of what is missing."""
    if not (file.exists() or length):
        return []
    notes = list[str]()
    file.touch()
    kept = _whole_lines(file, min(length, _length(file)))
    os.truncate(file, kept)
    for _ in json_lines(file, notes):
        pass
    if length > kept:
        notes.append(f"{file.name}: {length - kept:,} of its {length:,} bytes of up to step {step} are lost")
        try:
            with file.open("ab") as record:
                record.writelines(lost_lines(step, length - kept))
        except OSError as error:
            os.truncate(file, kept)
            notes.append(f"{file.name}: the gap could not be marked: {error.strerror}")
    return [f"warning: {note.removesuffix('.')}; the run goes on with the rest" for note in notes]


def _whole_lines(file: Path, length: int) -> int:
    """Count the bytes of the lines that are whole within the first `length` bytes of a file."""
    with file.open("rb") as record:
        for end in range(length, 0, -BLOCK):
            record.seek(start := max(0, end - BLOCK))
            if (at := record.read(end - start).rfind(b"\n")) >= 0:
                return start + at + 1
    return 0


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_suffix(path.suffix + _WRITING)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


# ---- what identifies a run ----


def environment(command: list[str], **facts: Any) -> dict[str, Any]:
    """Versions, machine, git revision, command (secrets taken out): what repeats a run."""
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "git": _git_revision(),
        "command": redact_command(command),
        **facts,
    }


def versions() -> dict[str, str]:
    """Of Python and of the installed packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def redact_command(command: list[str]) -> str:
    """A command line as it would be typed again, without its secrets (`--token abc` among them)."""
    words = []
    for before, word in zip(["", *command], command, strict=False):
        named = before.startswith("-") and "=" not in before and SECRET.search(before)
        name, equals, _ = word.partition("=")
        words.append(HIDDEN if named else f"{name}={HIDDEN}" if equals and SECRET.search(name) else redact(word))
    return shlex.join(words)


def _git_revision() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


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
    path = root / name if name is not None else None
    if path is None or not os.path.lexists(path):
        return
    half_made = {LOCK, f"config.yaml{_WRITING}"}  # all that a run has which was killed before it had a config.yaml
    is_folder = path.is_dir() and not path.is_symlink()
    ours = is_folder and (_is_run(path) or {file.name for file in path.iterdir()} <= half_made)
    if not overwrite:
        resume = f"Resume it with `tinyrl train --resume {path}`, choose" if _is_run(path) else "Choose"
        replace = ", or use --overwrite" if ours else ""
        raise ValueError(f"run folder {path} exists. {resume} another --name{replace}")
    if not ours:
        raise ValueError(f"--overwrite: {path} is not a tinyrl run (no config.yaml of one), so it is left alone")
    if (path / LOCK).exists():
        with RunLock(path):  # raises where somebody trains in it
            pass


def _is_run(path: Path) -> bool:
    """Whether config.yaml there is one of ours: its first line is the method."""
    try:
        with (path / "config.yaml").open("rb") as file:
            return file.readline(100).decode("ascii", "replace").rstrip() in {f"method: {name}" for name in METHODS}
    except OSError:
        return False


def create_run(output_dir: str, *, name: str | None, config: Config, overwrite: bool) -> RunDir:
    """Make runs/<name>, locked; without a name <method>-<task>-<n>, counting up. A folder that exists is refused
    unless told to overwrite, and always while somebody trains in it. Raises ValueError when it cannot be made.
    """
    check_new_run(output_dir, name=name, overwrite=overwrite)
    root, stem = Path(output_dir), f"{config.method}-{Path(config.task.name or '').stem}-"
    while True:
        there = [p.name.removeprefix(stem) for p in root.iterdir()] if root.is_dir() else []
        last = max((int(n) for n in there if re.fullmatch("[0-9]{1,9}", n)), default=0)
        run = RunDir(root / (name or f"{stem}{last + 1}"))
        try:
            if name is not None and run.path.exists():
                _delete_run(run.path)
            run.path.mkdir(parents=True)
            run.lock.take()
            return run
        except OSError as error:
            if name is None and isinstance(error, FileExistsError):
                continue  # another run took the number at this moment
            raise ValueError(f"cannot create run folder {run.path}: {error.strerror}") from error


def _delete_run(path: Path) -> None:
    """Delete a run that nobody trains in, from its name first: whoever waits for its lock then holds no half of it."""
    going = path.with_name(f".overwritten-{path.name}")
    if going.exists():  # of a command that was killed here
        shutil.rmtree(going)
    with RunLock(path):
        path.rename(going)
        shutil.rmtree(going)


def run_of(path: Path) -> Path | None:
    """The run folder (one with config.yaml) that a RUN or CHECKPOINT argument means, or None."""
    above = path.absolute().parent
    run = path.parent.parent if len(path.parts) > 2 else above.parent
    folders = [path, run] if above.name == "checkpoints" else [path]
    return next((folder for folder in folders if os.path.isfile(folder / "config.yaml")), None)


def named_run(path: str) -> Path | None:
    """The run that a model's path names, itself or by a checkpoint of it; None for a model's own folder or name."""
    folder = Path(os.path.expanduser(path))
    run = None if starter_path(path) else run_of(folder)
    has_weights = any(os.path.isfile(folder / name) for name in ("config.json", "adapter_config.json"))
    return None if run == folder and has_weights else run  # config.yaml is a common name


def meant_a_run(name: str) -> bool:
    """Whether a name that is nothing looks like a run's: there are runs in its folder, or one so called in runs/."""
    if os.path.lexists(name) or starter_path(name):
        return False
    beside = "/" in name and any(Path(name).parent.glob("*/config.yaml"))
    return beside or os.path.isfile(Path("runs") / name / "config.yaml")


def nearest_run(path: str | Path) -> str:
    """The end of a sentence that names a run beside `path` which may have been meant; empty where none is near."""
    return did_you_mean(str(path), [str(found.parent) for found in Path(path).parent.glob("*/config.yaml")])


def open_run(path: str | Path, *, writes: bool = True) -> RunDir:
    """An existing run. Raises ValueError when the folder is not one."""
    folder = Path(path)
    if not os.path.isfile(folder / "config.yaml"):
        parent = run_of(folder)
        meant = f" Its run is {parent}" if parent else nearest_run(folder)
        if not meant and os.path.isfile(Path("runs") / folder / "config.yaml"):
            meant = f" Did you mean `{Path('runs') / folder}`?"
        what = "has no config.yaml" if os.path.lexists(folder) else "does not exist"
        raise ValueError(f"{folder} is not a run: it {what}.{meant}")
    return RunDir(folder, writes=writes)
