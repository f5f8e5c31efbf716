"""Rules of the house that a reader of the source can check: nothing that runs foreign code, no swallowed errors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tinyrl"
FILES = sorted(PACKAGE.rglob("*.py"))

# Other people's code may raise anything, and what it raised is the answer.
BROAD_EXCEPT_ALLOWED = {"rewards/worker.py", "runs/tracking.py"}
FOREIGN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
# Attributes of a module that unpickle, or build any object a file asks for.
UNSAFE = {
    "torch": {"load"},
    "numpy": {"load", "fromfile"},
    "np": {"load", "fromfile"},
    "yaml": {"load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all", "Loader", "FullLoader"}
    | {"UnsafeLoader"},
    "os": {"system", "popen"},
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
KEYWORDS = {"shell": True, "weights_only": False, "allow_pickle": True, "trust_remote_code": True}


def problems(source: str, name: str = "example.py") -> Iterator[str]:
    """What a file does that the house forbids, with the line."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (f"{line}: imports {bad}" for bad in _imported(node))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in UNSAFE.get(node.value.id, ()):
                yield f"{line}: {node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
                yield f"{line}: {node.func.id}()"
            for word in node.keywords:
                if isinstance(word.value, ast.Constant) and word.value.value is KEYWORDS.get(word.arg or "", ...):
                    yield f"{line}: {word.arg}={word.value.value}"
        elif isinstance(node, ast.ExceptHandler) and name not in BROAD_EXCEPT_ALLOWED and _is_broad(node):
            yield f"{line}: a bare or broad except"


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] in FOREIGN_MODULES]
    module = (node.module or "").split(".")[0]
    named = [f"{module}.{alias.name}" for alias in node.names if alias.name in UNSAFE.get(module, ())]
    return [module] if module in FOREIGN_MODULES else named


def _is_broad(handler: ast.ExceptHandler) -> bool:
    """Catches everything, and does not raise it again as its last act."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {kind.id for kind in kinds if isinstance(kind, ast.Name)}
    raised = isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None
    return (handler.type is None or bool(names & {"Exception", "BaseException"})) and not raised


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_package_runs_no_foreign_code_and_swallows_no_error(path: Path):
    found = list(problems(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix()))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x.bin')",
        "from torch import load",
        "import yaml\nyaml.load('a: 1', Loader=yaml.SafeLoader)",
        "from yaml import unsafe_load",
        "eval('1')",
        "exec('x = 1')",
        "subprocess.run('ls', shell=True)",
        "os.system('ls')",
        "np.load('x.npy')",
        "model.load(weights_only=False)",
        "try:\n    x\nexcept:\n    pass",
        "try:\n    x\nexcept Exception:\n    pass",
        "try:\n    x\nexcept (ValueError, BaseException) as error:\n    print(error)",
    ],
)
def test_the_rules_find_what_they_are_for(source: str):
    assert list(problems(source))


@pytest.mark.parametrize(
    "source",
    [
        "import yaml\nyaml.safe_load('a: 1')",
        "model.eval()",
        "spec.loader.exec_module(module)",
        "subprocess.run(['ls'])",
        "try:\n    x\nexcept BaseException:\n    clean_up()\n    raise",
        "try:\n    x\nexcept (ValueError, OSError):\n    pass",
    ],
)
def test_the_rules_leave_the_rest_alone(source: str):
    assert not list(problems(source))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_says_what_it_is_and_depends_on_no_machine(path: Path):
    source = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source)), "no module docstring"
    assert not re.search(r"/(home|root|work|tmp|Users)/|\.\./shared", source)


def test_no_drawers_for_odds_and_ends():
    assert not {"utils.py", "util.py", "base.py", "helpers.py", "common.py", "misc.py"} & {path.name for path in FILES}
