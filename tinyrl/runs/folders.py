"""Files and folders that appear whole or not at all, and the lock of a folder. Links are never written through.

What is being written has a hidden name that nobody can guess, `.writing-NAME-` and 16 digits, and is renamed to NAME at
the end. A folder that gives way is `.aside-NAME-...` until the new one is in its place, then `.deleting-NAME-...`. Who
writes holds a lock on it, so that the next writer tells what a killed one left from what is going on (`sweep`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from tinyrl.process.errors import FolderLost
from tinyrl.process.signals import undone_on_signal
from tinyrl.text import one_line

LOCK = ".lock"
WRITING = ".writing-"
ASIDE = ".aside-"
DELETING = ".deleting-"
_HIDDEN = re.compile(r"(\.writing-|\.aside-|\.deleting-)(.+)-[0-9a-f]{16}", re.DOTALL)


def hidden_name(prefix: str, name: str) -> str:
    return f"{prefix}{name}-{secrets.token_hex(8)}"


def open_file(path: Path, flags: int, *, folder: int | None = None) -> int:
    """Open a file, but no link and nothing that is not a regular file; return its descriptor. folder: the descriptor of
    the folder that it is in, wherever that folder is now. Raises OSError, which names the path.
    """
    try:
        descriptor = os.open(_place_in(path, folder), flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=folder)
    except OSError as error:
        why = "is a link, which is not followed" if error.errno == errno.ELOOP else error.strerror
        raise OSError(error.errno, why, str(path)) from None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file", str(path))


def file_stat(path: Path, *, folder: int | None = None) -> os.stat_result | None:
    """Return the facts of a file, or of a link itself; None where there is none. folder: as `open_file` has it."""
    try:
        return os.stat(_place_in(path, folder), dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _place_in(path: Path, folder: int | None) -> Path | str:
    return path if folder is None else path.name


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all. What is at `path` is replaced, a link too."""
    _sweep_files(path)
    temporary, descriptor = _new_file(path)
    try:
        with open(descriptor, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _new_file(path: Path) -> tuple[Path, int]:
    """Make a hidden file that is to become `path`, locked; return it with its descriptor."""
    while True:
        temporary = path.with_name(hidden_name(WRITING, path.name))
        descriptor = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            is_locked = _try_lock(descriptor)
        except OSError:  # a system without such locks, where nothing is swept
            is_locked = True
        if is_locked and _names(temporary, descriptor):
            return temporary, descriptor
        os.close(descriptor)  # swept by another writer before it was locked


def _sweep_files(path: Path) -> None:
    """Delete what killed writers of the file `path` left behind."""
    for left in _hidden_in(path.parent):
        if not left.name.startswith(f"{WRITING}{path.name}-"):
            continue
        with contextlib.suppress(OSError), open(open_file(left, os.O_RDWR), "r+b") as file:
            if _try_lock(file.fileno()):
                left.unlink()


# ---- the lock of a folder ----


class FolderLock:
    """The lock of a folder, a file in it. Who holds it has the folder's `descriptor`, by which files are opened in it
    wherever it is. The system releases it when the process ends. Taking it twice is taking it once.

    wanted: False for a process that writes nothing; it takes no lock.
    """

    def __init__(self, folder: Path, *, wanted: bool = True) -> None:
        self.folder = folder
        self.wanted = wanted
        self.descriptor: int | None = None
        self._lock: int | None = None

    def take(self, *, make: bool = True) -> FolderLock:
        """Raise ValueError, naming the holder, when another process holds it; OSError where no file can be made, or,
        without `make`, where there is none.
        """
        if not self.wanted or self.descriptor is not None:
            return self
        with contextlib.ExitStack() as undo:
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            undo.callback(os.close, folder)
            flags = os.O_RDWR | (os.O_CREAT if make else 0)
            lock = open_file(self.folder / LOCK, flags, folder=folder)
            undo.callback(os.close, lock)
            if not _try_lock(lock):
                holder = one_line(os.pread(lock, 800, 0).decode("utf-8", "replace"), 200) or "another process"
                raise ValueError(f"{self.folder} is in use: {holder} writes there. Stop it first, or wait for its end")
            if not (_names(self.folder, folder) and _names(LOCK, lock, folder=folder)):
                raise ValueError(f"{self.folder} is in use: another process replaced or deleted it at this moment")
            with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"process {os.getpid()} on {platform.node()} since {now}".encode(), 0)
            undo.pop_all()
        self.descriptor = folder
        self._lock = lock
        return self

    def release(self, *_: object) -> None:
        if self._lock is None or self.descriptor is None:
            return
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # also of a forked process, which has the same open file
        os.close(self._lock)
        os.close(self.descriptor)
        self._lock = None
        self.descriptor = None

    __enter__ = take
    __exit__ = release
    __del__ = release

    def check(self) -> None:
        """Raise FolderLost where the path is no longer the folder that is held, or the lock no longer its lock; nothing
        where no lock is held. A disk that does not answer is not a reason to raise: the next write will show it.
        """
        if self._lock is None or self.descriptor is None:
            return
        if not _names(self.folder, self.descriptor):
            place = _place_of(self.descriptor)
            if place is None:
                raise FolderLost(f"{self.folder} was deleted, with the records and checkpoints of this run")
            raise FolderLost(
                f"{self.folder} was renamed or replaced: the records and checkpoints of this run are in {place}.\n"
                f"Go on with:\n  tinyrl train --resume {place}"
            )
        if not _names(LOCK, self._lock, folder=self.descriptor):
            raise FolderLost(
                f"{self.folder / LOCK} was deleted or replaced, so that another process may train in this folder. "
                f"Records and checkpoints are in {self.folder}.\nIf nobody trains there, go on with:\n"
                f"  tinyrl train --resume {self.folder}"
            )

    def rename(self, path: Path) -> None:
        """Rename the folder; the lock stays held."""
        os.rename(self.folder, path)
        self.folder = path


def _try_lock(descriptor: int) -> bool:
    """Lock an open file; return whether nobody else holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _names(path: str | Path, descriptor: int, *, folder: int | None = None) -> bool:
    """Return whether a path, in the folder of that descriptor where one is given, is what is open there."""
    try:
        there = os.stat(path, dir_fd=folder, follow_symlinks=folder is None)
        return os.path.samestat(there, os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _place_of(descriptor: int) -> Path | None:
    """Return the path of an open folder; None where it was deleted, or the system does not tell."""
    try:
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        return place if os.path.samestat(place.stat(), os.fstat(descriptor)) else None
    except OSError:
        return None


# ---- folders that appear whole ----


def new_folder(path: Path) -> FolderLock:
    """Make an empty hidden folder beside `path`, which it is to become, and return its lock, taken. What killed writers
    left there is deleted, and an older folder of which they had not yet put the new one in place is put back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    while True:
        made = FolderLock(path.with_name(hidden_name(WRITING, path.name)))
        made.folder.mkdir()
        try:
            return made.take()
        except (FileNotFoundError, ValueError):  # swept by another process before it was locked
            shutil.rmtree(made.folder, ignore_errors=True)


def move_into_place(made: FolderLock, path: Path) -> None:
    """Rename a new folder to `path`, in place of an older one. Of several that do so at a time one succeeds.

    Raises ValueError where another process holds the older one, and OSError, with the older one in its place.
    """
    if not os.path.lexists(path):
        made.rename(path)
        return
    with FolderLock(path) as older:
        older.rename(path.with_name(hidden_name(ASIDE, path.name)))
        try:
            made.rename(path)
        finally:
            if os.path.lexists(path):
                older.rename(path.with_name(hidden_name(DELETING, path.name)))
                shutil.rmtree(older.folder, ignore_errors=True)
            else:
                older.rename(path)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `path`, in place of an older one, where the block raises nothing; else all is
    as it was, also where a signal ends the process.
    """
    with undone_on_signal(), new_folder(path) as made:
        try:
            yield made.folder
            move_into_place(made, path)
            (path / LOCK).unlink(missing_ok=True)
        finally:
            if made.folder != path:
                shutil.rmtree(made.folder, ignore_errors=True)


def sweep(root: Path) -> None:
    """Delete the hidden folders that killed processes left in `root`. One that was to give way is put back where
    nothing has taken its place.
    """
    for left in _hidden_in(root):
        found = _HIDDEN.fullmatch(left.name)
        if found is None or left.is_symlink() or not left.is_dir():
            continue
        if found[1] == DELETING:
            shutil.rmtree(left, ignore_errors=True)
            continue
        lock = FolderLock(left)
        with contextlib.suppress(OSError):
            left.rmdir()  # killed before it had a lock
        with contextlib.suppress(OSError, ValueError), lock.take(make=False):  # else its writer is at work
            if found[1] == ASIDE and not os.path.lexists(root / found[2]):
                lock.rename(root / found[2])
            else:
                shutil.rmtree(left, ignore_errors=True)


def _hidden_in(root: Path) -> list[Path]:
    """List what has a hidden name in a folder; nothing where it cannot be listed."""
    try:
        return [path for path in root.iterdir() if _HIDDEN.fullmatch(path.name)]
    except OSError:
        return []
