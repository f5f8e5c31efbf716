"""Our end of a worker process: start it under its supervisor, send requests, and end it with all it started.

Nothing here waits without a deadline. What the function prints goes into a file, so that no full pipe stops it.
"""

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tinyrl.runs.launched import VARIABLES
from tinyrl.runs.signals import check_stop
from tinyrl.text import one_line, redact
from tinyrl.workers import worker
from tinyrl.workers.loading import FunctionSource

POLL_S = 0.1
GRACE_S = 1.0  # the worker ends a late call itself and writes where it was; after this we do
EXIT_S = 0.5  # between the end of its pipe and its exit code
END_S = 2 * worker.PATIENCE_S  # for a worker to leave by itself, and its supervisor to end all it started
MEMORY_SHARE = 0.5  # of the machine's memory, which a reward may use by default
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container
MOST_OUTPUT_BYTES = 64 << 20  # in the file of what a call prints; then it is emptied
MAX_SHOWN_CHARS = 300


class CallFailed(Exception):
    """A call gave nothing; the text says why. `worker_lost`: it hung or died, and has to be started again."""

    def __init__(self, reason: str, *, worker_lost: bool) -> None:
        super().__init__(reason)
        self.worker_lost = worker_lost


class LoadFailed(CallFailed):
    """The function's file could not be imported, or not in time."""


class Worker:
    """One worker process with one person's function. It can be used until a call is lost; then start another.

    `memory_bytes` is what each process of it may use. `on_output` is given what the function printed in each call.
    """

    def __init__(self, source: FunctionSource, *, memory_bytes: int, on_output: Callable[[bytes], None]) -> None:
        self._source, self._on_output = source, on_output
        self._count, self._killed = 0, False
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        fcntl.fcntl(self._printed, fcntl.F_SETFL, os.O_APPEND)  # it is emptied after each call
        # Sets are in the same order in every run. Without a launcher's variables: people's code is none of the
        # processes that it started, and a library there would wait for the others.
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        self._process = subprocess.Popen(
            supervised([], memory_bytes=memory_bytes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            bufsize=0,
            env=environment | {"PYTHONHASHSEED": "0"},
            start_new_session=True,  # Ctrl-C is ours to handle
        )

    @property
    def alive(self) -> bool:
        """False once a call was lost or the process is gone."""
        return not self._killed and self._process.poll() is None

    def ask(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for its reply. Raises CallFailed, and Interrupted once the run is to stop."""
        started, self._count, reply = time.monotonic(), self._count + 1, dict[str, Any]()
        data = json.dumps({**request, "id": self._count, "timeout_s": timeout_s}).encode("ascii") + b"\n"
        try:
            line = self._exchange(data, started + timeout_s + GRACE_S)
            if not line:
                late = time.monotonic() - started >= timeout_s
                raise CallFailed(self._why_lost(timeout_s if late else None), worker_lost=True)
            try:
                found = json.loads(line)
                if found["id"] != self._count:
                    raise KeyError
            except (ValueError, RecursionError, AttributeError, KeyError, TypeError):  # people's code has written there
                raise CallFailed("broke the replies of its worker process", worker_lost=True) from None
            reply = found
        finally:
            self._on_output(self._output())
            os.ftruncate(self._printed.fileno(), 0)
            if not reply:  # the worker's next reply would be to the wrong request
                self.kill()
        return succeeded(reply)

    def close(self) -> None:
        """End the process and whatever it started; one that is idle leaves by itself."""
        if not self._killed and self._process.stdin:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=END_S)
        self.kill()

    def kill(self) -> None:
        """End the process and those it started, at once."""
        if not self._killed:
            self._killed = True
            end_supervised(self._process)
            for file in (self._printed, self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    assert file
                    file.close()

    def _exchange(self, data: bytes, deadline: float) -> bytes:
        """Send a line and return the reply's; b"" where the worker ended or was too late."""
        requests, replies, reply = self._process.stdin, self._process.stdout, bytearray()
        assert requests
        assert replies

        def send(data: bytes) -> None:
            with contextlib.suppress(OSError, ValueError):  # it is gone or closed: the end of its replies tells
                while data:
                    data = data[requests.write(data) or 0 :]

        threading.Thread(target=send, args=(data,), daemon=True).start()  # the pipe may be full
        while not reply.endswith(b"\n"):
            check_stop()
            if os.fstat(self._printed.fileno()).st_size > MOST_OUTPUT_BYTES:
                os.ftruncate(self._printed.fileno(), 0)
            if select.select([replies], [], [], POLL_S)[0]:
                received = os.read(replies.fileno(), 1 << 20)
                reply += received
                if not received:
                    return b""
            elif time.monotonic() > deadline:
                return b""
        return bytes(reply)

    def _output(self) -> bytes:
        """Return what the function has printed in this call."""
        return os.pread(self._printed.fileno(), os.fstat(self._printed.fileno()).st_size, 0)

    def _why_lost(self, timeout_s: float | None) -> str:
        """Return how a call was lost, and where the function was if the worker could still write that down."""
        if timeout_s is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=EXIT_S)
        file, text = self._source.file, self._output().decode("utf-8", errors="replace")
        place = re.search(rf'File "{re.escape(str(file))}", line (\d+)', text) if file else None
        where = f" ({file.name}, line {place[1]})" if file and place else ""
        if timeout_s is not None:
            return f"gave no answer within {timeout_s:g} s{where}"
        if self._process.returncode is None:
            return f"broke off its connection to us{where}"
        lines = [line for line in text.split("\n") if line.strip()]
        last = f"; it last wrote: {quoted(lines[-1])}" if lines and not where else ""
        return f"{ending(self._process.returncode)}{where}{last}"


class InProcess:
    """A function that a notebook or script defined, called in this process: nothing limits its time or memory.

    It has the interface of `Worker`.
    """

    alive = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._loaded = function, worker.Loaded()

    def ask(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Answer a request. Raises CallFailed, and Interrupted once the run is to stop."""
        check_stop()
        if "load" in request:
            file = getattr(getattr(self._function, "__code__", None), "co_filename", None)
            request = {"load": {**request["load"], "sources": [{"file": file}]}}
        return succeeded(json.loads(json.dumps(self._loaded.answer(json.loads(json.dumps(request)), [self._function]))))

    def close(self) -> None:
        """Do nothing: the function's state is the notebook's."""


def memory_limit() -> int:
    """Return the bytes that each process of a reward may use: half of what the machine or its container has."""
    total = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
        total = min(total, int(CGROUP_LIMIT.read_text()))
    return int(total * MEMORY_SHARE)


def supervised(command: list[str], *, memory_bytes: int) -> list[str]:
    """Return the command line of a supervisor (worker.py) that runs a command, or without one answers requests."""
    # -P keeps our folder off sys.path, where loading.py would hide the user's
    return [sys.executable, "-P", worker.__file__, str(os.getpid()), str(memory_bytes), *command]


def end_supervised(process: subprocess.Popen[bytes]) -> None:
    """End a supervisor with all that its command has started."""
    process.terminate()
    try:
        process.wait(timeout=END_S)
    except subprocess.TimeoutExpired:  # a process stuck in the kernel must not hold us as well
        process.kill()


def ending(code: int) -> str:
    """Return how a supervised process ended, by its supervisor's exit code."""
    signals = {128 + each.value: each.name for each in signal.Signals}
    return f"died of {signals[code]}" if code in signals else f"ended its process with exit code {code}"


def succeeded(reply: dict[str, Any]) -> dict[str, Any]:
    """Return a worker's reply. Raises CallFailed if it says that the function raised."""
    if "error" in reply:
        raise CallFailed(said(reply), worker_lost=False)
    return reply


def said(reply: dict[str, Any]) -> str:
    """Return what a function raised, by the worker's reply, as one line, and where."""
    return f"{quoted(reply['error'])}{reply['at']}"


def quoted(text: str) -> str:
    """Return what people's code wrote as a line that may be kept and shown."""
    return one_line(redact(text), MAX_SHOWN_CHARS)
