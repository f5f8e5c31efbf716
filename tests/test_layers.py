"""Rules of the source: imports only go downward, no file is trusted, and what answers before torch never loads it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "tinyrl"

# Highest first. A room is a file or a folder of tinyrl/; it may import itself and rooms in a line below its own.
LEVELS = (
    ("api",),
    ("cli",),
    ("trainers", "tools"),
    ("training",),
    ("evaluation",),
    ("rollout",),
    ("generation", "rewards"),
    ("tasks",),
    ("environments", "models"),
    ("workers", "data"),
    ("runs", "starter"),
    ("config",),
    ("algorithms", "errors", "text"),
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms} | {"__main__": -1, "__init__": 99}
ALONE = {"algorithms", "text"}  # know nothing else of tinyrl


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Every module a file imports, at its top or inside a function, absolute, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides which room it reaches"
            assert node.module is not None
            inside = [f"tinyrl.{alias.name}" for alias in node.names] if node.module == "tinyrl" else [node.module]
            yield from ((name, node.lineno) for name in inside)


def rooms_imported(path: Path) -> Iterator[tuple[str, int]]:
    for name, line in imported(path):
        if name == "tinyrl":
            yield "__init__", line
        elif name.startswith("tinyrl."):
            room = name.split(".")[1]
            yield (room if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file() else "__init__"), line


def test_imports_go_down():
    up, together = [], []
    for path in files():
        room = room_of(path)
        others = [(other, line) for other, line in rooms_imported(path) if other != room]
        place = path.relative_to(PACKAGE.parent)
        up += [f"{place}:{line} imports {other}" for other, line in others if LEVEL_OF[other] <= LEVEL_OF[room]]
        together += [f"{place}:{line} imports {other}" for other, line in others if room in ALONE]
    assert not up
    assert not together


def test_algorithms_know_torch_and_nothing_else():
    allowed = {"torch", *sys.stdlib_module_names}
    for path in files():
        if room_of(path) == "algorithms":
            for name, line in imported(path):
                known = name.startswith("tinyrl.algorithms") or name.split(".")[0] in allowed
                assert known, f"{path}:{line}: {name}"


HEAVY = {"torch", "transformers", "peft", "accelerate", "datasets", "matplotlib", "numpy", "safetensors"}


def modules_after(statements: str) -> set[str]:
    """Top-level modules that a fresh Python has loaded after some statements, including the interpreter's own."""
    code = f"{statements}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    return {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}


def test_what_answers_before_torch_does_not_load_it():
    modules = ["cli.commands", "cli.preflight", "config.recipe", "data.readers", "data.rows", "tasks", "tasks.grading"]
    modules += ["runs.run_dir", "runs.signals", "runs.records", "runs.diagnosis", "tools.report"]
    modules += ["tools.export.bundle", "evaluation.targets", "api", "workers.loading"]
    loaded = modules_after("import " + ", ".join(f"tinyrl.{module}" for module in modules))
    assert "tinyrl" in loaded
    assert not loaded & HEAVY


def test_checking_a_run_does_not_load_torch():
    """Functions import too: everything `tinyrl train` does before it loads a model."""
    loaded = modules_after(
        "from tinyrl.config.recipe import load_config\n"
        "from tinyrl.cli.preflight import check_before_loading, check_evaluation\n"
        "from tinyrl.runs.run_dir import check_new_run\n"
        "check_before_loading(load_config('grpo', None, overrides=['task.name=sort']))\n"
        "from tinyrl.evaluation.targets import Asked\n"
        "check_evaluation('starter', Asked(task='sort'), vs='base')\n"
        "check_new_run('runs', name=None, overwrite=False)"
    )
    assert not loaded & HEAVY


def test_help_does_not_load_torch():
    for command in (
        ["--help"],
        ["train", "--help"],
        ["eval", "--help"],
        ["doctor", "--help"],
        ["chat", "--help"],
        ["list", "tasks"],
        ["list", "recipes"],
        ["list", "settings"],
    ):
        start = f"import sys\nsys.argv = {['tinyrl', *command]!r}\nfrom tinyrl.cli.commands import app\n"
        script = f"{start}app(standalone_mode=False)"
        assert not modules_after(script) & HEAVY, command


# Arguments by which a library runs code that comes with a file, or with a model; people say so on the command line.
TRUSTING = {"weights_only": False, "allow_pickle": True, "trust_remote_code": True}


def test_no_file_is_trusted():
    found = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                for word in node.keywords:
                    if isinstance(word.value, ast.Constant) and word.value.value is TRUSTING.get(word.arg or "", ...):
                        found.append(f"{path}:{node.lineno}: {word.arg}={word.value.value}")
    assert not found
