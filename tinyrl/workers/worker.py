"""The worker process of a person's function: a hang or a crash costs one worker and not the run.

Started fresh (`python -P worker.py RUN`: the run's process, for who lists processes), never forked. Requests and
replies are JSON, one a line, over stdin and stdout; those pipes are moved out of the function's sight first, so that
what it prints, closes or reads cannot disturb them. Only the standard library is imported here, to start quickly.

    {"id", "timeout_s", "load": {"sources": [{"module", "file", "function"}], "host", "section", "sys_path"}}
        -> {"id", "whole_batch": bool, "parameters": names or null for any, "required": names, further facts}
    {"id", "timeout_s", "arguments": {name: list}, "num_rows", "call"}
        -> {"id", "values": one a row, null for none, "failures": [[row, reason], ...], "read_as_text": bool}

A host, "module:function" of tinyrl's own, makes a `Service` of the loaded objects; without one the object is a reward
function. Where the function's code raises, the reply is {"id", "error": text, "at": " (file.py, line 3)" or ""}.
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import reprlib
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

MAX_ERROR_CHARS = 2000  # of an exception's message, which is cut to a line where it is shown
MAX_SHOWN_CHARS = 100  # of a value that is not a score
MAX_WHY_CHARS = 4000  # of the text a score comes with
MAX_SCORE = 1e12  # scores become float32; there, the squares of a batch of larger ones would be infinite
CHAT_HINT = 'a completion is a list of messages here, as the prompts are; its text is completion[0]["content"]'

Checked = tuple[list[Any], list[tuple[int, str]]]  # one value a row, and (row, reason) of the bad rows


class Service(NamedTuple):
    """Functions of (arguments by name, number of rows) by name, and facts about them for the run."""

    calls: dict[str, Callable[[dict[str, list[Any]], int], Checked]]
    facts: dict[str, Any]


def main() -> None:
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
            reply = loaded.load(request["load"])
        else:
            reply = loaded.answer(request)
        faulthandler.cancel_dump_traceback_later()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # the function may have closed it
                stream.flush()
        replies.write(json.dumps({"id": request["id"], **reply}).encode("ascii") + b"\n")
        replies.flush()


class Loaded:
    """A person's objects and the service made of them; it answers the requests described above."""

    service: Service
    file: str | None = None
    section = "reward"

    def load(self, request: dict[str, Any], objects: list[Any] | None = None) -> dict[str, Any]:
        """Import the sources (or take the objects), and make a service of them."""
        sources, self.section = request["sources"], request["section"]
        self.file = sources[0]["file"]
        found: list[Any] = objects or []
        if not found:
            for source in sources:
                value, problem = _attempt(lambda source=source: _find(**source), source["file"], self.section)
                if problem:
                    return problem
                found.append(value)
        host = reward
        if request["host"]:
            module, _, name = request["host"].partition(":")
            host = getattr(importlib.import_module(module), name)
        elif not callable(found[0]):
            return {"error": f"is {_describe(found[0])}, not a function", "at": ""}
        service, problem = _attempt(lambda: host(found), self.file, self.section)
        if problem:
            return problem
        self.service = service
        return {"whole_batch": False, "parameters": None, "required": [], **service.facts}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make a call."""
        Messages.read_as_text = False
        function, arguments, num_rows = self.service.calls[request["call"]], request["arguments"], request["num_rows"]
        found, problem = _attempt(lambda: function(arguments, num_rows), self.file, self.section)
        return problem or {"values": found[0], "failures": found[1], "read_as_text": Messages.read_as_text}


def reward(objects: list[Any]) -> Service:
    """Make the service of a reward function: `score`."""
    function = objects[0]

    def score(arguments: dict[str, list[Any]], num_rows: int) -> Checked:
        if "completions" in arguments:
            messages = [Messages(c) if isinstance(c, list) else c for c in arguments["completions"]]
            arguments = {**arguments, "completions": messages}
        return check_values(_awaited(function(**arguments)), num_rows)

    facts = {"whole_batch": bool(getattr(function, "whole_batch", False)), **parameters_of(function)}
    return Service({"score": score}, facts)


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the names of a function's parameters (None: it takes any), and of those that it must be given."""
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return {
        "parameters": None if takes_all else [each.name for each in named],
        "required": [each.name for each in named if each.default is each.empty],
    }


def call(
    function: Callable[..., Any], arguments: dict[str, list[Any]], *, num_rows: int, file: str | None
) -> dict[str, Any]:
    """Call a reward function of ours, whose source is `file`, and check what it returns; the reply is as above."""
    found, problem = _attempt(lambda: check_values(_awaited(function(**arguments)), num_rows), file, "reward")
    return problem or {"values": found[0], "failures": found[1]}


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


def check_values(returned: Any, num_rows: int) -> Checked:
    """Return the scores a function returned, one a row (None where there is none), and (row, reason) of the bad rows. A
    score that came with a text, (score, why), is [score, why].

    None means "does not apply" and is not a failure. True and False are 1 and 0; NumPy and torch values are taken as
    the numbers they hold, and a generator as the list it gives. A list of the wrong length fails every row, as scores
    cannot be matched to rows.
    """
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    values = [*itertools.islice(values, num_rows + 1)] if isinstance(values, Iterator) else values  # it may not end
    if isinstance(values, list | tuple):
        values = [*values]  # a subclass may say that it is longer than it is
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
    single: Any = plain[0] if isinstance(plain, list) and len(plain) == 1 else plain
    if single is None:
        return (None if why is None else [None, why[:MAX_WHY_CHARS]]), ""
    if not hasattr(type(single), "__float__"):  # text has none
        return None, f"returned {_describe(single)}, not a number"
    try:
        number = float(single)
    except OverflowError:
        return None, f"returned a number beyond {MAX_SCORE:g}"
    if not math.isfinite(number):
        return None, f"returned {number}".replace("nan", "NaN")
    if abs(number) > MAX_SCORE:
        return None, f"returned {number:g}, a number beyond {MAX_SCORE:g}"
    return (number if why is None else [number, why[:MAX_WHY_CHARS]]), ""


def _describe(value: Any) -> str:
    kind = type(value).__name__
    return (
        f"a {kind} ({reprlib.repr(value)})"[:MAX_SHOWN_CHARS] if isinstance(value, str | list | tuple | dict) else kind
    )


def _find(module: str | None, file: str, function: str) -> Any:
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


def _attempt(action: Callable[[], Any], file: str | None, section: str) -> tuple[Any, dict[str, Any] | None]:
    """Return (result, None), or (None, the error reply) with the line of `file` where the action raised."""
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 people's code may raise anything, and what it raised is our answer
        lines, step = [], error.__traceback__
        while step is not None:
            if step.tb_frame.f_code.co_filename == file:
                lines.append(step.tb_lineno)
            step = step.tb_next
        where = f" ({os.path.basename(file)}, line {lines[-1]})" if file and lines else ""
        text = f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARS]}"
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        if isinstance(error, MemoryError) and limit > 0:
            text += f" (a process of a {section} may use {limit / 1e9:.3g} GB)"
        elif Messages.__name__ in str(error) and not isinstance(error, MemoryError):
            text += f" ({CHAT_HINT})"
        return None, {"error": f"raised {text}", "at": where}


def _awaited(returned: Any) -> Any:
    if not inspect.isawaitable(returned):
        return returned
    import asyncio  # slower to import than all the rest here; most functions do without
    from concurrent.futures import ThreadPoolExecutor

    async def finish() -> Any:
        return await returned

    with ThreadPoolExecutor(1) as pool:  # in a notebook's own thread a loop is running already
        return pool.submit(asyncio.run, finish()).result()


if __name__ == "__main__":
    main()
