"""The run directory: config.yaml, env.json, metrics.jsonl, samples.jsonl, failed_rewards.jsonl, checkpoints/.

metrics.jsonl is the record of a run.
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
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tinyrl.config.methods import METHODS
from tinyrl.config.recipe import dump_config, load_written_config
from tinyrl.config.schema import Config
from tinyrl.starter import starter_path
from tinyrl.text import did_you_mean

HIDDEN = "[redacted]"
# Names of settings whose values are secret; max_new_tokens and tokenizer are not.
SECRET = re.compile(
    r"(?i)token(?!s|iz)|secret|passw(?:or)?d|api_?key|access_?key|private_?key|credential|authorization"
)
_SECRET_VALUE = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}"
    r"|glpat-[\w-]{8,}|xox[a-z]-[\w-]{8,}|AKIA[A-Z0-9]{16}|eyJ[\w-]{8,}(?:\.[\w-]+)*|[0-9a-f]{40})(?![A-Za-z0-9])"
)
_URL_LOGIN = re.compile(r"(\w+://)[^/\s]*@")
_NAMED_VALUE = re.compile(r"""([\w.-]+)(["']?\s*[=:]\s*)("[^"]*"|'[^']*'|[^\s,;&()[\]{}"']+)""")
PACKAGES = ("tinyrl", "torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RunDir:
    """One run on disk. Lines are appended whole and flushed; a resume cuts the files to where its checkpoint stood.

    When the disk refuses a line (full, gone), the run goes on: `warn` is called once, and the line joins the next.
    """

    def __init__(self, path: Path, *, warn: Callable[[str], None] | None = None) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics, self.samples = path / "metrics.jsonl", path / "samples.jsonl"
        self.failed_rewards = path / "failed_rewards.jsonl"
        self._records = (self.metrics, self.samples, self.failed_rewards)
        self.warn = warn or (lambda text: print(text, file=sys.stderr))
        self._unwritten: dict[Path, str] = {}

    @property
    def name(self) -> str:
        return self.path.name

    def write_config(self, config: Config) -> None:
        """Write config.yaml, which everything about the run can be rebuilt from."""
        _write(self.path / "config.yaml", dump_config(config))

    def read_config(self, overrides: Sequence[str] = ()) -> Config:
        """The run's configuration with overrides laid over it. Raises ValueError when config.yaml was made invalid."""
        return load_written_config(self.path / "config.yaml", overrides=overrides)

    def write_environment(self, facts: dict[str, Any]) -> None:
        """Write env.json: what `environment` gives."""
        _write(self.path / "env.json", json.dumps(facts, indent=1) + "\n")

    def append_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Add the line of a step to metrics.jsonl."""
        self._append(self.metrics, [{"step": step, **metrics}])

    def append_samples(self, samples: list[dict[str, Any]]) -> None:
        """Add lines to samples.jsonl."""
        self._append(self.samples, samples)

    def append_failed_rewards(self, rows: list[dict[str, Any]]) -> None:
        """Add lines to failed_rewards.jsonl: the completions without a reward, and why."""
        self._append(self.failed_rewards, rows)

    def lengths(self) -> dict[str, int]:
        """Bytes of the records, for a checkpoint."""
        return {file.name: file.stat().st_size if file.exists() else 0 for file in self._records}

    def cut(self, lengths: dict[str, int]) -> None:
        """Forget what was recorded after a checkpoint, so that curves hold no step twice."""
        self._unwritten.clear()
        for file in self._records:
            if file.exists():
                os.truncate(file, min(lengths.get(file.name, 0), file.stat().st_size))

    def _append(self, file: Path, rows: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(finite(row), ensure_ascii=True) + "\n" for row in rows)
        told = bool(self._unwritten)
        text = self._unwritten.pop(file, "") + text
        length = self.lengths()[file.name]
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
    is_run = _is_run(path)
    if not overwrite:
        resume = f"Resume it with `tinyrl train --resume {path}`, choose" if is_run else "Choose"
        raise ValueError(f"run folder {path} exists. {resume} another --name, or use --overwrite")
    if path.is_symlink() or not path.is_dir() or (not is_run and any(path.iterdir())):
        raise ValueError(f"--overwrite: {path} is not a tinyrl run (no config.yaml of one), so it is left alone")


def _is_run(path: Path) -> bool:
    """Whether config.yaml there is one of ours (its first line is the method): many things have a config.yaml."""
    try:
        with (path / "config.yaml").open("rb") as file:
            return file.readline(100).decode("ascii", "replace").rstrip() in {f"method: {name}" for name in METHODS}
    except OSError:
        return False


def create_run(output_dir: str, *, name: str | None, config: Config, overwrite: bool) -> RunDir:
    """Make runs/<name>; without a name <method>-<task>-<n>, counting up. A folder that exists is refused unless
    told to overwrite. Raises ValueError when it cannot be made.
    """
    check_new_run(output_dir, name=name, overwrite=overwrite)
    root = Path(output_dir)
    while True:
        path = root / (name or _next_name(root, f"{config.method}-{config.task.name}"))
        try:
            if name is not None and path.exists():
                shutil.rmtree(path)
            path.mkdir(parents=True)
            return RunDir(path)
        except OSError as error:
            if name is None and isinstance(error, FileExistsError):
                continue  # another run took the number at this moment
            raise ValueError(f"cannot create run folder {path}: {error.strerror}") from error


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


def open_run(path: str | Path) -> RunDir:
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
    return RunDir(folder)


def environment(command: list[str], **facts: Any) -> dict[str, Any]:
    """What identifies a run and repeats it: versions, machine, git revision, command (secrets taken out)."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "versions": {"python": platform.python_version(), **versions},
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "git": _git_revision(),
        "command": redact_command(command),
        **facts,
    }


def redact_command(command: list[str]) -> str:
    """A command line as it would be typed again, without its secrets (`--token abc` among them)."""
    words = []
    for before, word in zip(["", *command], command, strict=False):
        named = before.startswith("-") and "=" not in before and SECRET.search(before)
        name, equals, _ = word.partition("=")
        words.append(HIDDEN if named else f"{name}={HIDDEN}" if equals and SECRET.search(name) else redact(word))
    return shlex.join(words)


def redact(text: str) -> str:
    """Take secrets out: logins in URLs, values that look like access tokens, values of settings named like one."""
    text = _SECRET_VALUE.sub(HIDDEN, _URL_LOGIN.sub(rf"\1{HIDDEN}@", text))
    return _NAMED_VALUE.sub(lambda m: f"{m[1]}{m[2]}{HIDDEN}" if SECRET.search(m[1]) else m[0], text)


def finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(path.suffix + ".writing")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _git_revision() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
