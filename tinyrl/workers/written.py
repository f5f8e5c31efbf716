"""Functions from a notebook or a prompt written to a file, since a worker is a process of its own and loads files.

A function of a module is named by its file. One that exists only here is written out with what it uses: modules,
functions and classes defined beside it, and constants. What cannot be written is said; nothing is pickled.
"""

from __future__ import annotations

import builtins
import hashlib
import inspect
import linecache
import os
import re
import sys
import textwrap
import types
from ast import ClassDef, literal_eval, parse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from symtable import symtable
from typing import Any

from tinyrl.text import shortened

HEADER = '"""Written by tinyrl from a notebook: {name}, with what it uses."""\n\nfrom __future__ import annotations\n'


def written(function: Callable[..., Any], folder: Path) -> str:
    """'file.py:function' of a function: its own file, or one in `folder` named after its content. A functools.partial
    has the name of its function, an object that can be called that of its class.

    Raises ValueError, naming it, for what a file cannot hold: a lambda, a method, a closure, an object that holds more
    than constants and what is defined by name.
    """
    made = not isinstance(function, types.FunctionType | types.MethodType | types.BuiltinFunctionType | type)
    of = function.func if isinstance(function, partial) else type(function) if made else function
    name = getattr(of, "__name__", "")
    if not isinstance(of, types.FunctionType | type) or not (made or function is of) or not name.isidentifier():
        raise ValueError(f"{shortened(repr(function))} is not a function that is defined by name (def ...)")
    if of.__qualname__ != name:
        raise ValueError(f"{of.__qualname__} is defined inside something else; define it at the top level")
    own = _file_of(function) if isinstance(function, types.FunctionType) else None
    if own is not None:
        return f"{own}:{name}"
    name = name.lower() if made and isinstance(of, type) else name
    text = source_of(name, function)
    file = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    _write(file, text)
    return f"{file}:{name}"


def source_of(name: str, function: Callable[..., Any]) -> str:
    """The source of a function as a file of its own: imports and constants first, then what it calls, then itself."""
    parts: dict[str, str] = {}
    _collect(name, function, parts, user=name)
    return "\n\n".join([HEADER.format(name=name), *parts.values()]) + "\n"


def _collect(name: str, value: Any, parts: dict[str, str], *, user: str) -> None:
    """Add to `parts`, by name and in order, the lines that define `name` as `value`, after what they use."""
    if name in parts:
        return
    value = inspect.unwrap(value) if callable(value) else value  # its decorators are part of its source
    if isinstance(value, types.ModuleType):
        parts[name] = f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")
    elif isinstance(value, types.FunctionType | type) and _is_from_here(value):
        source = _own_source(value)
        parts[name] = ""  # two functions may call each other
        for used in sorted(_names(source)):
            if used != name and used in _globals_of(value):
                _collect(used, _globals_of(value)[used], parts, user=value.__name__)
        del parts[name]
        marks = vars(value).items() if isinstance(value, types.FunctionType) else ()
        source += "".join(f"\n\n{value.__name__}.{mark} = {set_to!r}" for mark, set_to in marks if _is_constant(set_to))
        parts[name] = source if value.__name__ == name else f"{source}\n\n{name} = {value.__name__}"
    elif _is_importable(value):
        known = value.__name__
        parts[name] = f"from {value.__module__} import {known}" + ("" if known == name else f" as {name}")
    elif isinstance(value, partial):
        given = [*value.args, *value.keywords.values()]
        function, *names = _collected(name, [value.func, *given], parts, user=user)
        named = [*names[: len(value.args)], *map("{}={}".format, value.keywords, names[len(value.args) :])]
        parts[name] = f"import functools\n\n{name} = functools.partial({', '.join([function, *named])})"
    elif isinstance(value, re.Pattern):
        parts[name] = f"import re\n\n{name} = re.compile({value.pattern!r}, {int(value.flags)})"
    elif _is_constant(value):
        parts[name] = f"{name} = {value!r}"
    elif callable(value) and hasattr(value, "__dict__"):
        kind, *names = _collected(name, [type(value), *vars(value).values()], parts, user=user)
        held = "".join(f"\n{name}.{attribute} = {used}" for attribute, used in zip(vars(value), names, strict=True))
        parts[name] = f"{name} = object.__new__({kind}){held}"
    else:
        raise ValueError(
            f"{user} uses {name}, {shortened(repr(value))}, which cannot be written to a file for the process that "
            f"rewards run in; make it inside of {user}, or put both into a .py file and import them"
        )


def _collected(name: str, values: list[Any], parts: dict[str, str], *, user: str) -> list[str]:
    """Collect the parts of `name`; how each is written: a constant as it is, else by a name of its own."""
    written = [repr(value) if _is_constant(value) else f"_{name}_{at}" for at, value in enumerate(values)]
    for text, value in zip(written, values, strict=True):
        if not _is_constant(value):
            _collect(text, value, parts, user=user)
    return written


def _file_of(function: types.FunctionType) -> Path | None:
    """The file of a module that a worker can load by itself; None for what is defined in a notebook or a script."""
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if function.__module__ == "__main__" or file is None or not os.path.isfile(file):
        return None
    return Path(file).absolute()


def _is_from_here(value: Any) -> bool:
    """Whether a function or class is defined in the notebook or the script that runs."""
    module = sys.modules.get(value.__module__)
    if value.__module__ == "__main__":
        return True
    return getattr(module, "__file__", None) is None and not _is_importable(value)


def _is_importable(value: Any) -> bool:
    name, module = getattr(value, "__name__", None), getattr(value, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str) or module == "__main__":
        return False
    return getattr(sys.modules.get(module), name, None) is value


def _own_source(value: Any) -> str:
    if isinstance(value, types.FunctionType) and value.__code__.co_freevars:
        raise ValueError(f"{value.__name__} uses {value.__code__.co_freevars[0]} of the function around it")
    found = _class_source(value) if isinstance(value, type) else None
    try:
        return found or textwrap.dedent(inspect.getsource(value)).strip()
    except (OSError, TypeError):
        raise ValueError(f"the source of {value.__name__} is not at hand; put it into a .py file") from None


def _class_source(value: type) -> str | None:
    """The source of a class from the cell of its methods: of a class the library looks for a file, and finds none."""
    method = next((each for each in vars(value).values() if isinstance(each, types.FunctionType)), None)
    text = "".join(linecache.getlines(method.__code__.co_filename)) if method is not None else ""
    for node in parse(text).body:
        if isinstance(node, ClassDef) and node.name == value.__name__:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return None


def _globals_of(value: Any) -> dict[str, Any]:
    """What the names in a function or class mean; of a class, what they mean in its methods."""
    if isinstance(value, types.FunctionType):
        return value.__globals__
    methods = (each for each in vars(value).values() if isinstance(each, types.FunctionType))
    return next((method.__globals__ for method in methods), {})


def _names(source: str) -> set[str]:
    """Global names that a function or class may look up, also in its decorators and defaults."""
    found, tables = set[str](), [symtable(HEADER + source, "<cell>", "exec")]
    while tables:
        table = tables.pop()
        at_top = table.get_type() == "module"
        found |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (at_top or s.is_global())}
        tables += table.get_children()
    return found - set(dir(builtins))


def _is_constant(value: Any) -> bool:
    """Whether its repr reads back as the same value: numbers, texts, and containers of them."""
    try:
        return literal_eval(repr(value)) == value and type(literal_eval(repr(value))) is type(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False


def _write(file: Path, text: str) -> None:
    """A file named after its content, whole or not at all."""
    if file.is_file() and file.read_text(encoding="utf-8") == text:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
