"""The worker process of a user's reward function: a hang or a crash costs one worker and not the run.

Started fresh as a script (`python -P worker.py PARENT`), never forked. Requests and replies are JSON, one a line, over
the pipes it was started with; those are moved out of the function's sight first, so that what it prints, closes or
reads cannot disturb them. Only the standard library is imported here: start-up is short, and torch is imported only
where the user's own code does so.

    {"load": {"path", "module", "function", "file", "sys_path"}, "timeout_s"}
        -> {"whole_batch": bool, "parameters": names or null for any, "required": names}
    {"arguments": {name: list}, "num_rows", "timeout_s"}
        -> {"scores": number or null a row, "failures": [[row, reason], ...]}

Either is answered with {"error": text, "at": " (file.py, line 3)" or ""} when the function's code raises. Texts are as
the user's code wrote them: our end of the pipe makes one harmless line of each.
"""

import atexit
import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import reprlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

LOOK_AT_PARENT_S = 0.3
MAX_ERROR_CHARS = 2000  # of an exception's message, which is cut to a line where it is shown
MAX_SHOWN_CHARS = 100  # of a value that is not a score
MAX_SCORE = 3.4e38  # scores become float32; there, more is infinite


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    requests, replies, last_words = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"), os.dup(2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    faulthandler.enable(last_words)
    finished = threading.Event()
    atexit.register(lambda: _end_with_children() if finished.is_set() else None)  # the first in is the last to run
    threading.Thread(target=_die_with, args=(int(sys.argv.pop()),), daemon=True).start()
    function: Any = None
    file: str | None = None
    for line in requests:
        request = json.loads(line)
        # Works in C, so also while the function holds the interpreter lock (a regular expression that backtracks), and
        # when nobody is left to kill us. It writes down where the function was, which is what a person needs to know.
        faulthandler.dump_traceback_later(request["timeout_s"], exit=True, file=last_words)
        if "load" in request:
            file = request["load"]["file"]
            function, reply = _load(request["load"])
        else:
            reply = call(function, request["arguments"], num_rows=request["num_rows"], file=file)
        faulthandler.cancel_dump_traceback_later()
        replies.write(json.dumps(reply).encode("ascii") + b"\n")
        replies.flush()
    finished.set()


def call(
    function: Callable[..., Any], arguments: dict[str, list[Any]], *, num_rows: int, file: str | None
) -> dict[str, Any]:
    """Call a reward function and check what it returns; `file` is its source. The reply is described above."""
    returned, problem = _attempt(lambda: _awaited(function(**arguments)), file)
    if problem:
        return problem
    scores, failures = check_values(returned, num_rows)
    return {"scores": scores, "failures": failures}


def check_values(returned: Any, num_rows: int) -> tuple[list[float | None], list[tuple[int, str]]]:
    """The scores a function returned, one a row (None where there is none), and (row, reason) of the bad rows.

    None means "does not apply" and is not a failure. True and False are 1 and 0; NumPy and torch values are taken as
    the numbers they hold. A list of the wrong length fails every row, as scores cannot be matched to rows.
    """
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple):
        problem = f"returned {_describe(values)}, not a list with one score for each completion"
    elif len(values) != num_rows:
        problem = f"returned a list of {len(values)} for a batch of {num_rows}"
    else:
        pairs = [_number(value) for value in values]
        return [score for score, _ in pairs], [(row, problem) for row, (_, problem) in enumerate(pairs) if problem]
    return [None] * num_rows, [(row, problem) for row in range(num_rows)]


def _number(value: Any) -> tuple[float | None, str]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None:
        return None, ""
    if not isinstance(value, numbers.Real):
        return None, f"returned {_describe(value)}, not a number"
    try:
        number = float(value)
    except OverflowError:
        return None, "returned a number too large for a float32"
    if not math.isfinite(number):
        return None, f"returned {number}".replace("nan", "NaN")
    return (number, "") if abs(number) <= MAX_SCORE else (None, "returned a number too large for a float32")


def _describe(value: Any) -> str:
    kind = type(value).__name__
    if value is None or not isinstance(value, str | list | tuple | dict):
        return kind
    return f"a {kind} ({reprlib.repr(value)})"[:MAX_SHOWN_CHARS]


def _load(source: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    sys.path[:] = dict.fromkeys([*source["sys_path"], *sys.path])
    function, problem = _attempt(lambda: _find(source), source["file"])
    if problem:
        return None, problem
    if not callable(function):
        return None, {"error": f"is {_describe(function)}, not a function", "at": ""}
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return function, {
        "whole_batch": bool(getattr(function, "whole_batch", False)),
        "parameters": None if takes_all else [each.name for each in named],
        "required": [each.name for each in named if each.default is each.empty],
    }


def _find(source: dict[str, Any]) -> Any:
    if source["module"]:
        return getattr(importlib.import_module(source["module"]), source["function"])
    stem = os.path.splitext(os.path.basename(source["path"]))[0]
    name = stem if stem not in sys.modules else f"reward_{stem}"  # a file called json.py does not replace json
    spec = importlib.util.spec_from_file_location(name, source["path"])
    assert spec is not None, source["path"]
    assert spec.loader is not None, source["path"]
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return getattr(module, source["function"])


def _attempt(action: Callable[[], Any], file: str | None) -> tuple[Any, dict[str, Any] | None]:
    """What the action returns and None, or None and what it raised, with the line of `file` it came from."""
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 people's code may raise anything, and what it raised is our answer
        lines, step = [], error.__traceback__
        while step is not None:
            if step.tb_frame.f_code.co_filename == file:
                lines.append(step.tb_lineno)
            step = step.tb_next
        where = f" ({os.path.basename(file)}, line {lines[-1]})" if file and lines else ""
        return None, {"error": f"raised {type(error).__name__}: {str(error)[:MAX_ERROR_CHARS]}", "at": where}


def _awaited(returned: Any) -> Any:
    if not inspect.isawaitable(returned):
        return returned
    import asyncio  # slower to import than all the rest here; most functions do without

    async def finish() -> Any:
        return await returned

    return asyncio.run(finish())


def _die_with(parent: int) -> None:
    """End with the parent, also in the middle of a call, when nobody reads the pipe and notices its end."""
    while os.getppid() == parent:
        time.sleep(LOOK_AT_PARENT_S)
    _end_with_children()


def _end_with_children() -> None:
    with contextlib.suppress(ProcessLookupError):  # started by hand, it leads no group
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
