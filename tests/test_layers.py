"""Rules of the source: imports only go downward, no file is trusted, and what answers before torch never loads it."""

import ast
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
    ("generation", "rewards"),
    ("starter",),
    ("tasks",),
    ("environments", "models"),
    ("workers", "data"),
    ("runs",),
    ("config",),
    ("algorithms", "process", "text"),
    ("__init__",),
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
# Arguments by which a library runs code that comes with a file, or with a model; people say so on the command line.
TRUSTING = {"weights_only": False, "allow_pickle": True, "trust_remote_code": True}
FILES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(name: str) -> str:
    """tinyrl.config.recipe -> config; a name of the package itself is its __init__'s."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL_OF else "__init__"


def test_imports_go_down() -> None:
    """At the top of a file or inside a function; algorithms/ knows torch and the standard library only."""
    wrong = []
    for path, tree in FILES.items():
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(tree):
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


def loaded_by(tree: ast.AST) -> Iterator[str]:
    """Yield what is imported, at the top of a file or in a function, but for what is under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            if not for_types:
                yield from loaded_by(node)


def circles(files: dict[str, ast.Module]) -> list[str]:
    """Return the modules that are in a circle of imports."""
    needs = {name: {*loaded_by(tree)} & files.keys() - {name} for name, tree in files.items()}
    while free := [name for name, others in needs.items() if not others & needs.keys()]:
        for name in free:
            del needs[name]
    used = {other for others in needs.values() for other in others}
    return sorted(needs.keys() & used)


def test_no_file_needs_one_that_needs_it() -> None:
    assert circles({module_of(path): tree for path, tree in FILES.items()}) == []


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
        for path, tree in FILES.items()
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
from tinyrl.runs.run_dir import check_new_run
import tinyrl.api, tinyrl.tasks.grading, tinyrl.runs.findings, tinyrl.tools.report
prepare(load_config('grpo', None, overrides=['task.name=sort']))
prepare_evaluation('starter', Asked(task='sort'), vs='base')
check_new_run('runs', name=None, overwrite=False)
"""
COMMANDS = ("--help", "train --help", "eval --help", "doctor --help", "chat --help", "list tasks", "list settings")
COMMAND = "import sys\nsys.argv = ['tinyrl', *{!r}]\nfrom tinyrl.cli.commands import app\napp(standalone_mode=False)"


@pytest.mark.parametrize("code", [CHECKED, *(COMMAND.format(command.split()) for command in COMMANDS)], ids=range(8))
def test_what_answers_before_torch_does_not_load_it(code: str) -> None:
    """Functions import too: all that `tinyrl train` and `eval` do before they load a model, and every help."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    loaded = {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert "tinyrl" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize(("module", "most"), [("policy_loss", 12), ("grpo", 45)])
@pytest.mark.wide
def test_a_method_needs_few_modules(module: str, most: int) -> None:
    code = f"import sys, tinyrl.training.{module}; print(*(m for m in sys.modules if m.split('.')[0] == 'tinyrl'))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(found) <= most, sorted(found)
