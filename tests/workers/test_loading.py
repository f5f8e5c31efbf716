"""Reward function lookup, and the messages where there is no such function."""

import subprocess
import sys
from pathlib import Path

import pytest

from tinyrl.workers.loading import imported_beside, parse_use


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
    return tmp_path


@pytest.mark.parametrize("function", ["length", "judge", "assigned", "imported"])
def test_a_function_in_a_file_is_found_without_running_the_file(folder: Path, function: str):
    source = parse_use(f"rewards.py:{function}")
    assert (source.function, source.path, source.module) == (function, folder / "rewards.py", None)
    assert source.folder == folder


def test_an_absolute_path_needs_no_base(folder: Path):
    assert parse_use(f"{folder}/rewards.py:length").path == folder / "rewards.py"


def test_a_function_in_a_module_is_found_without_importing_its_package(folder: Path):
    source = parse_use("people.inner.scores:deep")
    assert (source.path, source.module) == (None, "people.inner.scores")
    assert source.file == folder / "people" / "inner" / "scores.py"
    assert "people" not in sys.modules


def test_an_installed_module_is_found(folder: Path):
    assert parse_use("json.encoder:py_encode_basestring").module == "json.encoder"


def test_what_a_file_imports_from_beside_it_is_found_from_import_to_import(folder: Path):
    (folder / "rewards.py").write_text(
        "import json, torch, helper\nfrom people.inner import scores\n\n\n"
        "def late(completions):\n    import lazy\n    return lazy.of(completions)\n"
    )
    (folder / "helper.py").write_text("import rewards, broken, namespace.deep\n")  # a circle, and a file with a mistake
    (folder / "broken.py").write_text("def (:\n")
    (folder / "lazy.py").write_text("")
    (folder / "unused.py").write_text("")
    (folder / "namespace").mkdir()
    (folder / "namespace" / "deep.py").write_text("")
    (folder / "people" / "inner" / "scores.py").write_text("from . import near\nfrom ..upper import x\n")
    (folder / "people" / "inner" / "near.py").write_text("")
    (folder / "people" / "upper.py").write_text("x = 1\n")
    found = imported_beside(parse_use("rewards.py:late"))
    inner = {f"people/{name}.py" for name in ("__init__", "upper", "inner/__init__", "inner/near", "inner/scores")}
    files = {"helper.py", "broken.py", "lazy.py", "namespace/deep.py", *inner}
    assert {str(path.relative_to(folder)) for path in found} == files


def test_a_module_comes_with_the_packages_it_is_in(folder: Path):
    found = imported_beside(parse_use("people.inner.scores:deep"))
    assert [str(path.relative_to(folder)) for path in found] == ["people/__init__.py", "people/inner/__init__.py"]
    assert imported_beside(parse_use("json.encoder:py_encode_basestring")) == []


def test_a_module_that_gives_more_than_can_be_read_is_left_to_the_worker(folder: Path):
    (folder / "more.py").write_text("from rewards import *\n")
    (folder / "chosen.py").write_text("if True:\n    def one(prompts, completions):\n        return []\n")
    assert parse_use("more.py:length").function == "length"
    assert parse_use("chosen.py:one").function == "one"


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("rewards.py", "must be 'file.py:function' or 'package.module:function'"),
        ("rewards.py:", "must be 'file.py:function'"),
        (":length", "must be 'file.py:function'"),
        ("reward.py:length", "there is no file {folder}/reward.py. Did you mean `rewards.py`?"),
        ("nowhere/rewards.py:length", "there is no file {folder}/nowhere/rewards.py."),
        ("rewards.py:lenght", "has no function 'lenght'. Did you mean `length`? Its functions: length, judge."),
        ("people/:f", "{folder}/people is not a file"),
        ("no-module:f", "'no-module' is neither a .py file nor the name of a module"),
        ("nomodule:f", "no module 'nomodule'"),
        ("people.innner.scores:deep", "no module 'people.innner"),
        ("people.inner.scores:deeep", "has no function 'deeep'. Did you mean `deep`?"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, use: str, said: str):
    with pytest.raises(ValueError, match=r"^reward\.functions: use ") as caught:
        parse_use(use)
    assert said.format(folder=folder) in str(caught.value)
    assert use in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"def f(:\n", "broken.py, line 1: invalid syntax"),
        (b"x = 1\n\nif x\n    pass\n", "broken.py, line 3: expected ':'"),
        (b"x = '\xff'\n", "broken.py"),
        (b"x = 1\0\n", "null bytes"),
        (b"", "has no function 'f'. It has no functions."),
    ],
)
def test_source_that_does_not_parse_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, said: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_bytes(content)
    with pytest.raises(ValueError, match=r"^reward\.functions: use 'broken\.py:f'") as caught:
        parse_use("broken.py:f")
    assert said in str(caught.value)


def test_no_torch_is_needed():
    code = "import sys, tinyrl.rewards.functions, tinyrl.rewards.functions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
