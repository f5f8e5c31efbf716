"""Rules of the source: imports only go downward, no file is trusted, and what answers before torch never loads it."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "tinyrl"
# Highest first. A room is a file or a folder of tinyrl/; it may import itself and rooms in a line below its own.
LEVELS = (
    ("__main__",),
    ("api",),
    ("cli",),
    ("tools",),
    ("training",),
    ("evaluation",),
    ("rollout",),
    ("endpoint",),
    ("generation", "rewards"),
    ("starter",),
    ("tasks",),
    ("environments", "models"),
    ("workers", "data"),
    ("runs",),
    ("config",),
    ("urls",),
    ("algorithms", "formatting", "nan", "process", "text"),
    ("__init__",),
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
# Arguments by which a library runs code that comes with a file, or with a model; people say so on the command line.
TRUSTING = {"weights_only": False, "allow_pickle": True, "trust_remote_code": True}


@functools.cache
def sources() -> dict[Path, ast.Module]:
    """Parse the package; once, in the process that runs these tests."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(name: str) -> str:
    """tinyrl.config.recipe -> config; a name of the package itself is its __init__'s."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL_OF else "__init__"


def test_imports_go_down() -> None:
    """At the top of a file or inside a function; algorithms/ knows torch and the standard library only."""
    wrong = []
    for path, tree in sources().items():
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(tree):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.module, f"{path}:{node.lineno}: a relative import hides which room it reaches"
                names = [f"tinyrl.{a.name}" for a in node.names] if node.module == "tinyrl" else [node.module]
            for name in names:
                top, other = name.split(".")[0], room_of(name)
                up = top == "tinyrl" and other != room and LEVEL_OF[other] <= LEVEL_OF[room]
                known = top in ("torch", *sys.stdlib_module_names) or name.startswith("tinyrl.algorithms")
                if up or (room == "algorithms" and not known):
                    wrong.append(f"{path.relative_to(PACKAGE.parent)}:{getattr(node, 'lineno', 0)} imports {name}")
    assert not wrong


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def loaded_by(tree: ast.AST, *, in_functions: bool = True) -> Iterator[str]:
    """Yield what is imported, at the top of a file or in a function, but for what is under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if not for_types and (in_functions or not is_function):
                yield from loaded_by(node, in_functions=in_functions)


def circles(files: dict[str, ast.Module]) -> list[str]:
    """Return the modules that are in a circle of imports."""
    needs = {name: {*loaded_by(tree)} & files.keys() - {name} for name, tree in files.items()}
    while free := [name for name, others in needs.items() if not others & needs.keys()]:
        for name in free:
            del needs[name]
    used = {other for others in needs.values() for other in others}
    return sorted(needs.keys() & used)


def test_no_file_needs_one_that_needs_it() -> None:
    assert circles({module_of(path): tree for path, tree in sources().items()}) == []


@pytest.mark.parametrize(
    ("back", "found"),
    [
        ("import tinyrl.a", ["tinyrl.a", "tinyrl.b"]),
        ("from tinyrl import a", ["tinyrl.a", "tinyrl.b"]),
        ("if TYPE_CHECKING:\n    import tinyrl.a", []),
        ("def f():\n    import tinyrl.a", ["tinyrl.a", "tinyrl.b"]),
    ],
)
def test_a_circle_is_found(back: str, found: list[str]) -> None:
    files = {"tinyrl.a": "from tinyrl.b import x", "tinyrl.b": back, "tinyrl.c": "import tinyrl.a"}
    assert circles({name: ast.parse(text) for name, text in files.items()}) == found


def test_no_file_is_trusted() -> None:
    keywords = (
        (path, node.lineno, word.arg, word.value.value)
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for word in node.keywords
        if isinstance(word.value, ast.Constant)
    )
    assert not [found for found in keywords if found[3] is TRUSTING.get(found[2] or "", ...)]


HEAVY = {"torch", "transformers", "peft", "accelerate", "datasets", "matplotlib", "numpy", "safetensors"}
CHECKED = """
from tinyrl.config.recipe import load_config
from tinyrl.evaluation.prepared import prepare_evaluation
from tinyrl.evaluation.targets import Asked
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.resolve import model_facts
from tinyrl.runs.run_dir import check_new_run
import tinyrl.api, tinyrl.tasks.grading, tinyrl.runs.findings, tinyrl.tools.report
prepare(load_config('grpo', None, overrides=['task.name=sort'], facts=model_facts))
prepare_evaluation('starter', Asked(task='sort'), vs='base')
check_new_run('runs', name=None, overwrite=False)
"""
COMMANDS = ("--help", "train --help", "eval --help", "doctor --help", "chat --help", "list tasks", "list settings")
COMMAND = """
import sys
from tinyrl.cli.commands import app
sys.argv = ['tinyrl', *{!r}]
app(standalone_mode=False)
"""


def test_what_answers_before_torch_does_not_load_it() -> None:
    """Functions import too: all that `tinyrl train` and `eval` do before they load a model, and every help; one after
    the other in one process.
    """
    parts = {"a run": CHECKED} | {command: COMMAND.format(command.split()) for command in COMMANDS}
    after_each = [f"{code}\nimport sys\nprint('LOADED', *sys.modules)\n" for code in parts.values()]
    done = subprocess.run(
        [sys.executable, "-c", "".join(after_each)], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    found = [{*line.split()} for line in done.stdout.splitlines() if line.startswith("LOADED ")]
    assert [name for name, loaded in zip(parts, found, strict=True) if HEAVY & loaded] == []
    assert "tinyrl.cli.commands" in found[-1]


def modules_with(name: str) -> set[str]:
    """Return the modules of ours that importing this one imports: itself, its packages, and what their files name."""
    files = {module_of(path): tree for path, tree in sources().items()}
    found = set[str]()
    waiting = [name]
    while waiting:
        module = waiting.pop()
        if module in files and module not in found:
            found.add(module)
            parts = module.split(".")
            waiting += [".".join(parts[:count]) for count in range(1, len(parts))]
            waiting += loaded_by(files[module], in_functions=False)
    return found


METHODS = pytest.mark.parametrize(("module", "most"), [("policy_loss", 12), ("grpo", 45)])


@METHODS
def test_a_method_needs_few_modules(module: str, most: int) -> None:
    found = modules_with(f"tinyrl.training.{module}")
    assert 1 < len(found) <= most, sorted(found)


@METHODS
@pytest.mark.slow
def test_modules_are_counted_as_python_imports_them(module: str, most: int) -> None:
    code = f"import sys, tinyrl.training.{module}; print(*(m for m in sys.modules if m.split('.')[0] == 'tinyrl'))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {*found} == modules_with(f"tinyrl.training.{module}")
