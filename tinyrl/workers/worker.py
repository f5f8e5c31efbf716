"""The worker process of a person's function: it answers requests, and ends with the run all that it has started.

    python -P worker.py RUN MEMORY_BYTES

It leads a session of its own, and its environment has a MARK that whatever it starts inherits. So the run (process RUN)
finds and kills all of that when a call is lost or the function is closed, and a thread here does it where the run is
gone; a function that holds the interpreter's lock then ends at its own time limit. No process may use more than
MEMORY_BYTES of its own (RLIMIT_DATA: without files and reserved address space).

Requests and replies are JSON, one a line, over stdin and stdout; those pipes are moved out of the function's sight
first, so that what it prints, closes or reads cannot disturb them. The worker imports only the standard library.

    {"timeout_s", "load": {"sources": [{"module", "file", "function"}], "host", "sys_path"}}
        -> {"whole_batch": bool, "parameters": names or null for any, "required": names, further facts}
    {"timeout_s", "arguments": {name: list}, "num_rows", "call"}
        -> {"values": one a row, null for none, "failures": [[row, reason], ...], "slowest": [seconds, row] or null}

A host, "module:function" of tinyrl's own, makes a `Service` of the loaded objects; without one the object is a reward
function. Where the function's code raises, the reply is {"error": text, "at": " (file.py, line 3)" or ""}.
"""

import atexit
import contextlib
import faulthandler
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import reprlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

MARK = "TINYRL_WORKER"
POLL_S = 0.1
PATIENCE_S = 1.0  # for killed processes to be gone; one that is stuck in the kernel must not hold the run
MAX_ERROR_CHARS = 2000  # of an exception's message, which is cut to a line where it is shown
MAX_SHOWN_CHARS = 100  # of a value that is not a score
MAX_WHY_CHARS = 4000  # of the text a score comes with
MAX_SCORE = 1e12  # scores become float32; there, the squares of a batch of larger ones would be infinite

Checked = tuple[list[Any], list[tuple[int, str]]]  # one value a row, and (row, reason) of the bad rows


def main() -> None:
    """Answer requests to the end of the pipe, or of the run."""
    import resource  # Windows has none

    run, memory_bytes, me, mark = int(sys.argv[1]), int(sys.argv[2]), os.getpid(), os.environ[MARK]

    def end_started() -> None:
        if os.getpid() == me:  # it is no fork of ours
            end_all(me, mark)

    def end_with_the_run() -> None:
        while os.getppid() == run:
            time.sleep(POLL_S)
        try:
            end_started()
        finally:
            os._exit(1)

    atexit.register(end_started)  # before people's code registers anything, so it is called behind that
    threading.Thread(target=end_with_the_run, daemon=True).start()
    with contextlib.suppress(ValueError, OSError):  # above the limit that holds already
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    answer_requests()


def end_all(worker: int, mark: str) -> None:
    """Kill the processes that a worker has started, until there are no more: those of its session, and those with its
    mark in a session of their own.
    """
    import psutil  # a second module to load, which a worker does without until then

    def is_its_own(process: Any) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid not in (worker, os.getpid()) and process.status() != psutil.STATUS_ZOMBIE:
                return os.getsid(process.pid) == worker or process.environ().get(MARK) == mark
        return False

    give_up = time.monotonic() + PATIENCE_S
    while (started := [*filter(is_its_own, psutil.process_iter())]) and time.monotonic() < give_up:
        for process in started:
            with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
                process.kill()


def answer_requests() -> None:
    """Answer requests until the parent closes the pipe."""
    requests, replies, last_words = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"), os.dup(2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore  so that a crash loses no line
    faulthandler.enable(last_words)
    del sys.argv[1:]
    loaded = Loaded()
    for line in requests:
        request = json.loads(line)
        # Works in C, so also while the function holds the interpreter lock (a regular expression that backtracks), and
        # when nobody is left to kill us. It writes down where the function was, which is what a person needs to know.
        faulthandler.dump_traceback_later(request["timeout_s"], exit=True, file=last_words)
        if "load" in request:
            sys.path[:] = dict.fromkeys([*request["load"]["sys_path"], *sys.path])
        reply = loaded.answer(request)
        faulthandler.cancel_dump_traceback_later()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # the function may have closed it
                stream.flush()
        replies.write(json.dumps(reply).encode("ascii") + b"\n")
        replies.flush()


class Service(NamedTuple):
    """Functions of (arguments by name, number of rows) by name, and facts about them for the run."""

    calls: dict[str, Callable[[dict[str, list[Any]], int], Checked]]
    facts: dict[str, Any]


class Loaded:
    """A person's objects and the service made of them; it answers the requests described above."""

    def __init__(self, service: Service | None = None, file: str | None = None) -> None:
        self._service, self._file = service, file

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Import the sources and make a service of them, or call it."""
        try:
            if "load" in request:
                return self._load(**request["load"])
            assert self._service is not None
            values, failures = self._service.calls[request["call"]](request["arguments"], request["num_rows"])
            return {"values": values, "failures": failures, "slowest": Timed.slowest}
        except Exception as error:  # noqa: BLE001 people's code may raise anything, and what it raised is our answer
            steps = traceback.walk_tb(error.__traceback__)
            lines = [line for frame, line in steps if frame.f_code.co_filename == self._file]
            where = f" ({os.path.basename(self._file)}, line {lines[-1]})" if self._file and lines else ""
            text = f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARS]}"
            if isinstance(error, MemoryError):
                import resource

                limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
                text += f" (its process may use {limit / 1e9:.3g} GB)" if limit > 0 else ""
            return {"error": f"raised {text}", "at": where}

    def _load(self, sources: list[dict[str, Any]], host: str | None, sys_path: list[str]) -> dict[str, Any]:
        found = [self._find(**source) for source in reversed(sources)][::-1]  # the first is the one that is named
        make = reward
        if host:
            module, _, name = host.partition(":")
            make = getattr(importlib.import_module(module), name)
        self._service = make(found)
        return {"whole_batch": False, "parameters": None, "required": [], **self._service.facts}

    def _find(self, module: str | None, file: str, function: str) -> Any:
        """Import the file or module, unless a notebook has defined the function, and return the function."""
        self._file = file
        if module == "__main__":
            from tinyrl.workers.loading import defined_here

            found = defined_here(function)
            self._file = getattr(getattr(found, "__code__", None), "co_filename", None)
            return found
        if module:
            return getattr(importlib.import_module(module), function)
        stem = os.path.splitext(os.path.basename(file))[0]
        name = stem if stem not in sys.modules else f"reward_{stem}"  # a file called json.py does not replace json
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None, file
        assert spec.loader is not None, file
        sys.modules[name] = loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return getattr(loaded, function)


def reward(objects: list[Any]) -> Service:
    """Make the service of a reward function: `score`."""
    [function] = objects

    def score(arguments: dict[str, list[Any]], num_rows: int) -> Checked:
        timed = Timed(arguments.get("completions", []))
        if "completions" in arguments:
            arguments = {**arguments, "completions": timed}
        begun = time.perf_counter()
        [returned] = awaited([function(**arguments)])
        checked = check_values(returned, num_rows)
        timed.close(time.perf_counter() - begun)
        return checked

    return Service({"score": score}, parameters_of(function))


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the names of a function's parameters (None: it takes any), and of those that it must be given."""
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return {
        "parameters": None if takes_all else [each.name for each in named],
        "required": [each.name for each in named if each.default is each.empty],
    }


@functools.cache
def _event_loop() -> Any:
    """Run one event loop, since open connections belong to theirs; in a thread, as a notebook's own has another."""
    import asyncio  # slower to import than all the rest here; most functions do without

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def awaited(values: list[Any], *, return_exceptions: bool = False) -> list[Any]:
    """Replace coroutines, which wait together, by their results or, where that is asked for, their exceptions."""
    waiting = {index: value for index, value in enumerate(values) if inspect.isawaitable(value)}
    if not waiting:
        return values
    import asyncio

    async def together() -> list[Any]:
        return await asyncio.gather(*waiting.values(), return_exceptions=return_exceptions)

    results = dict(zip(waiting, asyncio.run_coroutine_threadsafe(together(), _event_loop()).result(), strict=True))
    return [results.get(index, value) for index, value in enumerate(values)]


class Timed(list[Any]):
    """The completions of a call, which time each row: from where a loop takes it until it asks for the next."""

    slowest: tuple[float, int] | None = None  # of the last call: seconds and row

    def __init__(self, values: Iterable[Any]) -> None:
        super().__init__(values)
        self.seconds = [0.0] * len(self)

    def __iter__(self) -> Iterator[Any]:
        for row, value in enumerate(super().__iter__()):
            begun = time.perf_counter()
            try:
                yield value
            finally:  # the last row of a zip is not followed by another
                self.seconds[row] += time.perf_counter() - begun

    def close(self, call_s: float) -> None:
        """Note the slowest row; None where most of the call's seconds were not spent in loops over the rows."""
        most = max(self.seconds, default=0.0)
        Timed.slowest = (most, self.seconds.index(most)) if sum(self.seconds) > call_s / 2 else None


def check_values(returned: Any, num_rows: int, *, check: Callable[[Any], tuple[Any, str]] | None = None) -> Checked:
    """Return what a function returned, one value a row as JSON has it (None: none), and (row, reason) of the bad rows.
    `check` of a value returns it, or what is wrong; without one they are scores.

    A list of the wrong length fails every row, as values cannot be matched to rows.
    """
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if isinstance(values, list | tuple) and len(values) == num_rows:
        pairs = [(check or _commented_score)(value) for value in values]
        return [value for value, _ in pairs], [(row, problem) for row, (_, problem) in enumerate(pairs) if problem]
    what = f"a list of {len(values)}" if isinstance(values, list | tuple) else _describe(values)
    return [None] * num_rows, [(row, f"returned {what}, not a list of {num_rows}") for row in range(num_rows)]


def _commented_score(value: Any) -> tuple[Any, str]:
    """Return a score as a float, or as [score, why] where it came with a text, (score, why); else what is wrong."""
    commented = isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], str)
    score, problem = as_score(value[0] if commented else value)
    return [score, value[1][:MAX_WHY_CHARS]] if commented and not problem else score, problem and f"returned {problem}"


def as_score(value: Any) -> tuple[float | None, str]:
    """Return a number, or a row of one number, as a float, or None and what it is instead.

    None means "does not apply". True and False are 1 and 0; NumPy and torch values are the numbers they hold.
    """
    number: Any = value.tolist() if hasattr(value, "tolist") else value
    number = number[0] if isinstance(number, list) and len(number) == 1 else number
    if number is None:
        return None, ""
    if not hasattr(type(number), "__float__"):  # text has none
        return None, f"{_describe(number)}, not a number"
    number = float(number)
    if not math.isfinite(number):
        return None, f"{number}".replace("nan", "NaN")
    return (number, "") if abs(number) <= MAX_SCORE else (None, f"a number beyond {MAX_SCORE:g}")


def _describe(value: Any) -> str:
    kind, shown = type(value).__name__, isinstance(value, str | list | tuple | dict)
    return f"a {kind} ({reprlib.repr(value)})"[:MAX_SHOWN_CHARS] if shown else kind


if __name__ == "__main__":
    main()
