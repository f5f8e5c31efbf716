"""Files of user code that a worker has imported: found in the worker, known in the run with their hashes.

Every imported module counts whose file is neither the standard library's nor an installed package's nor tinyrl's,
wherever it lies and whoever imported it: versions of the others are noted. Files that are read without being imported
are not seen.

Imported in the worker and in the run: only the standard library.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

INSTALLED = ("site-packages", "dist-packages")  # folders of installed packages
OWN_PACKAGE = "tinyrl"  # whose version a run records: a checkout of it beside a user's file is not user code
OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
NOT_A_PERSONS = (OWN_FOLDER, STANDARD_LIBRARY, os.path.realpath(STANDARD_LIBRARY))


@dataclass(frozen=True)
class ImportedFile:
    """A module's file as it was when a worker had imported it. modified: in nanoseconds."""

    module: str
    file: str
    bytes: int
    modified: int
    sha256: str


class ImportLog:
    """The modules that this process has imported; `new` lists user modules among those since the last time.

    Modules that calls import from files written since the process began are left out: the code made them itself, as a
    reward does that imports the program which it judges.
    """

    def __init__(self) -> None:
        self._began = time.time_ns()
        self._seen = set[str]()

    def new(self, *, in_call: bool) -> list[list[Any]]:
        """Return the fields of an ImportedFile for each user module since the last time. in_call: calls have
        imported them, and not the loading.
        """
        names = [name for name in sys.modules.copy() if name not in self._seen]
        self._seen.update(names)
        found = list[ImportedFile]()
        for name in names:
            path = _file_of(sys.modules.get(name))
            if path is not None and _is_a_persons(name, path):
                found += _read(name, path)
        return [[*astuple(one)] for one in found if not (in_call and one.modified > self._began)]


def _file_of(module: Any) -> str | None:
    """Return the absolute path of a module's file; None where it has none."""
    if not isinstance(module, ModuleType):
        return None
    values = object.__getattribute__(module, "__dict__")  # a lazy module would be loaded by looking at it
    path = values.get("__file__") or getattr(values.get("__spec__"), "origin", None)
    return os.path.abspath(path) if isinstance(path, str) else None


def _is_a_persons(module: str, path: str) -> bool:
    """Return whether a module's file is neither the standard library's nor an installed package's nor tinyrl's."""
    if module.partition(".")[0] == OWN_PACKAGE or not {*INSTALLED}.isdisjoint(path.split(os.sep)):
        return False
    places = (path, os.path.realpath(path))
    return not any(place.startswith(folder + os.sep) for place in places for folder in NOT_A_PERSONS)


def _read(module: str, path: str) -> list[ImportedFile]:
    """Return the file of a module, with its hash; [] for a path that is none, as that of a built-in module."""
    try:
        stat = os.stat(path)
        digest = _hash(Path(path))
    except OSError:
        return []
    return [ImportedFile(module, path, bytes=stat.st_size, modified=stat.st_mtime_ns, sha256=digest)] if digest else []


class LoadedCode:
    """Files of user code as workers have loaded them, by path: each as it was for the first that imported it."""

    def __init__(self) -> None:
        self.files: dict[Path, ImportedFile] = {}

    def add(self, imported: Iterable[ImportedFile]) -> Path | None:
        """Add what a worker has imported; return a file that an earlier one loaded with other contents, if any."""
        other = None
        for one in imported:
            first = self.files.setdefault(Path(one.file), one)
            if first.sha256 != one.sha256:
                other = Path(one.file)
        return other

    def edited_file(self) -> Path | None:
        """Return a file that is not any more what was loaded, if there is one."""
        for file, first in self.files.items():
            if _hash(file) != first.sha256:
                return file
        return None


def _hash(file: Path) -> str:
    """Return the hash of a file's contents; "" where it is gone."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""
