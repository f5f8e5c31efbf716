"""Calls of a user function in its worker process: the whole batch, then row by row.

When a batch fails, its rows are tried one by one in a fresh worker, so that only those at fault are dropped; the time
of that is bounded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tinyrl.process.errors import CodeChanged
from tinyrl.text import did_you_mean
from tinyrl.workers import protocol
from tinyrl.workers.loading import FunctionSource
from tinyrl.workers.process import MALFORMED, CallFailed, HereProcess, Printed, WorkerProcess, quoted
from tinyrl.workers.values import RowFailure, RowResults, all_failed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LOAD_TIMEOUT_S = 120.0  # at least; imports do not count as the function's time
ROW_TIMEOUT = 0.125  # of timeout_s, for a row alone
MIN_ROW_TIMEOUT_S = 1.0
ROWS_TIMEOUTS = 2  # trying the rows of one batch may take this many times timeout_s
HostFacts = TypeVar("HostFacts", bound="DataclassInstance")


class WorkerFunction:
    """A function of a user's file in a worker process, started when first needed. Close it, or use it in a `with`.
    One that a notebook or script defined is called in this process: nothing limits its time or memory.

    sources: where it is, the first giving its name; setting: the field that names it, for messages; timeout_s: seconds
    a call may take; host: "module:function" of ours that makes one service of several functions, see worker.py.
    Another worker loads the same code: CodeChanged is raised where a file of it was edited after the first one loaded.

    `code` has the files that its workers have imported so far; `printed` is what it prints; `retried`: why, the first
    time, the rows of a batch were tried one by one.
    """

    def __init__(
        self, sources: list[FunctionSource], *, setting: str, timeout_s: float, host: str | None = None, name: str = ""
    ) -> None:
        self.name = name or sources[0].function
        self.printed = Printed(self.name)
        self.retried: str | None = None
        self.sources = sources
        self.code = sources[0].code  # of all of them, which one process has loaded
        self._host = host
        self._setting = f"{setting} '{sources[0].use}'"
        self._timeout_s = timeout_s
        self._process: WorkerProcess | HereProcess | None = None
        self._facts: protocol.ServiceFacts | None = None  # what the function takes, as its worker found it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> protocol.ServiceFacts:
        """Load the function and return the facts of its service. ValueError if its code does not load, which before
        training the user can fix.
        """
        if self._facts is None:
            try:
                self._load()
            except CallFailed as failure:
                raise ValueError(f"{self._setting} {failure}.") from failure
        assert self._facts is not None
        return self._facts

    def host_facts(self, kind: type[HostFacts]) -> HostFacts:
        """Load the function and return the record of its host. Raises ValueError if its code does not load, or answers
        with other fields.
        """
        found = self.start().of_host
        if found.keys() != {each.name for each in fields(kind)}:
            raise ValueError(f"{self._setting} could not be loaded: it {MALFORMED}.")
        return kind(**found)

    def close(self, *, at_once: bool = False) -> None:
        """End the worker and whatever it started; an idle one leaves by itself. A later call starts another."""
        process = self._process
        self._process = None
        if process is not None:
            process.close(at_once=at_once)

    def rows(
        self,
        arguments: dict[str, list[Any]],
        num_rows: int,
        *,
        is_valid: Callable[[Any], bool],
        call: str = "score",
        timeout_s: float | None = None,
        shared: Mapping[str, Any] | None = None,
    ) -> RowResults:
        """Call it with a list of `num_rows` values for each argument.

        is_valid    whether a value is one that the call gives: whoever holds the pipe may have written anything
        call        which function of the host
        timeout_s   in place of the function's own
        shared      values of all rows together, for a function that names them; an argument of the same name wins

        ValueError: an argument that the function needs is missing, or one cannot be sent to it. Raises Interrupted soon
        after a stop was asked for, and CodeChanged, which is one.
        """
        assert all(len(values) == num_rows for values in arguments.values()), {k: len(v) for k, v in arguments.items()}
        if not num_rows:
            return RowResults([])
        facts = self.start()
        shared = {n: value for n, value in (shared or {}).items() if n in facts.asks and n not in arguments}
        for name in facts.required:
            if name not in arguments and name not in shared:
                raise ValueError(
                    f"{self._setting} takes a column '{name}', which the data does not have."
                    f"{did_you_mean(name, list(arguments))} There are: {', '.join(arguments)}."
                )
        if facts.parameters is not None:  # it has no **columns
            arguments = {name: arguments[name] for name in facts.parameters if name in arguments}
        ask = partial(self._ask, call=call, is_valid=is_valid, shared=shared)
        timeout_s = timeout_s or self._timeout_s
        rows_may_be_guilty = False
        try:
            self._load()
            rows_may_be_guilty = call not in facts.whole
            return ask(arguments, num_rows, timeout_s=timeout_s)
        except CallFailed as failure:
            why = str(failure)
        self.close()  # whatever state the failure left behind must not reach another row
        if not rows_may_be_guilty:
            return all_failed(num_rows, f"`{self.name}` {why}")
        self.retried = self.retried or why
        return self._one_by_one(ask, arguments, num_rows, timeout_s=timeout_s, why=why)

    def _one_by_one(
        self,
        ask: Callable[..., RowResults],
        arguments: dict[str, list[Any]],
        num_rows: int,
        *,
        timeout_s: float,
        why: str,
    ) -> RowResults:
        """Try each row alone, for a limited time; `why`: how the whole batch failed."""
        results = RowResults([None] * num_rows)
        comments = [""] * num_rows
        row_timeout_s = min(timeout_s, max(MIN_ROW_TIMEOUT_S, ROW_TIMEOUT * timeout_s))
        deadline = time.monotonic() + ROWS_TIMEOUTS * timeout_s
        for row in range(num_rows):
            try:
                if time.monotonic() > deadline:
                    raise CallFailed(
                        f"was not tried again alone, as {ROWS_TIMEOUTS} x timeout_s had gone into other rows: with the "
                        f"whole batch it {why}"
                    )
                self._load()
                alone = ask({n: [v[row]] for n, v in arguments.items()}, 1, timeout_s=row_timeout_s)
            except CallFailed as failure:
                results.failures.append(RowFailure(row, f"`{self.name}` {failure}"))
                continue
            results.values[row] = alone.values[0]
            results.failures += [RowFailure(row, failure.reason) for failure in alone.failures]
            comments[row] = alone.comments[0] if alone.comments else ""
        results.comments = comments if any(comments) else []
        return results

    def _ask(
        self,
        arguments: dict[str, list[Any]],
        num_rows: int,
        *,
        call: str,
        is_valid: Callable[[Any], bool],
        shared: dict[str, Any],
        timeout_s: float,
    ) -> RowResults:
        """Call the function. Raises CallFailed, and ValueError for arguments that are not JSON."""
        request = {"arguments": arguments, "shared": shared, "num_rows": num_rows, "call": call}
        try:
            reply = self._reply(request, timeout_s)
        except (TypeError, ValueError, RecursionError):
            _check_columns(arguments)
            raise
        try:
            results = protocol.results_in(reply, num_rows)
            if not all(map(is_valid, results.values)):
                raise protocol.Malformed
        except protocol.Malformed:
            self.close(at_once=True)
            raise CallFailed(MALFORMED) from None
        reasons = [(failure.row, quoted(failure.reason)) for failure in results.failures]
        results.failures = [RowFailure(row, f"`{self.name}` {reason}") for row, reason in reasons]
        return results

    def _load(self) -> None:
        """Start a worker and load the function into it, unless there is one."""
        if self._process is not None and not self._process.alive:
            self.close(at_once=True)
        if self._process is not None:
            return
        self._check_unedited(self.code.edited_file())
        first = self.sources[0]
        sources = [{"module": s.module, "file": str(s.file), "function": s.function} for s in self.sources]
        if first.here is None:
            self._process = WorkerProcess(first.file, self.printed)
        else:
            self._process = HereProcess()
            sources = [{**of, "here": source.here} for of, source in zip(sources, self.sources, strict=True)]
        path = [*(str(source.folder) for source in self.sources), *sys.path]
        load = {"sources": sources, "host": self._host, "sys_path": path}
        try:
            reply = self._reply({"load": load}, max(self._timeout_s, LOAD_TIMEOUT_S))
            self._facts = protocol.facts_in(reply)
        except (CallFailed, protocol.Malformed) as failure:
            self.close()
            why = MALFORMED if isinstance(failure, protocol.Malformed) else failure
            raise CallFailed(f"could not be loaded: it {why}") from failure

    def _check_unedited(self, edited: Path | None) -> None:
        """Raise CodeChanged for a file that is not any more what the first worker loaded."""
        if edited is not None:
            self.close(at_once=True)
            raise CodeChanged(
                f"{self._setting}: {edited} was edited after it was loaded, and has to be loaded again. "
                "Put it back, or begin again; a run goes on with the new code by --allow-config-change at a resume"
            )

    def _reply(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and wait for its reply. Raises CallFailed, CodeChanged where the worker has imported other
        code than an earlier one, and Interrupted once the run is to stop.
        """
        assert self._process is not None
        reply = self._process.ask(request, timeout_s=timeout_s)
        try:
            imported = protocol.imported_in(reply)
        except protocol.Malformed:
            self.close(at_once=True)
            raise CallFailed(MALFORMED) from None
        self._check_unedited(self.code.add(imported))
        if "error" in reply:
            at = quoted(str(reply.get("at", "")))
            raise CallFailed(f"{quoted(str(reply['error']))}{f' ({at})' if at else ''}")
        return reply


def _check_columns(arguments: dict[str, list[Any]]) -> None:
    """Raise ValueError for a column that is not JSON."""
    for name, values in arguments.items():
        try:
            protocol.encode({name: values})
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"Column '{name}' cannot be handed to a person's function: {error}. "
                "Columns may hold text, numbers, true, false, null, and lists and objects of these."
            ) from error
