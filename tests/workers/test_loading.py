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


def test_a_wrong_name_or_source_is_refused_with_the_nearest_name_or_the_line(folder: Path):
    for use, named in [
        ("rewards.py", "'file.py:function'"),
        ("reward.py:length", f"{folder}/reward.py. Did you mean `rewards.py`?"),
        ("rewards.py:lenght", "Did you mean `length`? Its functions: length, judge."),
        ("people/:f", f"{folder}/people"),
        ("no-module:f", "'no-module'"),
        ("people.inner.scores:deeep", "Did you mean `deep`?"),
    ]:
        with pytest.raises(ValueError, match=rf"^reward\.functions: use '{use}'") as caught:
            parse_use(use)
        assert named in str(caught.value)
    for content, named in [(b"x = 1\n\nif x\n", "broken.py, line 3"), (b"x = '\xff'", ""), (b"\0", ""), (b"", "'f'")]:
        (folder / "broken.py").write_bytes(content)
        with pytest.raises(ValueError, match=r"^reward\.functions: use 'broken\.py:f'.*broken\.py") as caught:
            parse_use("broken.py:f")
        assert named in str(caught.value)


class Judge:
    def __call__(self, prompts: list[str], completions: list[str], *, answer: list[str]) -> list[float]:
        self.seen = answer
        if "x" in answer and len(answer) > 1:
            raise RuntimeError("a bad row")
        return [float(pair[0] == pair[1]) for pair in zip(completions, answer, strict=True)]


def score_by(completions: list[str], length: int, **columns: Any) -> list[float]:
    return [len(text) / length for text in completions]


async def waited(completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


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
        assert (call.scores, call.failures, judge.seen) == ([1.0, 0.0], [], ["x"])
        assert "a bad row" in str(call.retried)
        with pytest.raises(ValueError, match="takes a column 'answer'"):
            reward(["p"], ["a"], {})
    assert use_of(varied_reward.variety) == f"{varied_reward.__file__}:variety"
    for function, score in ((functools.partial(score_by, length=2), 0.5), (functools.partial(waited), 1.0)):
        with FunctionReward(use_of(function)) as reward:
            assert reward(["p"], ["a"], {}).scores == [score]
    with pytest.raises(ValueError, match="'__main__:gone'"):
        parse_use("__main__:gone")
    with pytest.raises(ValueError, match="defined by name"):
        use_of(lambda completions: [])
