"""Where a corpus keeps its index, who may write it, and how a file is known again.

An index stands beside its corpus, or in the user's cache where that folder takes no file, or with the temporary files.
It is written by one process at a time under another name, which it loses when it is complete: a kill leaves no half
index behind, only a file that the next writer uses. It ends with its own checksum, which SQLite does not look at.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tinyrl.runs.signals import check_stop, watched

ENDING = ".fts5"
WAIT_S = 0.1
_CHECKED = b"sha256 "  # begins the last 71 bytes of an index
_BLOCK = 1 << 20

State = tuple[int, int, int]


def state_of(source: Path) -> State:
    """Bytes, time of change and time of change of its entry: a copy that keeps the first two has another third one."""
    try:
        found = source.stat()
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{source}: not a file")
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def file_hash(source: Path) -> str:
    """SHA-256 of a file, about a second for each gigabyte."""
    try:
        with source.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror}") from error


def seal(index: Path) -> None:
    """Add the checksum to the end of a new index, and have it all on the disk."""
    with index.open("r+b") as file:
        file.write(_checksum(file, index.stat().st_size))
        file.flush()
        os.fsync(file.fileno())


def is_sealed(index: Path) -> bool:
    """Whether an index is, byte for byte, what was written; about a second for each gigabyte."""
    try:
        with index.open("rb") as file:
            size = index.stat().st_size - len(_CHECKED) - 64
            return size >= 0 and _checksum(file, size) == file.read()
    except OSError:
        return False


def _checksum(file: BinaryIO, size: int) -> bytes:
    """What stands at the end of an index, after `size` bytes, which are read."""
    digest = hashlib.sha256()
    for start in watched(range(0, size, _BLOCK)):
        digest.update(file.read(min(_BLOCK, size - start)))
    return _CHECKED + digest.hexdigest().encode()


def index_places(source: Path) -> list[Path]:
    """Where the index of a corpus may be, in order of preference."""
    known = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tinyrl"
    temporary = Path(tempfile.gettempdir()) / f"tinyrl-{os.getuid()}"
    folders = [cache, temporary] if _is_own(temporary) else [cache]
    name = f"{source.name}{ENDING}"
    return [source.with_name(name), *(folder / f"{known}-{name}" for folder in folders)]


def _is_own(folder: Path) -> bool:
    """False for a folder that somebody else has put where everybody may."""
    try:
        found = folder.lstat()
    except OSError:
        return True
    return found.st_uid == os.getuid()


@contextmanager
def written_alone(place: Path) -> Iterator[Path]:
    """A file for this process to write, and then to move to `place`; others who want to write it wait.

    The lock is the system's, which takes it back when a process ends, however it ends. Raises OSError where the folder
    takes no file, or has no locks.
    """
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock, writing = (place.with_name(place.name + ending) for ending in (".lock", ".writing"))
    descriptor = _locked(lock)
    try:
        writing.unlink(missing_ok=True)  # of a process that was killed
        yield writing
    finally:
        with suppress(OSError):  # a folder that is gone by now
            writing.unlink(missing_ok=True)
            lock.unlink()  # while it is held: nobody can hold a deleted one
        os.close(descriptor)


def _locked(lock: Path) -> int:
    """The descriptor that holds a lock."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        held = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(lock.stat(), os.fstat(descriptor))
        except (BlockingIOError, FileNotFoundError):  # another process has it, or had it and deleted it
            check_stop()
            time.sleep(WAIT_S)
        finally:
            if not held:
                os.close(descriptor)
        if held:
            return descriptor
