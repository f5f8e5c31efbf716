"""The program in a Python environment's sandbox: run an episode's cells in one namespace; the last one answers.

python.py sends this source with a call of `run` under it. The cells may do what they like with this process: an episode
that forges an answer only deceives itself. Nothing is imported that takes long (`typing`, `ast`, `traceback`).
"""

import os
import resource
import sys
import time
from _ast import Expr, Expression, Module, PyCF_ONLY_AST

FINISHED = "finished\n"  # on the error pipe, where a cell cannot print by mistake; the value or error comes after it


def run(cells: list[str], *, seed: int, timeout_s: float) -> None:
    """Run the cells; the last one's output goes to stdout, its value or error to stderr. Ends the process."""
    stdout, stderr, nowhere = os.dup(1), os.dup(2), os.open(os.devnull, os.O_WRONLY)
    module = sys.modules["__main__"] = type(sys)("__main__")  # for pickle, dataclasses and the like
    printed = os.fdopen(1, "w", errors="backslashreplace", closefd=False)  # half a surrogate is shown as it is written
    if any("random" in cell for cell in cells):
        import random

        random.seed(seed)  # a cell that is run again draws the same numbers
    shown = ""
    for number, cell in enumerate(cells, start=1):
        new = number == len(cells)
        for stream in (1, 2):
            os.dup2(stdout if new else nowhere, stream)
        sys.stdout = sys.stderr = printed
        if new and number > 1:  # it may compute so long from now on, in whole seconds rounded up
            soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (min(soft, int(time.process_time() + timeout_s) + 1), hard))
        try:
            shown = run_cell(cell, f"<cell {number}>", vars(module))
        except MemoryError:
            os.write(stderr, b"MemoryError\n")
            os._exit(1)
        except BaseException as error:  # noqa: BLE001  whatever a cell raises is its answer
            shown = describe(error, f"<cell {number}>")
        printed.flush()
    with os.fdopen(stderr, "w", errors="backslashreplace") as pipe:
        pipe.write(FINISHED + shown)
    os._exit(0)  # threads that a cell has left behind are not waited for


def run_cell(cell: str, file: str, namespace: dict[str, object]) -> str:
    """Run a cell; return the repr of its trailing expression, "" if there is none or it is None."""
    tree = compile(cell, file, "exec", PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, Module)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, Expr):
        tree.body.pop()
    exec(compile(tree, file, "exec", dont_inherit=True), namespace)  # noqa: S102
    if not isinstance(last, Expr):
        return ""
    value = eval(compile(Expression(last.value), file, "eval", dont_inherit=True), namespace)  # noqa: S307
    return "" if value is None else repr(value)


def describe(error: BaseException, file: str) -> str:
    """Return the last line of an error's traceback, and the innermost line of the cell in it."""
    line, message = None, str(error)
    if isinstance(error, SyntaxError):
        message = error.msg
        line = error.lineno if error.filename == file else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    name = type(error).__name__
    return (f"Line {line}: " if line else "") + (f"{name}: {message}" if message else name)
