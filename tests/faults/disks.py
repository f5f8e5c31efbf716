"""A small file system for one process, to be filled or made read-only for real.

It is a tmpfs, mounted where no other process sees it and gone with the process, so nothing is left to unmount.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

from tests.faults.children import Child

NEW_MOUNTS, NEW_USERS = 0x00020000, 0x10000000  # of unshare(2)
RECURSIVE, PRIVATE = 0x4000, 0x40000  # of mount(2)


def mount_small_disk(folder: Path, size: int) -> None:
    """Mount a file system of `size` bytes at `folder`, for this process and its children. OSError where that fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_MOUNTS) != 0:  # only root may; others may as the root of a user namespace of their own
        _check(libc.unshare(NEW_MOUNTS | NEW_USERS))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _check(libc.mount(None, b"/", None, RECURSIVE | PRIVATE, None))
    _check(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()))


def _check(returned: int) -> None:
    if returned != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def try_to_mount(folder: Path) -> None:
    """The exit code is 0 where a small disk can be mounted, and 1 where it cannot."""
    try:
        mount_small_disk(folder, 1 << 20)
    except OSError as error:
        print(error)
        sys.exit(1)


@cache
def can_mount(folder: Path) -> bool:
    """Whether a process of ours may mount a file system."""
    return Child(try_to_mount, folder, output=folder / "mount.txt").end() == 0
