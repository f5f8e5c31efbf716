"""Progress of long work before a run has a display: a line to stderr every few seconds, from one process."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from tinyrl.process.launched import launched
from tinyrl.process.signals import watched

LINE_EVERY_S = 5.0  # and so none of work that is shorter
T = TypeVar("T")


def counted(items: Iterable[T], *, what: str, each: int = 1, total: int | None = None) -> Iterator[T]:
    """Yield the items, checking for a stop; print how many are done, each of which counts for `each` of `what`."""
    due = time.monotonic() + LINE_EVERY_S
    for place, item in enumerate(watched(items)):
        if time.monotonic() > due:
            of_all = "" if total is None else f" of {total:,}"
            if launched().rank == 0:
                with suppress(OSError):  # a terminal that is gone
                    print(f"{what}: {place * each:,}{of_all}", file=sys.stderr, flush=True)
            due = time.monotonic() + LINE_EVERY_S
        yield item
