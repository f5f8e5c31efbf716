"""Checkpoints on disk: written whole or not at all, verified before they are read, pruned safely.

A checkpoint is a folder `step-000120` of safetensors and JSON files, written under a temporary name. Every file is
flushed to disk, then MANIFEST.json (name, bytes and SHA-256 of each file) is written last, and one rename makes it
visible: a crash at any moment leaves the old state or the new one. An older checkpoint of the same step is renamed to a
name that still counts until the new one is in place.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from tinyrl.runs.folders import ASIDE, DELETING, WRITING

MANIFEST = "MANIFEST.json"
_NAME = re.compile(rf"(?:{re.escape(ASIDE)})?step-([0-9]+)")
LEAST_SOUND = 2  # checkpoints that a full disk leaves, besides the one that gives way


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def checkpoint_step(folder: Path) -> int:
    """Return the step in a checkpoint's name. Raises ValueError for a folder that is not one."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder} is not a checkpoint folder (they are called {checkpoint_name(120)})")
    return int(match[1])


def write_checkpoint(root: Path, step: int, *, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a temporary folder, then make it the checkpoint of `step`, replacing an older one of it.

    Raises OSError (disk full, read-only) with everything that was there before intact.
    """
    from safetensors import SafetensorError  # only writing needs it, and `tinyrl eval` reads before anything heavy

    final = root / checkpoint_name(step)
    aside = root / f"{ASIDE}{final.name}"
    temporary = root / f"{WRITING}{final.name}"
    if not root.is_dir():
        root.mkdir()  # in the run's folder, which is there or lost
        _flush(root.parent)
    sweep(root)
    try:
        temporary.mkdir()
        write(temporary)
        seal(temporary, step)
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(final, aside)
        os.rename(temporary, final)
        _flush(root)
    except Exception as error:  # Rust libraries have the number of an operating system's error in their text alone
        number = re.search(r"os error (\d+)", str(error))
        if isinstance(error, OSError) or not (number or isinstance(error, SafetensorError)):
            raise
        raise OSError(int(number[1]) if number else errno.EIO, f"cannot write {final.name}: {error}") from error
    finally:
        if not final.exists() and aside.exists():
            os.rename(aside, final)
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(aside, ignore_errors=True)
    return final


def seal(folder: Path, step: int) -> None:
    """Write MANIFEST.json of the files in `folder`, everything flushed to disk."""
    there = sorted(p for p in folder.rglob("*") if p != folder / MANIFEST)
    entries = {}
    for path in filter(Path.is_file, there):
        entries[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
        _flush(path)
    manifest = {"schema": 1, "step": step, "files": entries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (folder / MANIFEST, *filter(Path.is_dir, there), folder):
        _flush(path)


def problem_with(folder: Path) -> str | None:
    """Return why a checkpoint is unusable (a file missing, truncated or altered, an unfinished save, another step than
    its name says), or None.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not manifest["files"]:
            return f"{MANIFEST} lists no files"
        if _NAME.fullmatch(folder.name) and manifest["step"] != checkpoint_step(folder):  # a copy may have another name
            return f"{MANIFEST} is of step {manifest['step']!r:.20}"
        for name, entry in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
            if _digest(path) != entry["sha256"]:
                return f"{name} is not what was written (its SHA-256 differs)"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # not JSON, or not ours
        return f"{MANIFEST} is damaged"
    return None


def list_checkpoints(root: Path) -> list[Path]:
    """List the checkpoint folders of a run, oldest first, sound or not. One that was renamed aside counts while its
    step has no other: its writer was killed between two renames.
    """
    there = [p for p in (root.iterdir() if root.is_dir() else ()) if _NAME.fullmatch(p.name) and p.is_dir()]
    by_step = {checkpoint_step(p): p for p in sorted(there)}  # ".aside-step" sorts before "step"
    return [by_step[step] for step in sorted(by_step)]


def newest_sound(root: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that verifies, and a sentence for each newer one that does not."""
    warnings = []
    for folder in reversed(list_checkpoints(root)):
        if (problem := problem_with(folder)) is None:
            return folder, warnings
        warnings.append(f"{folder.name}: {problem}")
    return None, warnings


def prune(root: Path, *, keep: int, protected: Iterable[Path]) -> None:
    """Delete all but the newest `keep` checkpoints and the protected ones. One is renamed before it is deleted: a crash
    half-way leaves no half of one.
    """
    assert keep >= 1, keep
    there = list_checkpoints(root)
    safe = {p.resolve() for p in (*there[-keep:], *protected)}
    for folder in there:
        if folder.resolve() not in safe:
            folder.rename(root / f"{DELETING}{folder.name}")
    sweep(root)


def sweep(root: Path) -> None:
    """Delete what crashed writers of checkpoints left behind, and those that were to be deleted."""
    left = {*root.iterdir()} - {*list_checkpoints(root)} if root.is_dir() else set[Path]()
    for path in left:
        if path.name.startswith((ASIDE, WRITING, DELETING)) and path.is_symlink():
            path.unlink()
        elif path.name.startswith((ASIDE, WRITING, DELETING)):
            shutil.rmtree(path, ignore_errors=True)


def free_oldest(root: Path, *, best: Path) -> Path | None:
    """Delete the oldest checkpoint that is not the best, so that a full disk has room for the next one, and return it.
    Return None, with nothing deleted, where fewer than LEAST_SOUND sound ones would remain, or too little room for one
    of the newest one's size.
    """
    there = list_checkpoints(root)
    oldest = next((folder for folder in there if folder != best), None)
    if oldest is None:
        return None
    sound = [folder for folder in there if folder != oldest and problem_with(folder) is None]
    room = shutil.disk_usage(root).free + _bytes_of(oldest)
    if len(sound) < LEAST_SOUND or room < _bytes_of(there[-1]):
        return None
    oldest.rename(root / f"{DELETING}{oldest.name}")
    sweep(root)
    return oldest


def check_room(folder: Path, *, needed: int, copies: int = 1) -> None:
    """Raise OSError (ENOSPC) if the file system of `folder` has no room for so many checkpoints of `needed` bytes."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < copies * needed:
        sentence = f"a checkpoint takes about {needed / 1e6:,.1f} MB, there are {copies} at a time, and "
        raise OSError(errno.ENOSPC, f"{sentence}{free / 1e6:,.1f} MB are free", str(there))


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
