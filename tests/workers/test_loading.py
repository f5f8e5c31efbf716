"""Lookup of functions without running them; a notebook's are called in the process of the run, by name."""

import functools
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import varied_reward
from tinyrl.process.errors import CodeChanged
from tinyrl.rewards.functions import FunctionReward
from tinyrl.workers import loading
from tinyrl.workers.loading import parse_use, use_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(
        "raise RuntimeError('reading must not run me')\n"
        "from os.path import join as imported\n"
        "def length(prompts, completions, **columns):\n    return []\n"
        "async def judge(prompts, completions, **columns):\n    return []\n"
        "assigned = length\n"
    )
    package = tmp_path / "people" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "people" / "__init__.py").write_text("raise RuntimeError('looking must not import me')\n")
    (package / "__init__.py").write_text("")
    (package / "scores.py").write_text("def deep(prompts, completions, **columns):\n    return []\n")
    (tmp_path / "more.py").write_text("from rewards import *\n")
    return tmp_path


def test_a_function_is_found_without_running_its_file_or_importing_its_package(folder: Path):
    for use in ("rewards.py:length", "rewards.py:assigned", "rewards.py:imported", f"{folder}/rewards.py:judge"):
        source = parse_use(use)
        assert (source.module, source.file, source.folder) == (None, folder / "rewards.py", folder)
    assert parse_use("more.py:length").function == "length"  # what * gives is left to the worker
    source = parse_use("people.inner.scores:deep")
    assert (source.module, source.file) == ("people.inner.scores", folder / "people" / "inner" / "scores.py")
    assert "people" not in sys.modules
    assert parse_use("json.encoder:py_encode_basestring").module == "json.encoder"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("code", "files", "imported"),
    [
        ("import json\nfrom h import *\nimport k", {"h.py": "", "k.py": "", "near.py": ""}, ["h.py", "k.py"]),
        ("import h", {"h.py": "import k", "k.py": "import late"}, ["h.py", "k.py"]),
        (
            "from lib.rules import x",
            {"lib/__init__.py": "from . import base", "lib/base.py": "", "lib/rules.py": "x = 1", "lib/near.py": ""},
            ["lib/__init__.py", "lib/base.py", "lib/rules.py"],
        ),
        ("from lib import rules", {"lib/rules.py": "from .base import x", "lib/base.py": "x = 1"},
         ["lib/base.py", "lib/rules.py"]),  # without __init__.py
        ("import importlib; importlib.import_module('h')", {"h.py": ""}, ["h.py"]),
        ("import sys; sys.path.append('away'); import h", {"away/h.py": ""}, ["away/h.py"]),
        ("if False:\n    import h", {"h.py": ""}, []),
        ("import tinyrl.text", {"tinyrl/__init__.py": "", "tinyrl/text.py": "", "h.py": ""}, []),
    ],
)  # fmt: skip
def test_the_modules_that_a_file_imports_are_known_when_it_is_loaded(
    folder: Path, code: str, files: dict[str, str], imported: list[str]
):
    write(folder, {"late.py": f"{code}\ndef f(completions):\n    return [1.0]\n", **files})
    assert loaded("late.py:f") == sorted(folder / name for name in ["late.py", *imported])


def loaded(use: str) -> list[Path]:
    """The files that a worker imports for a function."""
    with FunctionReward(use) as reward:
        reward.start()
        return sorted(reward.code.files)


@pytest.mark.parametrize(("place", "found"), [("src", True), ("venv/lib/python3/site-packages", False)])
def test_a_module_elsewhere_is_a_persons_unless_it_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, found: bool
):
    """The function's own, and one that a file imports."""
    write(folder / place, {"away/r.py": "from away.h import x\ndef f(completions): ...\n", "away/h.py": "x = 1"})
    write(folder, {"near.py": "from away.h import x\ndef f(completions): ...\n"})
    monkeypatch.syspath_prepend(folder / place)
    helper, rule = (folder / place / "away" / name for name in ("h.py", "r.py"))
    assert loaded("away.r:f") == ([helper, rule] if found else [])
    assert loaded("near.py:f") == sorted([folder / "near.py", *([helper] if found else [])])


def test_the_standard_library_is_not_a_persons(folder: Path):
    assert loaded("json.encoder:py_encode_basestring") == []


def test_a_module_that_a_call_imports_is_known_from_then_on(folder: Path):
    write(folder, {"h.py": "WORTH = 2.0\n", "late.py": "def f(completions):\n    import h\n    return [h.WORTH]\n"})
    with FunctionReward("late.py:f") as reward:
        reward.start()
        assert sorted(reward.code.files) == [folder / "late.py"]
        assert reward(["p"], ["a"], {}).values == [2.0]
        assert sorted(reward.code.files) == [folder / "h.py", folder / "late.py"]
        reward.close()
        write(folder, {"h.py": "WORTH = 5.0\n"})
        with pytest.raises(CodeChanged, match=r"h\.py"):
            reward(["p"], ["a"], {})


def test_a_module_that_a_call_writes_itself_is_not_a_persons(folder: Path):
    code = """
        def f(completions):
            import importlib, sys
            open("answer.py", "w").write(completions[0])
            sys.path.append(".")
            importlib.invalidate_caches()
            return [float(importlib.import_module("answer").x)]
    """
    write(folder, {"late.py": textwrap.dedent(code)})
    with FunctionReward("late.py:f") as reward:
        assert reward(["p"], ["x = 3"], {}).values == [3.0]
        assert sorted(reward.code.files) == [folder / "late.py"]


@pytest.mark.parametrize(
    ("use", "named"),
    [
        ("rewards.py", "'file.py:function'"),
        ("reward.py:length", "reward.py"),
        ("rewards.py:lenght", "Did you mean `length`?"),
        ("people/:f", "people"),
        ("no-module:f", "'no-module'"),
        ("people.inner.scores:deeep", "Did you mean `deep`?"),
        ("broken.py:f", "broken.py, line 3"),
        ("latin.py:f", "latin.py"),
        ("__main__:gone", "notebook"),
    ],
)
def test_a_wrong_name_or_source_is_refused_with_the_nearest_name_or_the_line(folder: Path, use: str, named: str):
    (folder / "broken.py").write_text("x = 1\n\nif x\n")
    (folder / "latin.py").write_bytes(b"f = '\xff'")
    with pytest.raises(ValueError, match=rf"^reward\.functions: use '{use}'") as caught:
        parse_use(use)
    assert named in str(caught.value)


class Judge:
    def __call__(self, prompts: list[str], completions: list[str], *, answer: list[str]) -> list[float]:
        self.seen = answer
        if "x" in answer and len(answer) > 1:
            raise RuntimeError("a bad row")
        return [float(pair[0] == pair[1]) for pair in zip(completions, answer, strict=True)]


async def score_by(completions: list[str], length: int, **columns: Any) -> list[float]:
    return [len(text) / length for text in completions]


def test_anything_that_can_be_called_by_name_is_a_function_and_an_object_keeps_its_state(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(loading, "_defined", {})
    judge = Judge()
    use = use_of(judge)
    assert use == "__main__:judge"
    with FunctionReward(use) as reward:
        call = reward(["p", "p"], ["a", "b"], {"answer": ["a", "x"]})
        assert (call.values, call.failures, judge.seen) == ([1.0, 0.0], [], ["x"])
        assert "a bad row" in str(reward.retried)
        with pytest.raises(ValueError, match="takes a column 'answer'"):
            reward(["p"], ["a"], {})
    assert use_of(varied_reward.variety) == f"{varied_reward.__file__}:variety"
    with FunctionReward(use_of(functools.partial(score_by, length=2))) as reward:
        assert reward(["p"], ["a"], {}).values == [0.5]
    with pytest.raises(ValueError, match="defined by name"):
        use_of(lambda completions: [])
