"""Calls of a person's function in its worker process: the whole batch, then row by row.

When a batch fails, its rows are tried one by one in a fresh worker, so that only those at fault are dropped; the time
of that is bounded. Nothing here waits without a deadline. What the function prints goes into a file, so that no full
pipe stops it.
"""

from __future__ import annotations

import contextlib
import json
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
from dataclasses import dataclass, field
from typing import Any, Self

from tinyrl.errors import machine_memory
from tinyrl.runs.launched import VARIABLES
from tinyrl.runs.signals import check_stop
from tinyrl.text import did_you_mean, escape_control, mask_url, one_line
from tinyrl.workers import worker
from tinyrl.workers.loading import HERE, FunctionSource

POLL_S = 0.1
GRACE_S = 1.0  # the worker ends a late call itself and writes where it was; after this we do
EXIT_S = 0.5  # between the end of its pipe and its exit code
MOST_OUTPUT_BYTES = 64 << 20  # in the file of what a call prints; then it is emptied
CALL_BYTES = 1 << 16  # of what one call prints
KEPT_LINES = 200  # of what is printed while there is nowhere to write it
LOAD_TIMEOUT_S = 120.0  # at least; imports do not count as the function's time
ROW_TIMEOUT = 0.125  # of timeout_s, for a row alone
MIN_ROW_TIMEOUT_S = 1.0
ROWS_TIMEOUTS = 2  # trying the rows of one batch may take this many times timeout_s
MAX_FAILED_SHARE = 0.2  # of the rows of a batch: more is not a nuisance but another task
END_S = 2.0  # for an idle worker to leave by itself, and for a killed one to be gone
MEMORY_SHARE = 0.5  # of the machine's memory, which a process may use
MAX_SHOWN_CHARS = 300


class Printed:
    """The lines that one function prints, each after its name; without secrets, control characters named.

    kept: the last lines, while there is nowhere to write them.
    """

    def __init__(self, name: str) -> None:
        self._name, self._write = name, None
        self.kept: deque[str] = deque(maxlen=KEPT_LINES)

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


class CallFailed(Exception):
    """A call failed, with the reason."""


@dataclass(frozen=True)
class RowFailure:
    """A row for which something went wrong, and what."""

    row: int
    reason: str


@dataclass
class Rows:
    """One value for each row of a call, None for those among the failures; `slowest`: seconds of the slowest row, and
    which that is, where rows were timed.
    """

    values: list[Any]
    failures: list[RowFailure] = field(default_factory=list)
    slowest: tuple[float, int] | None = None


class WorkerFunction:
    """A function of a person's file in a worker process, started when first needed. Close it, or use it in a `with`.
    One that a notebook or script defined is called in this process: nothing limits its time or memory.

    sources: where it is, the first giving its name; setting: the field that names it, for messages; timeout_s: seconds
    a call may take; host: "module:function" of ours that makes one service of several functions, see worker.py.
    `printed` is what it prints; `retried`: why, the first time, the rows of a batch were tried one by one.
    """

    def __init__(
        self, sources: list[FunctionSource], *, setting: str, timeout_s: float, host: str | None = None, name: str = ""
    ) -> None:
        self.name = name or sources[0].function
        self.printed, self.retried = Printed(self.name), None
        self._sources, self._host, self._setting = sources, host, f"{setting} '{sources[0].use}'"
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | worker.Loaded | None = None
        self._facts: dict[str, Any] | None = None  # what the function takes, as its worker found it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> dict[str, Any]:
        """Load the function and return the facts of its worker: see worker.py. ValueError if its code does not load,
        which before training the user can fix.
        """
        if self._facts is None:
            try:
                self._load()
            except CallFailed as failure:
                raise ValueError(f"{self._setting} {failure}.") from failure
        assert self._facts is not None
        return self._facts

    def close(self, *, at_once: bool = False) -> None:
        """End the worker and whatever it started; an idle one leaves by itself. A later call starts another."""
        process, self._process = self._process, None
        if isinstance(process, subprocess.Popen):
            assert process.stdin
            assert process.stdout
            if not at_once:
                process.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=END_S)
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one stuck in the kernel must not hold us as well
                process.wait(timeout=END_S)
            worker.end_all(process.pid, self._mark)
            for file in (self._output, process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    file.close()

    def rows(self, arguments: dict[str, list[Any]], num_rows: int, *, call: str = "score") -> Rows:
        """Call it with a list of `num_rows` values for each argument; `call`: which function of the host.

        ValueError: an argument that the function needs is missing, or one cannot be sent to it. Raises Interrupted soon
        after a stop was asked for.
        """
        assert all(len(values) == num_rows for values in arguments.values()), {k: len(v) for k, v in arguments.items()}
        if not num_rows:
            return Rows([])
        facts = self.start()
        for name in facts["required"]:
            if name not in arguments:
                raise ValueError(
                    f"{self._setting} takes a column '{name}', which the data does not have."
                    f"{did_you_mean(name, list(arguments))} There are: {', '.join(arguments)}."
                )
        if facts["parameters"] is not None:  # it has no **columns
            arguments = {name: arguments[name] for name in facts["parameters"] if name in arguments}
        rows_may_be_guilty = False
        try:
            self._load()
            rows_may_be_guilty = not facts["whole_batch"]
            return self._ask(arguments, num_rows, call, self._timeout_s)
        except CallFailed as failure:
            why = str(failure)
        self.close()  # whatever state the failure left behind must not reach another row
        if not rows_may_be_guilty:
            return Rows([None] * num_rows, [RowFailure(row, f"`{self.name}` {why}") for row in range(num_rows)])

        rows, self.retried = Rows([None] * num_rows), self.retried or why
        row_timeout_s = min(self._timeout_s, max(MIN_ROW_TIMEOUT_S, ROW_TIMEOUT * self._timeout_s))
        deadline = time.monotonic() + ROWS_TIMEOUTS * self._timeout_s
        for row in range(num_rows):
            try:
                if time.monotonic() > deadline:
                    raise CallFailed(
                        f"was not tried again alone: {ROWS_TIMEOUTS} x timeout_s had gone into the others; with the "
                        f"whole batch it {why}"
                    )
                self._load()
                alone = self._ask({n: [v[row]] for n, v in arguments.items()}, 1, call, row_timeout_s)
            except CallFailed as failure:
                rows.failures.append(RowFailure(row, f"`{self.name}` {failure}"))
            else:
                rows.values[row] = alone.values[0]
                rows.failures += [RowFailure(row, failure.reason) for failure in alone.failures]
        return rows

    def _ask(self, arguments: dict[str, list[Any]], num_rows: int, call: str, timeout_s: float) -> Rows:
        """Call the function in its worker. Raises CallFailed, and ValueError for arguments that are not JSON."""
        for name, values in arguments.items():
            try:
                json.dumps(values)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(
                    f"Column '{name}' cannot be handed to a person's function: {error}. "
                    "Columns may hold text, numbers, true, false, null, and lists and objects of these."
                ) from error
        reply = self._reply({"arguments": arguments, "num_rows": num_rows, "call": call}, timeout_s)
        if len(reply["values"]) != num_rows:
            raise CallFailed(f"had {len(reply['values'])} values for {num_rows} rows")
        failures = [RowFailure(row, f"`{self.name}` {quoted(reason)}") for row, reason in reply["failures"]]
        return Rows(reply["values"], failures, slowest=reply["slowest"])

    def _load(self) -> None:
        """Start a worker and load the function into it, unless there is one."""
        if isinstance(self._process, subprocess.Popen) and self._process.poll() is not None:
            self.close(at_once=True)
        if self._process is not None:
            return
        if self._sources[0].module == HERE:
            self._process = worker.Loaded()
        else:
            self._output = tempfile.TemporaryFile()  # noqa: SIM115
            # Sets are in the same order in every run. Without a launcher's variables: people's code is none of the
            # processes that it started, and a library there would wait for the others.
            environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
            self._mark = secrets.token_hex(8)
            self._process = subprocess.Popen(
                # -P keeps our folder off sys.path, where loading.py would hide the user's
                [sys.executable, "-P", worker.__file__, str(os.getpid()), str(memory_limit())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._output,
                bufsize=0,
                env=environment | {"PYTHONHASHSEED": "0", worker.MARK: self._mark},
                start_new_session=True,  # Ctrl-C is ours to handle; a function may kill its group
            )
        sources = [{"module": s.module, "file": str(s.file), "function": s.function} for s in self._sources]
        path = [*(str(source.folder) for source in self._sources), *sys.path]
        load = {"sources": sources, "host": self._host, "sys_path": path}
        try:
            self._facts = self._reply({"load": load}, max(self._timeout_s, LOAD_TIMEOUT_S))
        except CallFailed as failure:
            self.close()
            raise CallFailed(f"could not be loaded: it {failure}") from failure

    def _reply(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for its reply. Raises CallFailed, and Interrupted once the run is to stop."""
        line, data = b"", json.dumps({**request, "timeout_s": timeout_s})
        if isinstance(self._process, worker.Loaded):
            check_stop()
            line = json.dumps(self._process.answer(json.loads(data)))
        else:
            try:
                line = self._exchange(data.encode("ascii") + b"\n", timeout_s)
            finally:
                self.printed.add(self._written())
                self._empty_output()
                if not line:  # the worker's next reply would be to the wrong request
                    self.close(at_once=True)
        reply = json.loads(line)
        if "error" in reply:
            raise CallFailed(said(reply))
        return reply

    def _exchange(self, data: bytes, timeout_s: float) -> bytes:
        """Send a line and return the reply's. Raises CallFailed where the worker ended or was too late."""
        process, line, waiting = self._process, bytearray(), select.poll()
        assert isinstance(process, subprocess.Popen)
        requests, replies, started = process.stdin, process.stdout, time.monotonic()
        assert requests
        assert replies

        def send(data: bytes) -> None:
            with contextlib.suppress(OSError, ValueError):  # it is gone or closed: the end of its replies tells
                while data:
                    data = data[requests.write(data) or 0 :]

        threading.Thread(target=send, args=(data,), daemon=True).start()  # the pipe may be full
        waiting.register(replies, select.POLLIN)
        while not line.endswith(b"\n"):
            check_stop()
            if os.fstat(self._output.fileno()).st_size > MOST_OUTPUT_BYTES:
                self._empty_output()
            if waiting.poll(1000 * POLL_S):
                received = os.read(replies.fileno(), 1 << 20)
                line += received
                lost = not received
            else:  # a fork of it may hold the pipe open
                lost = time.monotonic() > started + timeout_s + GRACE_S or process.poll() is not None
            if lost:
                raise CallFailed(self._why_lost(process, timeout_s, late=time.monotonic() >= started + timeout_s))
        return bytes(line)

    def _written(self) -> bytes:
        """Return what the function has printed in this call."""
        return os.pread(self._output.fileno(), os.fstat(self._output.fileno()).st_size, 0)

    def _empty_output(self) -> None:
        os.ftruncate(self._output.fileno(), 0)
        os.lseek(self._output.fileno(), 0, os.SEEK_SET)  # the worker's offset too

    def _why_lost(self, process: subprocess.Popen[bytes], timeout_s: float, *, late: bool) -> str:
        """Return how a call was lost, and where the function was if the worker could still write that down."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=EXIT_S)
        file, text, code = self._sources[0].file, self._written().decode(errors="replace"), process.returncode
        place = re.search(rf'File "{re.escape(str(file))}", line (\d+)', text) if file else None
        where = f" ({file.name}, line {place[1]})" if file and place else ""
        if late or code is None:
            return f"gave no answer{f' within {timeout_s:g} s' if late else ''}{where}"
        lines = [line for line in text.split("\n") if line.strip()]
        last = f"; it last wrote: {quoted(lines[-1])}" if lines and not where else ""
        end = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"
        return f"{end}{where}{last}"


def memory_limit() -> int:
    """Return the bytes that each process of people's code may use."""
    return int(MEMORY_SHARE * machine_memory())


def said(reply: dict[str, Any]) -> str:
    """Return what a function raised, by the worker's reply, as one line, and where."""
    return f"{quoted(reply['error'])}{reply['at']}"


def quoted(text: str) -> str:
    """Return what people's code wrote as a line that may be kept and shown."""
    return one_line(mask_url(text), MAX_SHOWN_CHARS)
