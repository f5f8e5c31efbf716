"""Pauses of the garbage collector, where objects become many and stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause the garbage collector, which would look through all rows again and again while they become more."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Import libraries in a process of our own: the collector does not look through their objects, then or later. With
    torch and transformers that is a second less.
    """
    with without_collection():
        yield
        gc.freeze()
