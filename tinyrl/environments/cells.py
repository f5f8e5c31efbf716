"""The program in a Python environment's sandbox: an interpreter that runs an episode's cells in one namespace.

python.py sends this source with a call of `answer` under it, and then a line for each cell: the repr of its code and
its seconds. The cells may do what they like with this process: an episode that forges an answer only deceives itself.
Nothing is imported that takes long (`typing`, `ast`, `traceback`).
"""

import os
import resource
import sys
import time
from _ast import Expr, Expression, Module, PyCF_ONLY_AST


def answer(seed: int) -> None:
    """Run cells until standard input ends: what one prints goes to stdout, its value or error to stderr."""
    requests, *outputs = os.dup(0), os.dup(1), os.dup(2)
    nothing = os.open(os.devnull, os.O_RDWR)
    seeded = False
    module = sys.modules["__main__"] = type(sys)("__main__")  # for pickle, dataclasses and the like
    for number, line in enumerate(os.fdopen(requests, "rb"), start=1):
        cell, timeout_s = eval(line)  # noqa: S307
        for stream, source in enumerate((nothing, outputs[0], outputs[0])):  # the last cell may have closed them
            os.dup2(source, stream)
        # half a surrogate is shown as it is written
        sys.stdout = sys.stderr = printed = os.fdopen(1, "w", errors="backslashreplace", closefd=False)
        if "random" in cell and not seeded:
            import random

            random.seed(seed)  # cells that are run again draw the same numbers
            seeded = True
        # it may compute so long from now on, in whole seconds rounded up
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (min(hard, int(time.process_time() + timeout_s) + 1), hard))
        try:
            shown = run_cell(cell, f"<cell {number}>", vars(module))
        except MemoryError:
            os.write(outputs[1], b"MemoryError\n")
            os._exit(1)
        except BaseException as error:  # noqa: BLE001  whatever a cell raises is its answer
            shown = describe(error, f"<cell {number}>")
        with open(outputs[1], "w", errors="backslashreplace", closefd=False) as pipe:
            pipe.write(shown)
        try:  # noqa: SIM105  contextlib takes long to import
            printed.flush()
        except (OSError, ValueError):  # it is full, or the cell has closed it
            pass
        os.write(requests, b"\n")


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
    line = None
    message = str(error)
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
