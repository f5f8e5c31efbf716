"""Calls of a person's function in its worker process: the whole batch, then row by row.

When a batch fails, its rows are tried one by one in a fresh worker, so that only those at fault are dropped; the cost
of that is bounded, in workers lost and in time.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from tinyrl.text import did_you_mean, redact, visible
from tinyrl.workers.loading import HERE, FunctionSource, defined_here
from tinyrl.workers.process import CallFailed, InProcess, LoadFailed, Worker, memory_limit, quoted

CALL_BYTES = 1 << 16  # of what one call prints
KEPT_LINES = 200  # of what is printed while there is nowhere to write it
LOAD_TIMEOUT_S = 120.0  # at least; imports do not count as the function's time
MAX_WORKERS_LOST = 8  # by rows of one batch; each costs a timeout or a start
ROWS_TIMEOUTS = 3  # trying the rows of one batch may take this many times timeout_s
MIN_ROW_TIMEOUT_S = 1.0
MAX_FAILED_SHARE = 0.2  # of the rows of a batch: more is not a nuisance but another task


class Printed:
    """The lines that one function prints, each after its name; without secrets, control characters named.

    State: the output of the current call, and `kept`, the last lines while there is nowhere to write them.
    """

    def __init__(self, name: str) -> None:
        self._name, self._data = name, b""
        self._write: Callable[[str], None] | None = None
        self.kept: deque[str] = deque(maxlen=KEPT_LINES)

    def send_to(self, write: Callable[[str], None]) -> None:
        """From now on hand lines to `write`, those that were kept first."""
        self._write = write
        if self.kept:
            write("".join(f"{line}\n" for line in self.kept))
            self.kept.clear()

    def add(self, data: bytes) -> None:
        """Take what was printed, whole lines or not."""
        self._data += data

    def end_call(self) -> None:
        """Hand over the lines of a call, up to CALL_BYTES of it."""
        data, left_out = self._data[:CALL_BYTES], len(self._data) - CALL_BYTES
        texts = [redact(raw.decode("utf-8", errors="replace")) for raw in data.splitlines()]
        lines = [f"{self._name}: {text if text.isprintable() else visible(text)}" for text in texts]
        lines += [f"{self._name}: [{left_out} more bytes left out]"] if left_out > 0 else []
        self._data = b""
        if self._write is None:
            self.kept.extend(lines)
        elif lines:
            self._write("".join(f"{line}\n" for line in lines))


@dataclass(frozen=True)
class RowFailure:
    """A row for which something went wrong, and what."""

    row: int
    reason: str


@dataclass
class Rows:
    """One value for each row of a call, None for those among the failures; `retried`: why rows were tried alone."""

    values: list[Any]
    failures: list[RowFailure] = field(default_factory=list)
    retried: str | None = None


class WorkerFunction:
    """A function of a person's file in a worker process, started when first needed. Close it, or use it in a `with`.

    sources: where it is, the first giving its name; setting: the field that names it, for messages; timeout_s: seconds
    a call may take; host: "module:function" of ours that makes one service of several functions, see worker.py.
    `printed` is what it prints; `read_as_text`: whether it has taken a completion that is a list of messages for text.
    """

    def __init__(
        self, sources: list[FunctionSource], *, setting: str, timeout_s: float, host: str | None = None, name: str = ""
    ) -> None:
        self._section, self._timeout_s = setting.partition(".")[0], timeout_s
        if not (math.isfinite(self._timeout_s) and self._timeout_s > 0):
            raise ValueError(f"{self._section}.timeout_s: must be a number of seconds above 0, not {self._timeout_s}.")
        self.name = name or sources[0].function
        self.printed, self.read_as_text = Printed(self.name), False
        self._sources, self._host, self._setting = sources, host, f"{setting} '{sources[0].use}'"
        self._worker: Worker | InProcess | None = None
        self._facts: dict[str, Any] | None = None  # what the function takes, as its worker found it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def facts(self) -> dict[str, Any]:
        """Load the function and return the facts of its worker: see worker.py."""
        self.start()
        assert self._facts is not None
        return self._facts

    def start(self) -> None:
        """Load the function now. ValueError if its code does not load, which before training the user can fix."""
        if self._facts is None:
            try:
                self._live_worker()
            except CallFailed as failure:
                raise ValueError(f"{self._setting} {failure}.") from failure

    def close(self) -> None:
        """End the worker; a later call starts another."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def rows(self, arguments: dict[str, list[Any]], num_rows: int, *, call: str = "score") -> Rows:
        """Call it with a list of `num_rows` values for each argument; `call`: which function of the host.

        ValueError: an argument that the function needs is missing, or one cannot be sent to it. Raises Interrupted soon
        after a stop was asked for.
        """
        assert all(len(values) == num_rows for values in arguments.values()), {k: len(v) for k, v in arguments.items()}
        if not num_rows:
            return Rows([])
        facts = self.facts
        for name in facts["required"]:
            if name not in arguments:
                raise ValueError(
                    f"{self._setting} takes a column '{name}', which the data does not have."
                    f"{did_you_mean(name, list(arguments))} There are: {', '.join(arguments)}."
                )
        if facts["parameters"] is not None:  # it has no **columns
            arguments = {name: arguments[name] for name in facts["parameters"] if name in arguments}
        try:
            return self._ask(arguments, num_rows, call=call, timeout_s=self._timeout_s)
        except CallFailed as failure:
            why = str(failure)
            rows_may_be_guilty = not isinstance(failure, LoadFailed) and not facts["whole_batch"]
        self.close()  # whatever state the failure left behind must not reach another row
        if not rows_may_be_guilty:
            return Rows([None] * num_rows, [RowFailure(row, f"`{self.name}` {why}") for row in range(num_rows)])

        rows, workers_lost = Rows([None] * num_rows, retried=why), 0
        row_timeout_s = min(self._timeout_s, max(MIN_ROW_TIMEOUT_S, self._timeout_s / MAX_WORKERS_LOST))
        deadline = time.monotonic() + ROWS_TIMEOUTS * self._timeout_s
        for row in range(num_rows):
            given_up = ""
            if workers_lost == MAX_WORKERS_LOST:
                given_up = f"{workers_lost} rows had hung or crashed by then"
            elif time.monotonic() > deadline:
                given_up = f"{ROWS_TIMEOUTS} x timeout_s had gone into the rows before"
            if given_up:
                reason = f"`{self.name}` was not tried again alone: {given_up}; with the whole batch it {why}"
                rows.failures.append(RowFailure(row, reason))
                continue
            try:
                one_row = {name: [values[row]] for name, values in arguments.items()}
                alone = self._ask(one_row, 1, call=call, timeout_s=row_timeout_s)
            except CallFailed as failure:
                workers_lost += failure.worker_lost
                rows.failures.append(RowFailure(row, f"`{self.name}` {failure}"))
                continue
            rows.values[row] = alone.values[0]
            rows.failures += [RowFailure(row, failure.reason) for failure in alone.failures]
        return rows

    def _ask(self, arguments: dict[str, list[Any]], num_rows: int, *, call: str, timeout_s: float) -> Rows:
        request = {"arguments": arguments, "num_rows": num_rows, "call": call}
        try:
            reply = self._live_worker().ask(request, timeout_s=timeout_s)
        except (TypeError, ValueError, RecursionError):
            for name, values in arguments.items():
                try:
                    json.dumps(values)
                except (TypeError, ValueError, RecursionError) as error:
                    raise ValueError(
                        f"Column '{name}' cannot be handed to a person's function: {error}. "
                        "Columns may hold text, numbers, true, false, null, and lists and objects of these."
                    ) from error
            raise
        finally:
            self.printed.end_call()
        self.read_as_text |= reply["read_as_text"]
        if len(reply["values"]) != num_rows:
            raise CallFailed(f"had {len(reply['values'])} values for {num_rows} rows", worker_lost=False)
        failures = [RowFailure(row, f"`{self.name}` {quoted(reason)}") for row, reason in reply["failures"]]
        return Rows(reply["values"], failures)

    def _live_worker(self) -> Worker | InProcess:
        if self._worker is None or not self._worker.alive:
            self.close()
            first = self._sources[0]
            here = defined_here(first.function) if first.module == HERE else None
            if here is not None:
                self._worker = InProcess(here)
            else:
                self._worker = Worker(first, memory_bytes=memory_limit(), on_output=self.printed.add)
            sources = [{"module": s.module, "file": str(s.file), "function": s.function} for s in self._sources]
            path = [*(str(source.folder) for source in self._sources), *sys.path]
            load = {"sources": sources, "host": self._host, "section": self._section, "sys_path": path}
            try:
                self._facts = self._worker.ask({"load": load}, timeout_s=max(self._timeout_s, LOAD_TIMEOUT_S))
                self.printed.end_call()
            except CallFailed as failure:
                self.close()
                raise LoadFailed(f"could not be loaded: it {failure}", worker_lost=True) from failure
        return self._worker
