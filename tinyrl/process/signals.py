"""Signal handling: a signal (Ctrl-C, termination, a closed terminal) sets a flag, which long work checks.

A second Ctrl-C leaves at once. Windows has no SIGUSR1 and no SIGHUP.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from tinyrl.process.errors import Signalled

SIGNALS = tuple(one for one in signal.Signals if one.name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"))
LOOK_EVERY_S = 1.0
T = TypeVar("T")
Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None  # as signal.getsignal returns it


class StopFlag:
    """Collect signals inside a `with`, which restores the old handlers; `check_stop` checks the innermost flag.

    leaves: a second Ctrl-C ends the process, else it is a KeyboardInterrupt.
    """

    def __init__(self, *, signals: Sequence[signal.Signals] = SIGNALS, leaves: bool = True) -> None:
        self.by: str | None = None
        self.signals = signals
        self.leaves = leaves
        self._before: dict[int, Handler] = {}

    def __enter__(self) -> StopFlag:
        for number in self.signals:
            before = signal.getsignal(number)
            if number.name == "SIGHUP" and before == signal.SIG_IGN:
                continue  # under nohup a closed terminal changes nothing
            signal.signal(number, self._handle)
            self._before[number] = before
        _flags.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _flags.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def check(self) -> None:
        """Raise Signalled when a signal has come."""
        if self.by is not None:
            raise Signalled(self.by)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.by is not None and number == signal.SIGINT
        if again and not self.leaves:
            raise KeyboardInterrupt
        if number == signal.SIGINT and not again and os.isatty(2):
            os.write(2, b"\nstopping after the current operation; Ctrl-C again leaves at once\n")
        if again:
            os._exit(130)
        self.by = self.by or signal.Signals(number).name


class _Ended(BaseException):
    """A signal that ends the process came."""


@contextmanager
def undone_on_signal() -> Iterator[None]:
    """Leave the block by an exception where a signal comes that ends the process, so that what the block undoes is
    undone; then end by that signal. Signals that something else handles, or ignores, do as before.
    """
    on_main = threading.current_thread() is threading.main_thread()
    ending = [one for one in SIGNALS if on_main and signal.getsignal(one) == signal.SIG_DFL]
    came: int | None = None

    def end(number: int, _: FrameType | None) -> None:
        nonlocal came
        came = number
        for one in ending:
            signal.signal(one, signal.SIG_IGN)
        raise _Ended

    for one in ending:
        signal.signal(one, end)
    try:
        yield
    except _Ended:
        pass
    finally:
        for one in ending:
            signal.signal(one, signal.SIG_DFL)
        if came is not None:
            os.kill(os.getpid(), came)


_flags: list[StopFlag] = []  # in use, the innermost last
_holding: list[Callable[[str], None] | None] = []  # of each open `stop_held`, the callback until it is called


def check_stop() -> None:
    """Raise Interrupted when a signal has come: called between pieces of work that can be repeated."""
    if _flags and not _holding:
        _flags[-1].check()
    elif _flags and (by := _flags[-1].by) is not None:
        for place, tell in enumerate(_holding):
            if tell is not None:
                _holding[place] = None
                tell(by)


def watched(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, calling `check_stop` about once a second."""
    due = time.monotonic() + LOOK_EVERY_S
    for item in items:
        if time.monotonic() > due:
            check_stop()
            due = time.monotonic() + LOOK_EVERY_S
        yield item


@contextmanager
def stop_held(tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Keep `check_stop` from raising inside; where it would have, `tell` is called once with the signal's name."""
    _holding.append(tell)
    try:
        yield
    finally:
        _holding.pop()
