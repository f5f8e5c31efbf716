"""The process around a run of a notebook: one run at a time, an interrupt that saves, and all as before afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tinyrl.errors import Interrupted

_one_at_a_time = threading.Lock()


@contextmanager
def alone() -> Iterator[None]:
    """One run at a time: the device, torch's random numbers and thread count are the process's."""
    if not _one_at_a_time.acquire(blocking=False):
        raise ValueError("a run is going on in this process already; wait for its end, or interrupt it first")
    try:
        yield
    finally:
        _one_at_a_time.release()


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C asks for a checkpoint; a second one, or one before a run has begun, is a KeyboardInterrupt. Threads and
    random numbers of the process are as before afterwards.
    """
    import torch

    from tinyrl.runs.signals import StopFlag

    threads, on_main = torch.get_num_threads(), threading.current_thread() is threading.main_thread()
    try:
        with torch.random.fork_rng(devices=[]), StopFlag(signals=(signal.SIGINT,) if on_main else (), leaves=False):
            yield
    except Interrupted:
        raise KeyboardInterrupt from None  # while it was loading: there is no run yet
    finally:
        torch.set_num_threads(threads)


def prepare_libraries() -> None:
    from tinyrl.cli.options import quiet_libraries

    quiet_libraries()
