"""Lookup of user functions: 'file.py:function' or 'package.module:function', checked without running any of it.

The source is parsed, not imported: a mistake in a recipe is answered at once, and user code runs in the worker only.
"""

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from tinyrl.text import decode_utf8, did_you_mean, truncate
from tinyrl.workers.imports import LoadedCode

HERE = "__main__"


@dataclass(frozen=True)
class FunctionSource:
    """A function that exists: in a file, in a module, or (module HERE) defined in this process by a notebook."""

    use: str  # as the recipe has it
    function: str
    module: str | None  # importable name; None for a file
    file: Path | None  # the source, None for a module without one
    folder: Path  # first on the worker's sys.path, so that a file may import those beside it
    here: Callable[..., Any] | None = None  # the function itself, where it is called in this process
    code: LoadedCode = field(default_factory=LoadedCode, compare=False)  # what its workers have loaded


_defined = dict[str, Callable[..., Any]]()


def use_of(function: Callable[..., Any]) -> str:
    """Return 'file.py:function' of a module's function, else '__main__:NAME', which is called in this process.

    A functools.partial has the name of its function, an object that can be called that of its class. ValueError for a
    function without a name.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    name = getattr(function, "__name__", "")
    own = getattr(function, "__qualname__", "") == name and getattr(module, name, None) is function
    if own and module is not sys.modules[HERE] and file and os.path.isfile(file):
        return f"{Path(file).absolute()}:{name}"
    name = name or getattr(getattr(function, "func", None), "__name__", "") or type(function).__name__.lower()
    if not name.isidentifier():
        raise ValueError(f"{truncate(repr(function))} is not a function that is defined by name (def ...)")
    _defined[name] = function
    return f"{HERE}:{name}"


def uses_of(functions: Iterable[Any]) -> list[str]:
    """Return `use_of` each function; a text is one already. ValueError for one that is given twice, and for two
    different functions of a notebook with one name.
    """
    uses = list[Any]()
    given = list[Any]()
    for function in functions:
        use = use_of(function) if callable(function) else function
        if use in uses:
            name = str(use).rpartition(":")[2]
            is_same = not str(use).startswith(f"{HERE}:") or given[uses.index(use)] == function
            if is_same:
                raise ValueError(f"'{name}' is given twice; give it once, with its weight: {{{name}: 2.0}}")
            raise ValueError(
                f"two different functions are called '{name}'; give one of them another name, which its metrics have "
                "too: function.__name__ = 'another_name'"
            )
        uses.append(use)
        given.append(function)
    return uses


def parse_use(use: str, *, setting: str = "reward.functions: use") -> FunctionSource:
    """Find the function, or class, that `use`, the value of `setting`, names.

    Raises ValueError: no colon; no such file, module or function (with the nearest name); source that does not parse.
    """
    base = Path.cwd()
    problem = f"{setting} '{truncate(use, 300)}'"
    place, _, function = (part.strip() for part in use.rpartition(":"))
    if not place or not function:
        raise ValueError(f"{problem} must be 'file.py:function' or 'package.module:function'.")
    if place == HERE:
        here = _defined.get(function) or getattr(sys.modules[HERE], function, None)
        if here is None:
            raise ValueError(f"{problem}: defined by a notebook or script, and not in this process; move it to a file")
        return FunctionSource(use, function, module=HERE, file=None, folder=base, here=here)
    if place.endswith(".py") or "/" in place:
        file = base / Path(place).expanduser()
        source = FunctionSource(use, function, None, file, file.parent)
    else:
        name, *rest = place.split(".")
        spec = PathFinder.find_spec(name, [str(base)]) or importlib.util.find_spec(name)
        for part in rest:  # without importing the parents
            folders = spec.submodule_search_locations if spec else None
            name = f"{name}.{part}"
            spec = PathFinder.find_spec(name, folders) if folders else None
        if spec is None:
            raise ValueError(f"{problem}: no module '{name}' here or among the installed ones.")
        file = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
        source = FunctionSource(use, function, place, file, base)
    if file is None:
        return source
    try:
        text = decode_utf8(file.read_bytes(), str(file))
        ast.parse(text, filename=str(file))
    except (OSError, SyntaxError, ValueError) as error:  # missing, unreadable; a null byte
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = getattr(error, "strerror", None) or getattr(error, "msg", None) or error
        raise ValueError(f"{problem}: {file}{line}: {why}.") from error
    # Whether the name is bound there is the worker's to find out: `import *` may give anything.
    if not re.search(rf"\b{re.escape(function)}\b|import \*", text):
        functions = re.findall(r"^(?:async +)?def +(\w+)", text, re.MULTILINE)
        there_are = f"Its functions: {', '.join(functions) or 'none'}"
        raise ValueError(
            f"{problem}: {file} has no function '{function}'.{did_you_mean(function, functions)} {there_are}."
        )
    return source
