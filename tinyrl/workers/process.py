"""Our end of a worker process: start it with its supervisor, ask it, and end it with all it started.

Nothing here waits without a deadline, and nothing waits on a pipe that may be full: request, reply and what the
function prints move in one loop, which also checks whether the run is to stop.
"""

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tinyrl.runs.launched import VARIABLES
from tinyrl.runs.signals import check_stop
from tinyrl.text import one_line, redact
from tinyrl.workers import supervisor, worker
from tinyrl.workers.loading import FunctionSource

POLL_S = 0.1
GRACE_S = 1.0  # the worker ends a late call itself and says where it was; after this we do
CLOSE_S = 1.0  # for a worker to leave by itself
EXIT_S = 0.5  # between the end of its pipe and its exit code
END_S = 2 * supervisor.PATIENCE_S  # for its supervisor to end all it started
MEMORY_SHARE = 0.5  # of the machine's memory, which a reward may use where nothing else is said
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container
KEPT_OUTPUT_BYTES = 8192
MAX_SAID_CHARS = 300


class CallFailed(Exception):
    """A call gave nothing; the text says why. `worker_lost`: it hung or died, and had to be started again."""

    def __init__(self, reason: str, *, worker_lost: bool) -> None:
        super().__init__(reason)
        self.worker_lost = worker_lost


class LoadFailed(CallFailed):
    """The function's file could not be imported, or not in time."""


class Worker:
    """One worker process with one person's function. It can be used until a call is lost; then start another.

    `memory_bytes` is what each process of it may use. `on_output` is given what the function prints, as it comes.
    """

    def __init__(self, source: FunctionSource, *, memory_bytes: int, on_output: Callable[[bytes], None]) -> None:
        self._source = source
        self._on_output = on_output
        self._killed = False
        self._output = bytearray()
        self._process = subprocess.Popen(
            # -P keeps our folder off sys.path, where loading.py would hide the user's
            supervised([sys.executable, "-P", worker.__file__, str(os.getpid())], memory_bytes=memory_bytes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        self._requests, self._replies, self._prints = self._process.stdin, self._process.stdout, self._process.stderr
        for pipe in (self._requests, self._replies, self._prints):
            os.set_blocking(pipe.fileno(), False)

    @property
    def alive(self) -> bool:
        """False once a call was lost or the process is gone."""
        return not self._killed and self._process.poll() is None

    def ask(self, request: str, *, timeout_s: float) -> dict[str, Any]:
        """Send a JSON request and wait for its reply. Raises CallFailed, and Interrupted once the run is to stop."""
        started = time.monotonic()
        self._output.clear()
        lost = True
        try:
            reply = json.loads(self._exchange(request, started + timeout_s + GRACE_S))
            self._take_output()
            if not _is_reply(reply):
                raise CallFailed("broke what its worker process answers with", worker_lost=True)
            lost = False
        except (EOFError, ValueError, RecursionError) as error:  # no line, or one that is no JSON
            late = time.monotonic() - started >= timeout_s
            hung = f"gave no answer within {timeout_s:g} s"
            raise CallFailed(f"{hung}{self._where()}" if late else self._died(), worker_lost=True) from error
        finally:  # after an exception the worker's next reply would be to the wrong request
            if lost:
                self.kill()
        if "error" in reply:
            raise CallFailed(said(reply), worker_lost=False)
        return reply

    def close(self) -> None:
        """Let the process leave by itself for a moment, then end it and whatever it started."""
        if not self._killed:
            self._requests.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End the process and those it started, at once."""
        if self._killed:  # its number may be another process's by now
            return
        self._killed = True
        end_supervised(self._process)
        for pipe in (self._requests, self._replies, self._prints):
            pipe.close()

    def _exchange(self, request: str, deadline: float) -> bytes:
        """The reply's line. EOFError: there will be none."""
        to_send, reply = memoryview(request.encode("ascii") + b"\n"), bytearray()
        with selectors.DefaultSelector() as pipes:
            pipes.register(self._requests, selectors.EVENT_WRITE)
            pipes.register(self._replies, selectors.EVENT_READ)
            pipes.register(self._prints, selectors.EVENT_READ)
            while not reply.endswith(b"\n"):
                check_stop()
                # The pipe's end alone would not do: a process that the function forked may hold it open.
                gone = self._process.poll() is not None
                ready = {key.fileobj for key, _ in pipes.select(0 if gone else POLL_S)}
                if self._requests in ready:
                    try:
                        to_send = to_send[os.write(self._requests.fileno(), to_send[: 1 << 16]) :]
                    except BlockingIOError:
                        pass
                    except BrokenPipeError:  # it is gone: the reply's end says so next
                        to_send = to_send[:0]
                    if not to_send:
                        pipes.unregister(self._requests)
                if self._prints in ready and not self._keep_output():
                    pipes.unregister(self._prints)
                received = os.read(self._replies.fileno(), 1 << 20) if self._replies in ready else None
                if received == b"" or (gone and received is None) or time.monotonic() > deadline:
                    raise EOFError
                reply += received or b""
        return bytes(reply)

    def _keep_output(self) -> bool:
        """Take what the function printed and keep the end of it; False when no more can come."""
        with contextlib.suppress(BlockingIOError):
            printed = os.read(self._prints.fileno(), 1 << 16)
            self._on_output(printed)
            self._output += printed
            del self._output[:-KEPT_OUTPUT_BYTES]
            return bool(printed)
        return False

    def _take_output(self) -> None:
        """Take what is left in the pipe; bounded, for something the function started may go on printing."""
        for _ in range(64):
            if not self._keep_output():
                break

    def _died(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=EXIT_S)
        code = self._process.returncode
        if code is None:
            how = "broke off its connection to us"
        elif code < 0:
            how = f"died of {signal.Signals(-code).name}"
        else:
            how = f"ended its process with exit code {code}"
        where = self._where()
        lines = self._output.decode("utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"{how}{where}" if where or not last else f"{how}; it last wrote: {quoted(last)}"

    def _where(self) -> str:
        """' (file.py, line 3)' if the worker could still write down where the function was."""
        self._take_output()
        file = self._source.file
        if file is None:
            return ""
        place = re.search(rf'File "{re.escape(str(file))}", line (\d+)', self._output.decode("utf-8", errors="replace"))
        return f" ({file.name}, line {place[1]})" if place else ""


class InProcess:
    """A function that a notebook or script defined, called in this process: nothing limits its time or memory.

    It has the interface of `Worker`.
    """

    alive = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._loaded = function, worker.Loaded()

    def ask(self, request: str, *, timeout_s: float) -> dict[str, Any]:
        """Answer a request. Raises CallFailed, and Interrupted once the run is to stop."""
        check_stop()
        asked = json.loads(request)
        if "load" in asked:
            code = getattr(self._function, "__code__", None)
            asked["load"]["sources"][0]["file"] = getattr(code, "co_filename", None)
            reply = self._loaded.load(asked["load"], [self._function])
        else:
            reply = json.loads(json.dumps(self._loaded.answer(asked)))
        if "error" in reply:
            raise CallFailed(said(reply), worker_lost=False)
        return reply

    def close(self) -> None:
        """Do nothing: the function's state is the notebook's."""


def memory_limit() -> int:
    """Bytes that each process of a reward may use: half of what the machine or its container has."""
    total = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
        total = min(total, int(CGROUP_LIMIT.read_text()))
    return int(total * MEMORY_SHARE)


def _environment() -> dict[str, str]:
    """Ours, with sets in the same order in every run, and without what a launcher said: people's code is none of the
    processes that it started, and a library there would wait for the others.
    """
    return {name: value for name, value in os.environ.items() if name not in VARIABLES} | {"PYTHONHASHSEED": "0"}


def supervised(command: list[str], *, memory_bytes: int) -> list[str]:
    """The command line of a supervisor (supervisor.py) that runs a command."""
    return [sys.executable, "-P", supervisor.__file__, str(os.getpid()), str(memory_bytes), *command]


def end_supervised(process: subprocess.Popen[bytes]) -> None:
    """End a supervisor with all that its command has started."""
    process.terminate()
    try:
        process.wait(timeout=END_S)
    except subprocess.TimeoutExpired:  # a process stuck in the kernel must not hold us as well
        process.kill()


def _is_reply(reply: Any) -> bool:
    """Whether it is one of the three that worker.py describes: people's code may have written into the pipe."""
    if not isinstance(reply, dict):
        return False
    if "error" in reply:
        return isinstance(reply["error"], str) and isinstance(reply.get("at"), str)
    if "required" in reply:
        return isinstance(reply["required"], list) and "whole_batch" in reply and "parameters" in reply
    failures = reply.get("failures")
    return (
        isinstance(reply.get("values"), list)
        and "read_as_text" in reply
        and isinstance(failures, list)
        and all(isinstance(each, list) and list(map(type, each)) == [int, str] for each in failures)
    )


def said(reply: dict[str, Any]) -> str:
    """What a worker says that a function raised, as one line, and where."""
    return f"{quoted(reply['error'])}{reply['at']}"


def quoted(text: str) -> str:
    """What people's code said, as a line that may be kept and shown."""
    return one_line(redact(text), MAX_SAID_CHARS)
