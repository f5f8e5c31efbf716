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
    (folder / "late.py").write_text("import json\nfrom rewards import *\ndef f():\n    import more\n")
    assert imported_beside(parse_use("late.py:f")) == [folder / "more.py", folder / "rewards.py"]


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
