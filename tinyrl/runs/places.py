"""What a RUN, RUN@STEP, RUN@best or CHECKPOINT argument means: which run, and which of its checkpoints."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tinyrl.config.sections import starter_path
from tinyrl.runs.best import best_checkpoint
from tinyrl.runs.checkpoint import MANIFEST, checkpoint_name, newest_sound, problem_with
from tinyrl.runs.run_dir import RunDir, open_run

AT_BEST = "best"  # in RUN@best


def run_of(place: str | Path) -> Path | None:
    """Return the run folder (one with config.yaml) that an argument means, or None."""
    path, _ = _split(place)
    above = path.absolute().parent
    folders = (path, above.parent) if above.name == "checkpoints" else (path,)
    return next((folder for folder in folders if _is_run(folder)), None)


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
    path, which = _split(place)
    if which == AT_BEST:
        return _best_of(open_run(path))
    if which:
        path = _of_step(open_run(path), which)
    if (path / MANIFEST).is_file():
        if problem := problem_with(path):
            raise ValueError(f"checkpoint {path} is damaged: {problem}")
        return path
    folder, warnings = newest_sound(path / "checkpoints")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if folder is None:
        raise ValueError(f"{path} has no checkpoint {'that verifies' if warnings else 'yet'}")
    return folder


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
    if not at or os.path.lexists(path) or not _is_run(Path(run)):
        return Path(path), ""
    return Path(run), which


def _is_run(folder: Path) -> bool:
    return os.path.isfile(folder / "config.yaml")
