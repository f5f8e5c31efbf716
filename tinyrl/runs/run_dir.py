"""The run directory: config.yaml, env.json, checkpoints/, and records, a line a step or a completion.

metrics.jsonl is the record of a run; samples.jsonl has texts, tokens.jsonl some of them token by token, prompts.jsonl
which training prompts were tried and solved, failed_rewards.jsonl completions without a reward.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tinyrl.config.methods import METHODS
from tinyrl.config.recipe import dump_config, load_written_config
from tinyrl.config.schema import Config
from tinyrl.runs.lock import LOCK, RunLock
from tinyrl.runs.records import json_lines, lost_lines
from tinyrl.starter import starter_path
from tinyrl.text import did_you_mean, hidden

BLOCK = 1 << 16  # bytes read at a time, from the end of a record
_WRITING = ".writing"  # ends the name of a file that is not whole yet
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RunDir:
    """One run on disk; whoever trains in it holds its lock. Lines are appended whole, and a resume cuts the files to
    where its checkpoint stood.

    When the disk refuses a line (full, gone), the run goes on: `warn` is called once, and the line joins the next.
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

    @property
    def name(self) -> str:
        return self.path.name

    def write_config(self, config: Config) -> None:
        """Write config.yaml, which everything about the run can be rebuilt from."""
        if self.writes:
            _write(self.path / "config.yaml", dump_config(config))

    def read_config(self, overrides: Sequence[str] = ()) -> Config:
        """The run's configuration with overrides laid over it. Raises ValueError when config.yaml was made invalid."""
        return load_written_config(self.path / "config.yaml", overrides=overrides)

    def write_environment(self, facts: dict[str, Any]) -> None:
        """Write env.json: what `environment` gives."""
        if self.writes:
            _write(self.path / "env.json", json.dumps(hidden(facts), indent=1) + "\n")

    def append_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Add the line of a step to metrics.jsonl."""
        self._append(self.metrics, [{"step": step, **metrics}])

    def append_samples(self, samples: list[dict[str, Any]], *, turn: int = 0, most_bytes: float = math.inf) -> None:
        """Add the lines of a step to samples.jsonl, or none of them: where they are more than `most_bytes`, which a
        step has on average, only every 2nd, 4th, 8th ... `turn` has lines, and 0. That follows from the step alone, so
        a run that is resumed keeps the same ones.
        """
        every = 1
        size = sum(len(_as_line(row)) for row in samples) if turn else 0
        while size > every * most_bytes:
            every *= 2
        if turn % every == 0:
            self._append(self.samples, samples)

    def append_tokens(self, lines: Iterable[dict[str, Any]], *, most_bytes: float) -> None:
        """Add lines to tokens.jsonl, up to the first that would make it larger than `most_bytes`."""
        size = _length(self.tokens) + len(self._unwritten.get(self.tokens, ""))
        fitting = []
        for line in lines:
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
        """Add lines to failed_rewards.jsonl: the completions without a reward, and why."""
        self._append(self.failed_rewards, rows)

    def lengths(self) -> dict[str, int]:
        """Bytes of the records, for a checkpoint, which may count only what is on the disk itself: a power cut takes
        the rest.
        """
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
        return [note for file in self._records if self.writes for note in _cut(file, lengths.get(file.name, 0), step)]

    def _append(self, file: Path, rows: list[dict[str, Any]]) -> None:
        if not self.writes:
            return
        text = "".join(_as_line(row) for row in hidden(rows))
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
    ours = path.is_dir() and not path.is_symlink() and (_is_run(path) or _is_half_made(path))
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
    """Whether config.yaml there is one of ours (its first line is the method): many things have a config.yaml."""
    try:
        with (path / "config.yaml").open("rb") as file:
            return file.readline(100).decode("ascii", "replace").rstrip() in {f"method: {name}" for name in METHODS}
    except OSError:
        return False


def _is_half_made(path: Path) -> bool:
    """Whether the folder is empty, or holds only what a run has before its config.yaml: it was killed there."""
    return {file.name for file in path.iterdir()} <= {LOCK, f"config.yaml{_WRITING}"}


def create_run(output_dir: str, *, name: str | None, config: Config, overwrite: bool) -> RunDir:
    """Make runs/<name>, locked; without a name <method>-<task>-<n>, counting up. A folder that exists is refused
    unless told to overwrite, and always while somebody trains in it. Raises ValueError when it cannot be made.
    """
    check_new_run(output_dir, name=name, overwrite=overwrite)
    root = Path(output_dir)
    while True:
        run = RunDir(root / (name or _next_name(root, f"{config.method}-{config.task.name}")))
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


def _next_name(root: Path, stem: str) -> str:
    there = [p.name.removeprefix(f"{stem}-") for p in root.iterdir()] if root.is_dir() else []
    return f"{stem}-{max((int(n) for n in there if re.fullmatch('[0-9]{1,9}', n)), default=0) + 1}"


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


def open_run(path: str | Path, *, writes: bool = True) -> RunDir:
    """An existing run. Raises ValueError when the folder is not one."""
    folder = Path(path)
    if not os.path.isfile(folder / "config.yaml"):
        parent = run_of(folder)
        beside = [str(p.parent) for p in folder.parent.glob("*/config.yaml")]
        meant = f" Its run is {parent}" if parent else did_you_mean(str(folder), beside)
        if not meant and os.path.isfile(Path("runs") / folder / "config.yaml"):
            meant = f" Did you mean `{Path('runs') / folder}`?"
        what = "has no config.yaml" if os.path.lexists(folder) else "does not exist"
        raise ValueError(f"{folder} is not a run: it {what}.{meant}")
    return RunDir(folder, writes=writes)


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
    """Bytes of the lines that are whole within the first `length` bytes of a file."""
    with file.open("rb") as record:
        while length:
            start = max(0, length - BLOCK)
            record.seek(start)
            at = record.read(length - start).rfind(b"\n")
            if at >= 0:
                return start + at + 1
            length = start
    return 0


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(path.suffix + _WRITING)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
