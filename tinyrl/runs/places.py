"""What a RUN, RUN@STEP, RUN@best or CHECKPOINT argument means: which run, and which of its checkpoints.

Every command that takes a run takes a checkpoint of it too. One that loads weights loads its weights (of RUN: of the
newest one); `show` shows its step; `report` and `doctor` are of the whole run. Only a resume takes none, as it goes on
from the newest.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from tinyrl.config.sections import starter_path
from tinyrl.runs.best import best_checkpoint
from tinyrl.runs.checkpoint import checkpoint_name, checkpoint_step, newest_sound, problem_with
from tinyrl.runs.records import is_run, not_a_run, seed_runs
from tinyrl.runs.run_dir import RunDir, open_run
from tinyrl.text import join_truncated

AT_BEST = "best"  # in RUN@best
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class RunAt:
    """A run as an argument names it. step: of the checkpoint that the argument names; None: it names the run."""

    run: RunDir
    step: int | None


def run_at(place: str | Path) -> RunAt:
    """Return the run that an argument names, to read its records: its checkpoint may be damaged, and config.yaml gone.
    Raises ValueError where there is no such run or checkpoint.
    """
    named = _named_checkpoint(place)
    run = run_of(place)
    if run is None and not (Path(place) / METRICS).is_file():
        raise ValueError(not_a_run(place))
    return RunAt(RunDir(run or Path(place)), step=None if named is None else checkpoint_step(named))


def runs_at(place: str) -> list[RunAt]:
    """Return the runs that an argument names, to read their records: one, or each seed in the folder of a command with
    --seeds. Raises as `run_at`.
    """
    return [run_at(seed) for seed in seed_runs(Path(place))] or [run_at(place)]


def reported_at(place: str, notes: list[str]) -> list[Path]:
    """Return the folders of the runs that an argument names, to read their metrics. Of several seeds those without a
    finished step are left out, with a note. Raises as `run_at`.
    """
    folders = [at.run.path for at in runs_at(place)]
    begun = [folder for folder in folders if (folder / METRICS).is_file()]
    waiting = [folder.name for folder in folders if folder not in begun]
    if not begun or not waiting:
        return folders
    notes.append(f"{place}: without a finished step, and left out: {join_truncated(waiting)}")
    return begun


def run_to_resume(place: str, *, writes: bool = True) -> RunDir:
    """Return the run that is to go on. Raises ValueError where there is none, and for one of its checkpoints."""
    run = run_of(place)
    if run is not None and run != Path(place):
        raise ValueError(goes_on_from_newest(run, place))
    if seed_runs(Path(place)):
        raise ValueError(f"{not_a_run(place)} The command with --seeds that has made them goes on with all.")
    return open_run(place, writes=writes)


def goes_on_from_newest(run: Path, place: str) -> str:
    """Return a sentence on a resume for which a checkpoint of the run is named, with the commands that may be meant."""
    resume = shlex.join(["tinyrl", "train", "--resume", str(run)])
    fork = shlex.join(["tinyrl", "train", "--from", place])
    return f"{place} is a checkpoint, and a run goes on from its newest: {resume}. A new run from this one: {fork}"


def run_of(place: str | Path) -> Path | None:
    """Return the run folder (one with config.yaml) that an argument means, or None."""
    path, _ = _split(place)
    above = path.parent if path.parent.name == "checkpoints" else path.absolute().parent
    folders = (path, above.parent) if above.name == "checkpoints" else (path,)
    return next((folder for folder in folders if is_run(folder)), None)


def named_run(path: str) -> Path | None:
    """Return the run that a model's path names, itself or by a checkpoint; None for a model's folder or name."""
    folder = Path(os.path.expanduser(path))
    run = None if starter_path(path) else run_of(folder)
    has_weights = any(os.path.isfile(folder / name) for name in ("config.json", "adapter_config.json"))
    return None if run == folder and has_weights else run  # config.yaml is a common name


def checkpoint_of(place: str | Path) -> Path:
    """Return the checkpoint that an argument means: itself, that of a step, the best one, or the newest sound one of
    the run. Warnings name better or newer ones that do not verify. Raises ValueError where there is none, or it does
    not verify.
    """
    named = _named_checkpoint(place)
    if named is not None:
        if problem := problem_with(named):
            raise ValueError(f"checkpoint {named} is damaged: {problem}")
        return named
    path = Path(place)
    folder, warnings = newest_sound(path / "checkpoints")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if folder is None:
        raise ValueError(f"{path} has no checkpoint {'that verifies' if warnings else 'yet'}")
    return folder


def _named_checkpoint(place: str | Path) -> Path | None:
    """Return the checkpoint that an argument names, which may be damaged; None where it names a run, or nothing. Raises
    ValueError where the run has no such checkpoint.
    """
    path, which = _split(place)
    if which == AT_BEST:
        return _best_of(open_run(path))
    if which:
        return _of_step(open_run(path), which)
    run = run_of(path)
    if run is None or run == path:
        return None
    if not path.is_dir():
        raise ValueError(f"{run} has no checkpoint {path.name}: `tinyrl show {run}` lists those")
    return path


def _best_of(run: RunDir) -> Path:
    """Return the best checkpoint of a run."""
    best = best_checkpoint(run)
    if best is None:
        raise ValueError(
            f"{run.path} has no checkpoint of an evaluated step (run.eval_every, run.save_every): "
            f"`tinyrl show {run.path}` lists those that there are"
        )
    for note in best.notes:
        print(f"warning: {note}; {run.path}@{AT_BEST} is {best.folder.name} ({best.score})", file=sys.stderr)
    return best.folder


def _of_step(run: RunDir, which: str) -> Path:
    """Return the checkpoint of a step of a run."""
    if not which.isdecimal():
        raise ValueError(f"{run.path}@{which}: a step, or {AT_BEST}, comes after @")
    checkpoint = run.checkpoints / checkpoint_name(int(which))
    if not checkpoint.is_dir():
        raise ValueError(f"{run.path} has no checkpoint of step {which}: `tinyrl show {run.path}` lists those")
    return checkpoint


def _split(place: str | Path) -> tuple[Path, str]:
    """Return the path of an argument, and what comes after the @ of RUN@STEP and RUN@best; "" for any other."""
    path = os.fspath(place)
    run, at, which = path.rpartition("@")
    if not at or os.path.lexists(path) or not is_run(Path(run)):
        return Path(path), ""
    return Path(run), which
