"""Lookup of people's functions: 'file.py:function' or 'package.module:function', checked without running any of it.

The source is read, not imported: a mistake in a recipe is answered at once, and users' code runs in the worker only.
"""

import ast
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyrl.text import did_you_mean, shortened

HERE = "__main__"


@dataclass(frozen=True)
class FunctionSource:
    """A function that exists: `path` is set for a file, `module` for an importable one."""

    use: str  # as the recipe has it
    function: str
    path: Path | None
    module: str | None
    file: Path | None  # the source, None for a module without one
    folder: Path  # put first on the worker's sys.path, so that a file may import those beside it

    @property
    def is_in_process(self) -> bool:
        """Whether a notebook or script defined it, so that it is called in the process of the run."""
        return self.module == HERE


_defined = dict[str, Callable[..., Any]]()


def use_of(function: Callable[..., Any]) -> str:
    """Return 'file.py:function' of a module's function, else '__main__:NAME', which is called in this process.

    A functools.partial has the name of its function, an object that can be called that of its class. ValueError for a
    function without a name.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file, name = getattr(module, "__file__", None), getattr(function, "__name__", "")
    own = getattr(function, "__qualname__", "") == name and getattr(module, name, None) is function
    if own and module is not sys.modules[HERE] and file and os.path.isfile(file):
        return f"{Path(file).absolute()}:{name}"
    name = name or getattr(getattr(function, "func", None), "__name__", "") or type(function).__name__.lower()
    if not name.isidentifier():
        raise ValueError(f"{shortened(repr(function))} is not a function that is defined by name (def ...)")
    _defined[name] = function
    return f"{HERE}:{name}"


def defined_here(source: FunctionSource) -> Callable[..., Any]:
    """Return a function of this process. KeyError: there is none."""
    found = _defined.get(source.function) or getattr(sys.modules[HERE], source.function, None)
    if found is None:
        raise KeyError(source.function)
    return found


def parse_use(use: str, *, setting: str = "reward.functions: use", classes: bool = False) -> FunctionSource:
    """Find the function that `use` names, a file or module in the current folder or elsewhere.

    `setting` is the field that names it, for messages; `classes`: it may be a class.

    Raises ValueError: no colon; no such file, module or function (with the nearest name); source that does not parse.
    """
    base = Path.cwd()
    place, colon, function = use.rpartition(":")
    if not colon or not place.strip() or not function.strip():
        raise ValueError(f"{setting} '{use}' must be 'file.py:function' or 'package.module:function'.")
    place, function = place.strip(), function.strip()
    if place == HERE:
        source = FunctionSource(use, function, path=None, module=HERE, file=None, folder=base)
        try:
            defined_here(source)
        except KeyError:
            raise ValueError(
                f"{setting} '{use}': a notebook or script defined this function, and it does not exist in this "
                "process; resume where it is defined, or move it to a file"
            ) from None
        return source
    if place.endswith(".py") or "/" in place:
        file = _existing_file(place, base=base, use=use, setting=setting)
        source = FunctionSource(use, function, path=file, module=None, file=file, folder=file.parent)
    else:
        file = _module_file(place, base=base, use=use, setting=setting)
        source = FunctionSource(use, function, path=None, module=place, file=file, folder=base)
    if source.file is not None:
        _check_function(source, setting=setting, classes=classes)
    return source


def imported_beside(source: FunctionSource) -> list[Path]:
    """The files beside a function's own that importing it may read, from import to import; sorted. The text decides: a
    name that is put together while the program runs is not seen.
    """
    waiting = [source.file] if source.file else []
    waiting += _modules(source.folder, source.module.split(".")) if source.module not in (None, HERE) else []
    found = set[Path]()
    while waiting:
        file = waiting.pop()
        if file in found or (file != source.file and not file.is_relative_to(source.folder)):
            continue
        found.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue  # the worker says what is wrong with it
        for folder, names in _imports(tree, file=file, top=source.folder):
            waiting += _modules(folder, names)
    return sorted(found - {source.file})


def _imports(tree: ast.Module, *, file: Path, top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Every import of a file: the folder it begins in, and the names on its way."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((top, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = file.parents[min(node.level, len(file.parents)) - 1] if node.level else top
            way = node.module.split(".") if node.module else []
            if not way:  # from . import name: the package itself is read too
                yield folder, ["__init__"]
            yield from ((folder, [*way, alias.name]) for alias in node.names)


def _modules(folder: Path, names: list[str]) -> Iterator[Path]:
    """The source files of a module and of the packages it is in, as far as there are any below a folder."""
    for name in names:
        folder = folder / name
        file = folder / "__init__.py" if folder.is_dir() else folder.with_name(f"{name}.py")
        if file.is_file():
            yield file


def _existing_file(place: str, *, base: Path, use: str, setting: str) -> Path:
    file = base / Path(place).expanduser()
    if file.is_file():
        return file
    if file.exists():
        raise ValueError(f"{setting} '{use}': {file} is not a file.")
    beside = [path.name for path in file.parent.glob("*.py")] if file.parent.is_dir() else []
    raise ValueError(f"{setting} '{use}': there is no file {file}.{did_you_mean(file.name, beside)}")


def _module_file(module: str, *, base: Path, use: str, setting: str) -> Path | None:
    """The source of a module, found as an import would find it but without importing its parents."""
    if not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"{setting} '{use}': '{module}' is neither a .py file nor the name of a module.")
    first, *rest = module.split(".")
    spec = importlib.machinery.PathFinder.find_spec(first, [str(base)]) or importlib.util.find_spec(first)
    name = first
    for part in rest:
        folders = spec.submodule_search_locations if spec else None
        name = f"{name}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(name, folders) if folders else None
    if spec is None:
        raise ValueError(f"{setting} '{use}': no module '{name}' here or among the installed ones.")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _check_function(source: FunctionSource, *, setting: str, classes: bool) -> None:
    """Check that the source binds the name somewhere: by a definition, an assignment or an import."""
    assert source.file is not None
    try:
        tree = ast.parse(source.file.read_bytes(), filename=str(source.file))
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise ValueError(f"{setting} '{source.use}': {source.file}{line}: {error.msg}.") from error
    except (OSError, ValueError) as error:  # unreadable; a null byte
        raise ValueError(f"{setting} '{source.use}': {source.file}: {error}.") from error
    functions = [each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, *((ast.ClassDef,) if classes else ()))
    known = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            known.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id == "globals"):
            known.add(node.id)
        elif isinstance(node, definitions):
            known.add(node.name)
    if known & {source.function, "*", "__getattr__", "globals"}:  # the last three may give anything: the worker sees
        return
    there_are = f"Its functions: {', '.join(functions)}" if functions else "It has no functions"
    raise ValueError(
        f"{setting} '{source.use}': {source.file} has no function '{source.function}'."
        f"{did_you_mean(source.function, functions)} {there_are}."
    )
