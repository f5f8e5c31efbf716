"""The note on code that a run's configuration names, before a command runs it: a run's folder may come from anybody."""

from __future__ import annotations

import sys
from pathlib import Path

from tinyrl.config.schema import Config
from tinyrl.process.launched import launched
from tinyrl.text import one_line
from tinyrl.workers.imports import OWN_PACKAGE
from tinyrl.workers.loading import HERE, FunctionSource, parse_use

SHOWN = 200  # characters of a path
MOST_SHOWN = 4
_told = set[Path]()  # folders of runs


def tell_code(run: Path, config: Config, *, sections: tuple[str, ...] | None = None) -> None:
    """Print which code a run's configuration names (in `sections`; None: in all), where it is not that of the current
    folder: once for each run.
    """
    folder = run.resolve()
    found = list[str]()
    for named in config.named():
        is_run = named.kind == "code" and (sections is None or named.place[0] in sections)
        if is_run and _is_foreign(named.value, folder):
            found.append(f"{named.label}={one_line(named.value, SHOWN)}")
    if not found or folder in _told or launched().rank != 0:
        return
    _told.add(folder)
    more = f" and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
    what = ", ".join(found[:MOST_SHOWN]) + more
    print(f"note: this may run code that {one_line(str(run), SHOWN)} names: {what}", file=sys.stderr)


def _is_foreign(use: str, run: Path) -> bool:
    """Return whether code lies outside the current folder, or came with the run. Of code that is not there others tell
    more.
    """
    try:
        source = parse_use(use)
    except ValueError:
        return False
    if source.module is not None and source.module.partition(".")[0] in (HERE, OWN_PACKAGE):
        return False
    return not _is_in(source, Path.cwd().resolve()) or _is_in(source, run)


def _is_in(source: FunctionSource, folder: Path) -> bool:
    return source.file is not None and source.file.resolve().is_relative_to(folder)
