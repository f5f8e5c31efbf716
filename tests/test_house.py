"""Rules of the house that ruff cannot say: what a reader of the source can check by eye, checked."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tinyrl"
FILES = sorted(PACKAGE.rglob("*.py"))
# Arguments by which a library runs code that comes with a file, or with a model; people say so on the command line.
TRUSTING = {"weights_only": False, "allow_pickle": True, "trust_remote_code": True}
LONGEST_FUNCTION = 60

files = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


def trusts_files(source: str) -> Iterator[str]:
    """Calls with a trusting argument written out, with the line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            for word in node.keywords:
                if isinstance(word.value, ast.Constant) and word.value.value is TRUSTING.get(word.arg or "", ...):
                    yield f"{node.lineno}: {word.arg}={word.value.value}"


def borrowed_private_names(source: str, room: str) -> Iterator[str]:
    """Names with an underscore that are imported from another room, with the line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tinyrl":
            of_room = (node.module or "").split(".")[1:2] == [room]
            names = [alias.name for alias in node.names if alias.name.startswith("_") and alias.name != "__version__"]
            yield from (f"{node.lineno}: {name} of {node.module}" for name in names if not of_room)


def long_functions(source: str) -> Iterator[str]:
    """Functions of more lines than a reader holds in mind."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST_FUNCTION:
                yield f"{node.lineno}: {node.name} has {length} lines"


@files
def test_no_file_is_trusted_and_no_private_name_borrowed(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    found = [*trusts_files(source), *borrowed_private_names(source, room), *long_functions(source)]
    assert not found, "\n".join(found)


def test_the_rules_find_what_they_are_for() -> None:
    assert list(trusts_files("model.load(x, weights_only=False)")) == ["1: weights_only=False"]
    assert not list(trusts_files("model.load(x, weights_only=True, trust_remote_code=trust)"))
    borrowed = "from tinyrl.runs.run_dir import _write"
    assert list(borrowed_private_names(borrowed, "cli")) == ["1: _write of tinyrl.runs.run_dir"]
    assert not list(borrowed_private_names(borrowed, "runs"))
    assert list(long_functions("def f():\n" + "    x = 1\n" * 60)) == ["1: f has 61 lines"]
    assert not list(long_functions("def f():\n" + "    x = 1\n" * 59))


def test_no_file_depends_on_a_machine() -> None:
    machines = re.compile(r"/(home|root|work|tmp|Users)/|\.\./shared")
    assert not [str(path) for path in FILES if machines.search(path.read_text(encoding="utf-8"))]


def test_no_drawers_for_odds_and_ends() -> None:
    assert not {"utils.py", "util.py", "base.py", "helpers.py", "common.py", "misc.py"} & {path.name for path in FILES}
