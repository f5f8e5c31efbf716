"""The worker process of user code: it loads functions and answers calls of them (protocol.py).

No process may use more than its limit of memory of its own (RLIMIT_DATA: without files and reserved address space).
What the code prints goes to stdout and stderr, which the run reads; requests and replies have pipes of their own. The
worker imports only the standard library.

A host, "module:function" of tinyrl's own, makes a `Service` of the loaded objects; without one the object is a reward
function. In the run a notebook's function is answered for by the same code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import importlib.util
import inspect
import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tinyrl.workers import protocol
from tinyrl.workers.imports import ImportLog
from tinyrl.workers.progress import TRAINER_STATE, revived
from tinyrl.workers.protocol import ServiceFacts
from tinyrl.workers.values import RowResults, check_scores, message_of

MAX_ERROR_CHARS = 2000  # of an exception's message, which is cut to a line where it is shown


@dataclass
class _Process:
    is_worker: bool = False


_this_process = _Process()


def serve(requests: int, replies: int, *, memory_bytes: int) -> None:
    """Answer the requests of one pipe into the other until the run closes it."""
    import resource  # Windows has none

    _this_process.is_worker = True
    with contextlib.suppress(ValueError, OSError):  # above the limit that holds already
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    for pipe in (requests, replies):
        os.set_inheritable(pipe, False)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True)  # so that a crash loses no line
    last_words = os.dup(2)  # the function may close its own
    faulthandler.enable(last_words)
    sys.argv[:] = [__file__]
    me = os.getpid()
    loaded = Loaded()
    imports = ImportLog()
    with os.fdopen(requests, "rb") as lines, os.fdopen(replies, "wb") as out:
        for line in lines:
            request = protocol.decode(line)
            # Works in C, so also while the function holds the interpreter lock (a regular expression that backtracks),
            # and when nobody is left to kill us. It writes down where the function was.
            faulthandler.dump_traceback_later(request["timeout_s"], exit=True, file=last_words)
            if "load" in request:
                sys.path[:] = dict.fromkeys([*request["load"]["sys_path"], *sys.path])
            answer = loaded.answer(request)
            imported = imports.new(in_call="load" not in request)
            reply = protocol.encode({"id": request["id"], **answer, "imported": imported})
            if os.getpid() != me:  # a fork that has come back from the function
                os._exit(0)
            faulthandler.cancel_dump_traceback_later()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(AttributeError, OSError, ValueError):  # the function may have closed it
                    stream.flush()
            out.write(reply)
            out.flush()


class Service(NamedTuple):
    """Functions of (arguments by name, number of rows) by name, and facts about them for the run."""

    calls: dict[str, Callable[[dict[str, list[Any]], int], RowResults]]
    facts: ServiceFacts


def make_service(objects: list[Any], host: str | None) -> Service:
    """Make the service of loaded objects, by a host or of a reward function."""
    if host is None:
        return reward(objects)
    module, _, name = host.partition(":")
    return getattr(importlib.import_module(module), name)(objects)


class Loaded:
    """User objects and the service made of them; it answers the requests of protocol.py, but for their id."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self._file: str | None = None  # of the function whose line is named

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Import the sources and make a service of them, or call it."""
        try:
            if "load" in request:
                return {"facts": self._load(request["load"]["sources"], request["load"]["host"])}
            assert self._service is not None
            call = self._service.calls[request["call"]]
            arguments = {**request["arguments"], **revived(request["shared"])}
            return protocol.encode_results(call(arguments, request["num_rows"]))
        except BaseException as error:  # user code may raise anything, which is our answer
            if is_ours(error):
                raise
            return self._raised(error)

    def _raised(self, error: BaseException) -> dict[str, Any]:
        steps = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in steps if frame.f_code.co_filename == self._file]
        where = f"{os.path.basename(self._file)}, line {lines[-1]}" if self._file and lines else ""
        text = f"{type(error).__name__}: {message_of(error)[:MAX_ERROR_CHARS]}"
        if isinstance(error, MemoryError):
            import resource

            limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
            text += f" (its process may use {limit / 1e9:.3g} GB)" if limit > 0 else ""
        return {"error": f"raised {text}", "at": where}

    def _load(self, sources: list[dict[str, Any]], host: str | None) -> dict[str, Any]:
        found = [self._find(**source) for source in reversed(sources)][::-1]  # the first is the one that is named
        self._service = make_service(found, host)
        return asdict(self._service.facts)

    def _find(self, module: str | None, file: str, function: str, here: Any = None) -> Any:
        """Import the file or module and return the function, unless it is given."""
        if here is not None:
            self._file = getattr(getattr(here, "__code__", None), "co_filename", None)
            return here
        self._file = file
        # Python takes a compiled file for that of a source of the same second and length: an edit would go unnoticed.
        sys.dont_write_bytecode = True
        if module:
            return getattr(importlib.import_module(module), function)
        stem = os.path.splitext(os.path.basename(file))[0]
        name = stem if stem not in sys.modules else f"reward_{stem}"  # a file called json.py does not replace json
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None, file
        assert spec.loader is not None, file
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[name] = loaded
        spec.loader.exec_module(loaded)
        return getattr(loaded, function)


def reward(objects: list[Any]) -> Service:
    """Make the service of a reward function: `score`."""
    [function] = objects

    def score(arguments: dict[str, list[Any]], num_rows: int) -> RowResults:
        timer = RowTimer(num_rows)
        if "completions" in arguments:
            arguments = {**arguments, "completions": timer.timed(arguments["completions"])}
        [returned] = awaited([function(**arguments)])
        results = check_scores(returned, num_rows)
        results.slowest = timer.slowest()
        return results

    return Service({"score": score}, facts_of(function))


def facts_of(function: Callable[..., Any]) -> ServiceFacts:
    """Return the facts of a service that calls one function: its parameters, and those that it must be given.

    As TRL hands trainer_state to every function, one with **kwargs also asks for it by reading kwargs["trainer_state"].
    """
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    required = [each.name for each in named if each.default is each.empty]
    names = [each.name for each in named]
    constants = getattr(getattr(function, "__code__", None), "co_consts", ())
    asks = [*names, TRAINER_STATE] if takes_all and TRAINER_STATE in constants else names
    return ServiceFacts(parameters=None if takes_all else names, required=required, asks=asks)


@functools.cache
def _event_loop() -> Any:
    """Run one event loop, since open connections belong to theirs; in a thread, as a notebook's own has another."""
    import asyncio  # slower to import than all the rest here; most functions do without

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class Exited(Exception):
    """User code raised what is no Exception, such as that of sys.exit: it would end the process or, from a
    coroutine, the event loop, and leave its caller waiting.
    """

    @classmethod
    def by(cls, error: BaseException) -> Exited:
        """Describe the exception of user code."""
        if isinstance(error, SystemExit):
            return cls(f"sys.exit({error.code!r})")
        return cls(": ".join(filter(None, [type(error).__name__, message_of(error)])))


def is_ours(error: BaseException) -> bool:
    """Return whether an exception is a Ctrl-C in the run itself, which calls a notebook's functions. A worker has a
    session of its own: there only user code raises KeyboardInterrupt.
    """
    return isinstance(error, KeyboardInterrupt) and not _this_process.is_worker


def awaited(values: list[Any], *, return_exceptions: bool = False) -> list[Any]:
    """Replace coroutines, which wait together, by their results or, where that is asked for, their exceptions."""
    waiting = {index: value for index, value in enumerate(values) if inspect.isawaitable(value)}
    if not waiting:
        return values
    import asyncio

    async def kept_inside(value: Any) -> Any:
        try:
            return await value
        except (SystemExit, KeyboardInterrupt) as error:
            raise Exited.by(error) from error

    async def together() -> list[Any]:
        coroutines = [kept_inside(value) for value in waiting.values()]
        return await asyncio.gather(*coroutines, return_exceptions=return_exceptions)

    results = dict(zip(waiting, asyncio.run_coroutine_threadsafe(together(), _event_loop()).result(), strict=True))
    return [results.get(index, value) for index, value in enumerate(values)]


class RowTimer:
    """Times the rows of one call: from where a loop over the completions takes a row until it asks for the next."""

    def __init__(self, num_rows: int) -> None:
        self.seconds = [0.0] * num_rows
        self._begun = time.perf_counter()

    def timed(self, completions: list[Any]) -> list[Any]:
        """Return the completions as a list whose loops are timed."""
        return _TimedList(completions, self.seconds)

    def slowest(self) -> tuple[float, int] | None:
        """Return (seconds, row) of the slowest row; None where most of the call was not spent in loops over rows."""
        call_s = time.perf_counter() - self._begun
        if sum(self.seconds) <= call_s / 2:
            return None
        most = max(self.seconds)
        return most, self.seconds.index(most)


class _TimedList(list[Any]):
    """A list that adds the seconds of each element of a loop to `seconds`."""

    def __init__(self, values: Iterable[Any], seconds: list[float]) -> None:
        super().__init__(values)
        self._seconds = seconds

    def __iter__(self) -> Iterator[Any]:
        for row, value in enumerate(super().__iter__()):
            begun = time.perf_counter()
            try:
                yield value
            finally:  # the last row of a zip is not followed by another
                if row < len(self._seconds):  # the function may have made its list longer
                    self._seconds[row] += time.perf_counter() - begun
