"""Where user functions are called: a worker process behind its supervisor, or, of a notebook, this process.

Both answer requests (protocol.py). Nothing here waits without a deadline. What a function prints goes into a file, so
that no full pipe stops it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinyrl.process.errors import machine_memory
from tinyrl.process.launched import VARIABLES
from tinyrl.process.signals import check_stop
from tinyrl.text import escape_control, one_line
from tinyrl.urls import mask_url
from tinyrl.workers import protocol, supervisor, worker

POLL_S = 0.1
GRACE_S = 1.0  # the worker ends a late call itself and writes where it was; after this we do
EXIT_S = 2.0  # between the end of its pipe and its exit code: its supervisor ends what it started before
END_S = 2.0  # for an idle worker to leave by itself, and for a killed one to be gone
MOST_OUTPUT_BYTES = 64 << 20  # in the file of what a call prints; then it is emptied
MOST_REPLY_BYTES = 1 << 30
CALL_BYTES = 1 << 16  # of what one call prints
KEPT_LINES = 200  # of what is printed while there is nowhere to write it
MEMORY_SHARE = 0.5  # of the machine's memory, which a process may use
MAX_SHOWN_CHARS = 300


class CallFailed(Exception):
    """A call failed, with the reason."""


class Printed:
    """The lines that one function prints, each after its name; without secrets, control characters named.

    kept: the last lines, while there is nowhere to write them.
    """

    def __init__(self, name: str) -> None:
        self.kept: deque[str] = deque(maxlen=KEPT_LINES)
        self._name = name
        self._write: Callable[[str], None] | None = None

    def send_to(self, write: Callable[[str], None]) -> None:
        """From now on hand lines to `write`, those that were kept first."""
        self._write = write
        if self.kept:
            write("".join(f"{line}\n" for line in self.kept))
            self.kept.clear()

    def add(self, data: bytes) -> None:
        """Hand over the lines of a call, up to CALL_BYTES of it."""
        for raw in data[:CALL_BYTES].splitlines():
            self.kept.append(f"{self._name}: {escape_control(mask_url(raw.decode('utf-8', errors='replace')))}")
        if self._write is not None:
            self.send_to(self._write)


class HereProcess:
    """This process, for functions that it has already: nothing limits their time or memory."""

    alive = True

    def __init__(self) -> None:
        self._loaded = worker.Loaded()

    def ask(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Answer a request; its arguments are copied, as a function may change them. Raises Interrupted once the run is
        to stop.
        """
        check_stop()
        return self._loaded.answer(request if "load" in request else copy.deepcopy(request))

    def close(self, *, at_once: bool = False) -> None:
        """Do nothing: this process stays."""


class WorkerProcess:
    """A worker and its supervisor. file: the user's source, of which messages name the line; None: it has none."""

    def __init__(self, file: Path | None, printed: Printed) -> None:
        self._file = file
        self._printed = printed
        self._requested = 0
        self._mark = secrets.token_hex(8)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        requests, self._requests = _pipe(reads=False)
        replies, self._replies = _pipe(reads=True)
        # Without a launcher's variables: user code is none of the processes that it started, and a library there
        # would wait for the others. Sets are in the same order in every run.
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        numbers = (os.getpid(), memory_limit(), requests, replies)
        try:
            self._supervisor = subprocess.Popen(
                # -P keeps our folder off sys.path, where loading.py would hide the user's
                [sys.executable, "-P", supervisor.__file__, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[requests, replies],
                env=environment | {"PYTHONHASHSEED": "0", supervisor.MARK: self._mark},
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        finally:
            os.close(requests)
            os.close(replies)

    @property
    def alive(self) -> bool:
        return self._supervisor.poll() is None

    def ask(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a request and return the reply; without one the worker is ended. Raises TypeError or ValueError for
        arguments that are not JSON, CallFailed, and Interrupted once the run is to stop.
        """
        self._requested += 1
        data = protocol.encode({"id": self._requested, "timeout_s": timeout_s, **request})
        answered = False
        try:
            line = self._exchange(data, timeout_s)
            reply = protocol.reply_to(self._requested, line)
            answered = True
        except protocol.Malformed:
            raise CallFailed(MALFORMED) from None
        finally:
            self._printed.add(self._written())
            self._empty_output()
            if not answered:  # the worker's next reply would be to the wrong request
                self.close(at_once=True)
        return reply

    def close(self, *, at_once: bool = False) -> None:
        """End the worker and whatever it started; an idle one leaves by itself, unless that is to happen at once."""
        process = self._supervisor
        if self._requests.closed:
            return
        _close(self._requests)
        if not at_once:
            _wait(process)
        process.terminate()
        _wait(process)
        process.kill()
        _wait(process)  # one stuck in the kernel must not hold us as well
        orderly = process.returncode is not None and process.returncode >= 0
        if not orderly:  # perhaps the function has killed its supervisor
            supervisor.kill_marked(process.pid, self._mark)
        _close(self._replies)
        _close(self._output)

    def _exchange(self, data: bytes, timeout_s: float) -> bytes:
        """Send a line and return the reply's. Raises CallFailed where the worker ended or was too late."""
        started = time.monotonic()

        def send(data: bytes) -> None:
            with contextlib.suppress(OSError, ValueError):  # it is gone or closed: the end of its replies tells
                while data:
                    data = data[self._requests.write(data) or 0 :]

        threading.Thread(target=send, args=(data,), daemon=True).start()  # the pipe may be full
        waiting = select.poll()
        waiting.register(self._replies, select.POLLIN)
        line = bytearray()
        while not line.endswith(b"\n"):
            check_stop()
            if os.fstat(self._output.fileno()).st_size > MOST_OUTPUT_BYTES:
                self._empty_output()
            if waiting.poll(1000 * POLL_S):
                received = os.read(self._replies.fileno(), 1 << 20)
                line += received
                lost = not received
            else:  # a fork of it may hold the pipe open
                lost = time.monotonic() > started + timeout_s + GRACE_S or not self.alive
            if lost:
                raise CallFailed(self._why_lost(timeout_s, late=time.monotonic() >= started + timeout_s))
            if len(line) > MOST_REPLY_BYTES:
                raise CallFailed(MALFORMED)
        return bytes(line)

    def _written(self) -> bytes:
        """Return what the function has printed in this call."""
        if self._output.closed:
            return b""
        return os.pread(self._output.fileno(), os.fstat(self._output.fileno()).st_size, 0)

    def _empty_output(self) -> None:
        if not self._output.closed:
            os.ftruncate(self._output.fileno(), 0)
            os.lseek(self._output.fileno(), 0, os.SEEK_SET)  # the worker's offset too

    def _why_lost(self, timeout_s: float, *, late: bool) -> str:
        """Return how a call was lost, and where the function was if the worker could still write that down."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(timeout=EXIT_S)
        code = self._supervisor.returncode
        text = self._written().decode(errors="replace")
        place = re.search(rf'File "{re.escape(str(self._file))}", line (\d+)', text) if self._file else None
        where = f" ({self._file.name}, line {place[1]})" if self._file and place else ""
        if late or code is None:
            return f"gave no answer{f' within {timeout_s:g} s' if late else ''}{where}"
        lines = [line for line in text.split("\n") if line.strip()]
        last = f"; it last wrote: {quoted(lines[-1])}" if lines and not where else ""
        end = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"
        return f"{end}{where}{last}"


MALFORMED = "broke its worker's reply"


def _pipe(*, reads: bool) -> tuple[int, Any]:
    """Return the worker's end of a pipe, as a number, and ours, as a file that reads or writes."""
    reading, writing = os.pipe()
    if reads:
        return writing, os.fdopen(reading, "rb", 0)
    return reading, os.fdopen(writing, "wb", 0)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process to end, for a while."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=END_S)


def _close(file: Any) -> None:
    with contextlib.suppress(OSError):
        file.close()


def memory_limit() -> int:
    """Return the bytes that each process of user code may use."""
    return int(MEMORY_SHARE * machine_memory())


def quoted(text: str) -> str:
    """Return what user code wrote as a line that may be kept and shown."""
    return one_line(mask_url(text), MAX_SHOWN_CHARS)
