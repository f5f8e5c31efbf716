"""The lock of a run folder: one process at a time trains in it, and the system releases it when that process ends.

An flock on a file that is kept open: a kill, a crash or a power cut leaves a file behind and no lock. Commands that
only read a run need none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from tinyrl.text import one_line

LOCK = ".lock"
MOST_BYTES = 4096  # of what a holder writes about itself
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems mounted without them


class RunLock:
    """The lock of one run folder. To take it twice is to take it once; `with` takes and releases it.

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
            file = open(self.folder / LOCK, "r+b", buffering=0, opener=_made)  # noqa: SIM115  open as long as it is held
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
                _write_holder(file)
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


def _made(path: str, flags: int) -> int:
    """Open for reading and writing, made where it is not there, and never what a link points to."""
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def _write_holder(file: BinaryIO) -> None:
    holder = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(file.fileno(), 0)
        os.pwrite(file.fileno(), json.dumps(holder).encode(), 0)


def _holder(file: BinaryIO) -> str:
    """Who holds a lock, as it wrote itself."""
    try:
        holder: dict[str, Any] = json.loads(os.pread(file.fileno(), MOST_BYTES, 0))
        pid, host, since = (one_line(str(holder[name]), 80) for name in ("pid", "host", "since"))
    except (ValueError, KeyError, TypeError):
        return "another process trains in it"
    return f"process {pid} on {host} trains in it since {since}"
