"""Fingerprints of functions that a notebook or script defined, which no file's hash covers."""

import dis
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any


def fingerprint(function: Callable[..., Any]) -> str:
    """Return a hash of a function's source (its bytecode where there is none) and of the values that it was made with:
    its defaults and closure, of a functools.partial its arguments, of an object the methods and constants of its class.

    Only values that cannot change count: numbers, text, None and tuples of these. So it does not cover lists, dicts and
    other objects, an object's own attributes, inherited methods, globals, and other functions that it calls.
    """
    return hashlib.sha256("\n".join(_parts(function)).encode(errors="surrogatepass")).hexdigest()


def _parts(function: Any) -> list[str]:
    """Return the texts that a function is told by."""
    if isinstance(function, functools.partial):
        keywords = [f"{name}={_constant(value)}" for name, value in sorted(function.keywords.items())]
        return [*_parts(function.func), *map(_constant, function.args), *keywords]
    if isinstance(function, MethodType):
        return _parts(function.__func__)
    if isinstance(function, FunctionType):
        return _parts_of_function(function)
    kind = function if isinstance(function, type) else type(function)
    parts = [getattr(function, "__qualname__", kind.__qualname__)]  # a function that is not Python's has a name alone
    for name, value in sorted(vars(kind).items()):
        if isinstance(value, FunctionType):
            parts += [name, *_parts_of_function(value)]
        elif not name.startswith("__"):
            parts.append(f"{name}={_constant(value)}")
    return parts


def _parts_of_function(function: FunctionType) -> list[str]:
    """Return source, defaults and closure of a function; a variable that it assigns itself (a counter) is left out."""
    assigned = {each.argval for each in dis.get_instructions(function) if each.opname == "STORE_DEREF"}
    parts = [_source(function), *map(_constant, function.__defaults__ or ())]
    parts += [f"{name}={_constant(value)}" for name, value in sorted((function.__kwdefaults__ or {}).items())]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name not in assigned:
            parts.append(f"{name}={_content(cell)}")
    return parts


def _content(cell: Any) -> str:
    try:
        return _constant(cell.cell_contents)
    except ValueError:  # a variable without a value yet
        return ""


def _source(function: FunctionType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):  # typed at a prompt, or made by exec
        return _bytecode(function.__code__)


def _bytecode(code: CodeType) -> str:
    """Return what a code object computes, without its file and lines."""
    constants = [_bytecode(each) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _constant(value: Any) -> str:
    """Return the text of a value that cannot change; of another one its type's name."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    return type(value).__qualname__
