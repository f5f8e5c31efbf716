"""The worker process of a person's function, under a supervisor that ends whatever it leaves behind.

    python -P worker.py RUN MEMORY_BYTES [COMMAND ...]

Supervisor and worker are one fresh process that forks: the child answers requests, or is COMMAND. On Linux the
supervisor is a subreaper (prctl(2)): a process whose parent has ended becomes its child, in whatever group or session.
So all that was started is found and killed: when the child is over, at SIGTERM, and when the run (process RUN) is gone.
The exit code is the child's, 128 + N after signal N. No process may use more than MEMORY_BYTES of its own (RLIMIT_DATA:
without files and reserved address space; 0: no limit).

Requests and replies are JSON, one a line, over stdin and stdout; those pipes are moved out of the function's sight
first, so that what it prints, closes or reads cannot disturb them. The worker imports only the standard library.

    {"id", "timeout_s", "load": {"sources": [{"module", "file", "function"}], "host", "section", "sys_path"}}
        -> {"id", "whole_batch": bool, "parameters": names or null for any, "required": names, further facts}
    {"id", "timeout_s", "arguments": {name: list}, "num_rows", "call"}
        -> {"id", "values": one a row, null for none, "failures": [[row, reason], ...], "read_as_text": bool,
            "slowest": [seconds, row] or null}

A host, "module:function" of tinyrl's own, makes a `Service` of the loaded objects; without one the object is a reward
function. Where the function's code raises, the reply is {"id", "error": text, "at": " (file.py, line 3)" or ""}.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import reprlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
PATIENCE_S = 1.0  # for killed processes to be gone; one that is stuck in the kernel must not hold the run
MAX_ERROR_CHARS = 2000  # of an exception's message, which is cut to a line where it is shown
MAX_SHOWN_CHARS = 100  # of a value that is not a score
MAX_WHY_CHARS = 4000  # of the text a score comes with
MAX_SCORE = 1e12  # scores become float32; there, the squares of a batch of larger ones would be infinite
CHAT_HINT = 'a completion is a list of messages here, as the prompts are; its text is completion[0]["content"]'

Checked = tuple[list[Any], list[tuple[int, str]]]  # one value a row, and (row, reason) of the bad rows


def main() -> None:
    """Fork; supervise the child to its end, or to the run's."""
    import resource  # Windows has none

    run, memory_bytes, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until what it ends is known
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.setpgid(0, 0)  # a function that kills its group does not kill its supervisor
        with contextlib.suppress(ValueError, OSError):  # above the limit that holds already
            if memory_bytes != "0":
                resource.setrlimit(resource.RLIMIT_DATA, (int(memory_bytes), int(memory_bytes)))
        if not command:
            return answer_requests()
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python; a command expects them
            signal.signal(ignored, signal.SIG_DFL)
        os.execvp(command[0], command)
    import psutil  # the child does without

    nothing, code = os.open(os.devnull, os.O_RDWR), 0
    for pipe in (0, 1, 2):  # are the child's, whose end has to show
        os.dup2(nothing, pipe)
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        while os.getppid() == int(run):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(POLL_S)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        give_up = time.monotonic() + PATIENCE_S
        while (left := psutil.Process().children(recursive=True)) and time.monotonic() < give_up:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.002)
    os._exit(code if code >= 0 else 128 - code)


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
    for name in [name for name in sys.modules if name.partition(".")[0] == "json"]:
        del sys.modules[name]  # people's code gets a copy of its own, which it may patch
    importlib.import_module("json")
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
        replies.write(json.dumps({"id": request["id"], **reply}).encode("ascii") + b"\n")
        replies.flush()


class Service(NamedTuple):
    """Functions of (arguments by name, number of rows) by name, and facts about them for the run."""

    calls: dict[str, Callable[[dict[str, list[Any]], int], Checked]]
    facts: dict[str, Any]


class Loaded:
    """A person's objects and the service made of them; it answers the requests described above."""

    def __init__(self, service: Service | None = None, file: str | None = None) -> None:
        self._service, self._file, self._section = service, file, "reward"

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Import the sources and make a service of them, or call it."""
        Messages.read_as_text = False
        try:
            if "load" in request:
                return self._load(**request["load"])
            assert self._service is not None
            values, failures = self._service.calls[request["call"]](request["arguments"], request["num_rows"])
            seen = {"read_as_text": Messages.read_as_text, "slowest": Timed.slowest}
            return {"values": values, "failures": failures, **seen}
        except Exception as error:  # noqa: BLE001 people's code may raise anything, and what it raised is our answer
            steps = traceback.walk_tb(error.__traceback__)
            lines = [line for frame, line in steps if frame.f_code.co_filename == self._file]
            where = f" ({os.path.basename(self._file)}, line {lines[-1]})" if self._file and lines else ""
            text = f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARS]}"
            if isinstance(error, MemoryError):
                import resource

                limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
                text += f" (a process of a {self._section} may use {limit / 1e9:.3g} GB)" if limit > 0 else ""
            elif Messages.__name__ in str(error):
                text += f" ({CHAT_HINT})"
            return {"error": f"raised {text}", "at": where}

    def _load(
        self, sources: list[dict[str, Any]], host: str | None, section: str, sys_path: list[str]
    ) -> dict[str, Any]:
        self._section = section
        found = [self._find(**source) for source in reversed(sources)][::-1]  # the first is the one that is named
        make = reward
        if host:
            module, _, name = host.partition(":")
            make = getattr(importlib.import_module(module), name)
        elif not callable(found[0]):
            return {"error": f"is {_describe(found[0])}, not a function", "at": ""}
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
    function = objects[0]

    def score(arguments: dict[str, list[Any]], num_rows: int) -> Checked:
        timed = Timed(Messages(c) if isinstance(c, list) else c for c in arguments.get("completions", []))
        if "completions" in arguments:
            arguments = {**arguments, "completions": timed}
        begun = time.perf_counter()
        returned = function(**arguments)
        if inspect.isawaitable(returned):
            import asyncio  # slower to import than all the rest here; most functions do without
            from concurrent.futures import ThreadPoolExecutor

            async def finish() -> Any:
                return await returned

            with ThreadPoolExecutor(1) as pool:  # in a notebook's own thread a loop is running already
                returned = pool.submit(asyncio.run, finish()).result()
        checked = check_values(returned, num_rows)
        timed.close(time.perf_counter() - begun)
        return checked

    facts = {"whole_batch": bool(getattr(function, "whole_batch", False)), **parameters_of(function)}
    return Service({"score": score}, facts)


def call(
    function: Callable[..., Any], arguments: dict[str, list[Any]], *, num_rows: int, file: str | None
) -> dict[str, Any]:
    """Call a reward function of ours, whose source is `file`, and check what it returns; the reply is as above."""
    request = {"arguments": arguments, "num_rows": num_rows, "call": "score"}
    return Loaded(reward([function]), file).answer(request)


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the names of a function's parameters (None: it takes any), and of those that it must be given."""
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return {
        "parameters": None if takes_all else [each.name for each in named],
        "required": [each.name for each in named if each.default is each.empty],
    }


class Messages(list[Any]):
    """A completion of chat data: a list that notices when it is compared with text, which no list is equal to."""

    read_as_text = False
    __hash__ = None  # pyright: ignore  as for any list

    def __contains__(self, item: object) -> bool:
        Messages.read_as_text |= isinstance(item, str)
        return super().__contains__(item)

    def __eq__(self, other: object) -> bool:
        Messages.read_as_text |= isinstance(other, str)
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getitem__(self, at: Any) -> Any:
        return Messages(super().__getitem__(at)) if isinstance(at, slice) else super().__getitem__(at)

    def __reduce__(self) -> Any:
        return list, ([*self],)


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

    def __reduce__(self) -> Any:
        return list, ([*super().__iter__()],)

    def close(self, call_s: float) -> None:
        """Note the slowest row; None where most of the call's seconds were not spent in loops over the rows."""
        most = max(self.seconds, default=0.0)
        Timed.slowest = (most, self.seconds.index(most)) if sum(self.seconds) > call_s / 2 else None


def check_values(returned: Any, num_rows: int) -> Checked:
    """Return the scores a function returned, one a row (None where there is none), and (row, reason) of the bad rows. A
    score that came with a text, (score, why), is [score, why].

    None means "does not apply" and is not a failure. True and False are 1 and 0; NumPy and torch values are taken as
    the numbers they hold, and a generator as the list it gives. A list of the wrong length fails every row, as scores
    cannot be matched to rows.
    """
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if isinstance(values, list | tuple | Iterator):
        values = [*itertools.islice(values, num_rows + 1)] if isinstance(values, Iterator) else [*values]
        if len(values) == num_rows:
            pairs = [_score(value) for value in values]
            return [score for score, _ in pairs], [(row, problem) for row, (_, problem) in enumerate(pairs) if problem]
        problem = f"returned a list of {len(values)} for a batch of {num_rows}"
    else:
        problem = f"returned {_describe(values)}, not a list with one score for each completion"
    return [None] * num_rows, [(row, problem) for row in range(num_rows)]


def _score(value: Any) -> tuple[Any, str]:
    """Return a score as JSON has it, or None and what is wrong with it."""
    why = value[1] if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], str) else None
    plain: Any = value if why is None else value[0]
    plain = plain.tolist() if hasattr(plain, "tolist") else plain
    # a row of a (B, 1) tensor, or a tensor of one number
    number: Any = plain[0] if isinstance(plain, list) and len(plain) == 1 else plain
    if number is not None:
        if not hasattr(type(number), "__float__"):  # text has none
            return None, f"returned {_describe(number)}, not a number"
        try:
            number = float(number)
        except OverflowError:
            number = 2 * MAX_SCORE
        if not math.isfinite(number):
            return None, f"returned {number}".replace("nan", "NaN")
        if abs(number) > MAX_SCORE:
            return None, f"returned a number beyond {MAX_SCORE:g}"
    return (number if why is None else [number, why[:MAX_WHY_CHARS]]), ""


def _describe(value: Any) -> str:
    kind, shown = type(value).__name__, isinstance(value, str | list | tuple | dict)
    return f"a {kind} ({reprlib.repr(value)})"[:MAX_SHOWN_CHARS] if shown else kind


if __name__ == "__main__":
    main()
