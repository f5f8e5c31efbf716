"""Lookup of functions without running them; a notebook's are called in the process of the run, by name."""

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import varied_reward
from tinyrl.rewards.functions import FunctionReward
from tinyrl.workers import loading
from tinyrl.workers.loading import imported_beside, parse_use, use_of


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
        ("import json\nfrom h import *\ndef g():\n    import k", {"h.py": "", "k.py": ""}, ["h.py", "k.py"]),
        ("import re, h, k as j", {"h.py": "", "k.py": "", "near.py": ""}, ["h.py", "k.py"]),
        ("import h", {"h.py": "from k import x", "k.py": "import late, h"}, ["h.py", "k.py"]),
        (
            "from lib.rules import x",
            {"lib/__init__.py": "from . import base", "lib/base.py": "", "lib/rules.py": "", "lib/near.py": ""},
            ["lib/__init__.py", "lib/base.py", "lib/rules.py"],
        ),
        (
            "from lib import rules",
            {"lib/rules.py": "from .base import x", "lib/base.py": ""},
            ["lib/base.py", "lib/rules.py"],
        ),
        ("from lib.rules import x", {"lib.py": "", "lib/near.py": ""}, ["lib.py"]),
        (
            "import lib.a.b",
            {"lib/a/b.py": "from ..c import x\nfrom ....late import f", "lib/c.py": ""},
            ["lib/a/b.py", "lib/c.py"],
        ),
        ("import h, k", {"h.py": "if x\n", "k.py": "x = '\0'"}, ["h.py", "k.py"]),
        ("import tinyrl.text", {"tinyrl/__init__.py": "", "tinyrl/text.py": ""}, []),
    ],
)
def test_files_that_a_file_imports_from_its_folder_are_found(
    folder: Path, code: str, files: dict[str, str], imported: list[str]
):
    write(folder, {"late.py": f"{code}\nf = 1\n", **files})
    assert imported_beside(parse_use("late.py:f")) == [folder / name for name in imported]


@pytest.mark.parametrize("code", ["from .h import x", "from pkg.h import x", "from . import h"])
def test_files_that_a_module_imports_from_its_package_are_found(folder: Path, code: str):
    write(folder, {"pkg/__init__.py": "", "pkg/r.py": f"{code}\nf = 1\n", "pkg/h.py": "", "h.py": ""})
    assert imported_beside(parse_use("pkg.r:f")) == [folder / "pkg" / "__init__.py", folder / "pkg" / "h.py"]


@pytest.mark.parametrize(("place", "found"), [("src", True), ("site-packages", False)])
def test_a_package_elsewhere_is_followed_unless_it_is_an_installed_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, found: bool
):
    write(folder / place, {"away/__init__.py": "", "away/r.py": "from away.h import x\nf = 1\n", "away/h.py": ""})
    monkeypatch.syspath_prepend(folder / place)
    files = [folder / place / "away" / "__init__.py", folder / place / "away" / "h.py"]
    assert imported_beside(parse_use("away.r:f")) == (files if found else [])


def test_the_standard_library_is_not_followed(folder: Path):
    assert imported_beside(parse_use("json.encoder:JSONEncoder")) == []


def test_what_a_file_imports_of_a_gone_file_is_nothing(folder: Path):
    source = parse_use("more.py:length")
    (folder / "more.py").unlink()
    assert imported_beside(source) == []


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
    assert imported_beside(parse_use(use)) == []
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
