"""Reward function lookup, without running people's code, and where there is no such function."""

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
    (tmp_path / "more.py").write_text("from rewards import *\n")
    return tmp_path


def test_a_function_is_found_without_running_its_file_or_importing_its_package(folder: Path):
    for use in ("rewards.py:length", "rewards.py:judge", "rewards.py:assigned", "rewards.py:imported"):
        source = parse_use(use)
        assert (source.module, source.file, source.folder) == (None, folder / "rewards.py", folder)
    assert parse_use(f"{folder}/rewards.py:length").file == folder / "rewards.py"
    assert parse_use("more.py:length").function == "length"  # what * gives is left to the worker
    source = parse_use("people.inner.scores:deep")
    assert (source.module, source.file) == ("people.inner.scores", folder / "people" / "inner" / "scores.py")
    assert "people" not in sys.modules
    assert parse_use("json.encoder:py_encode_basestring").module == "json.encoder"


def test_what_a_file_imports_from_beside_it_is_found_from_import_to_import(folder: Path):
    (folder / "rewards.py").write_text(
        "import json, torch, helper\nfrom people.inner import scores\n\n\n"
        "def late(completions):\n    import lazy\n    return lazy.of(completions)\n"
    )
    (folder / "helper.py").write_text("import rewards, broken, namespace.deep\n")  # a circle, and a file with a mistake
    (folder / "broken.py").write_text("def (:\n")
    (folder / "namespace").mkdir()
    (folder / "people" / "inner" / "scores.py").write_text("from . import near\nfrom ..upper import x\ndeep = 1\n")
    for empty in ("lazy.py", "unused.py", "namespace/deep.py", "people/inner/near.py", "people/upper.py"):
        (folder / empty).write_text("")
    inner = {f"people/{name}.py" for name in ("__init__", "upper", "inner/__init__", "inner/near", "inner/scores")}
    files = {"helper.py", "broken.py", "lazy.py", "namespace/deep.py", *inner}
    assert {str(path.relative_to(folder)) for path in imported_beside(parse_use("rewards.py:late"))} == files
    found = {str(path.relative_to(folder)) for path in imported_beside(parse_use("people.inner.scores:deep"))}
    assert found == inner - {"people/inner/scores.py"}
    assert imported_beside(parse_use("json.encoder:py_encode_basestring")) == []


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("rewards.py", "'file.py:function'"),
        ("reward.py:length", "{folder}/reward.py. Did you mean `rewards.py`?"),
        ("rewards.py:lenght", "Did you mean `length`? Its functions: length, judge."),
        ("people/:f", "{folder}/people"),
        ("no-module:f", "'no-module'"),
        ("people.inner.scores:deeep", "Did you mean `deep`?"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(folder: Path, use: str, said: str):
    with pytest.raises(ValueError, match=r"^reward\.functions: use ") as caught:
        parse_use(use)
    assert said.format(folder=folder) in str(caught.value)
    assert use in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"x = 1\n\nif x\n    pass\n", "broken.py, line 3"),
        (b"x = '\xff'\n", "broken.py"),
        (b"x = 1\0\n", "broken.py"),
        (b"", "has no function 'f'"),
    ],
)
def test_source_that_does_not_parse_is_refused_with_its_line(folder: Path, content: bytes, said: str):
    (folder / "broken.py").write_bytes(content)
    with pytest.raises(ValueError, match=r"^reward\.functions: use 'broken\.py:f'") as caught:
        parse_use("broken.py:f")
    assert said in str(caught.value)
