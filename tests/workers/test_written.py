"""Functions of a notebook as files: what they use comes along, what cannot be written is said."""

import functools
import linecache
from pathlib import Path
from typing import Any

import pytest

from tinyrl.workers.written import written


def cell(source: str, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a source as a notebook runs a cell: in __main__, its lines at hand under a made-up file name."""
    names = {"__name__": "__main__"} if namespace is None else namespace
    name = f"<cell {abs(hash(source))}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), names)
    return names


def loaded(use: str) -> Any:
    """The function that a written file defines, with nothing else around."""
    file, _, name = use.rpartition(":")
    names: dict[str, Any] = {"__name__": "elsewhere"}
    exec(compile(Path(file).read_text(), file, "exec"), names)
    return names[name]


def test_what_a_function_uses_comes_along(tmp_path: Path):
    source = """
import re
import math as m
from collections import Counter
from statistics import mean as average

WEIGHTS = {"a": 2.0, "b": [1, (2, 3)]}
PATTERN = re.compile("[ab]", re.IGNORECASE)
unused = object()

class Tally:
    def of(self, text):
        return Counter(PATTERN.findall(text))

def helper(text):
    return WEIGHTS["a"] * len(Tally().of(text)) + (helper("") if text else 0)

def score(completions, scale=m.floor(1.5), **columns):
    return [scale * average([helper(c), 4]) for c in completions]
"""
    names = cell(source)
    use = written(names["score"], tmp_path)
    assert loaded(use)(["xAby", ""]) == names["score"](["xAby", ""]) == [4.0, 2.0]
    assert "unused" not in Path(use.rpartition(":")[0]).read_text()


def test_decorators_and_marks_come_along(tmp_path: Path):
    source = """
import functools

@functools.lru_cache
def length(text):
    return len(text)

def score(completions, **columns):
    return [length(c) for c in completions]

score.whole_batch = True
"""
    found = loaded(written(cell(source)["score"], tmp_path))
    assert (found(["abc"]), found.whole_batch) == ([3], True)


def test_the_same_function_is_the_same_file_and_another_one_is_not(tmp_path: Path):
    source = "def score(completions, **columns):\n    return [K for c in completions]\n"
    first = written(cell(f"K = 1\n{source}")["score"], tmp_path)
    assert written(cell(f"K = 1\n{source}")["score"], tmp_path) == first
    assert written(cell(f"K = 2\n{source}")["score"], tmp_path) != first
    assert len(list(tmp_path.iterdir())) == 2


def test_a_function_of_a_module_is_named_by_its_own_file(tmp_path: Path):
    from tests import varied_reward

    assert written(varied_reward.variety, tmp_path) == f"{varied_reward.__file__}:variety"
    assert not list(tmp_path.iterdir())


def test_a_partial_and_an_object_come_along_with_what_they_hold(tmp_path: Path):
    source = """
import functools

def length(text, by):
    return len(text) / by

def score(completions, measure, by=1.0, **columns):
    return [measure(c, by) for c in completions]

class Judge:
    def __init__(self, by):
        self.by, self.measure, self.seen = by, length, ["a"]

    def __call__(self, completions, **columns):
        return score(completions, self.measure, self.by)

halved = functools.partial(score, measure=length, by=2)
judge = Judge(4.0)
"""
    names = cell(source)
    first, second = written(names["halved"], tmp_path), written(names["judge"], tmp_path)
    assert [use.rpartition(":")[2] for use in (first, second)] == ["score", "judge"]
    assert loaded(first)(completions=["ab", ""]) == [1.0, 0.0]
    assert (loaded(second)(completions=["ab", ""]), loaded(second).seen) == ([0.5, 0.0], ["a"])


def test_a_partial_and_an_object_of_a_module_import_it(tmp_path: Path):
    import statistics

    use = written(functools.partial(statistics.quantiles, n=2), tmp_path)
    assert loaded(use)([1, 2, 3]) == [2.0]
    normal = written(functools.partial(written, "x", folder=Path), tmp_path)  # pyright: ignore[reportArgumentType]
    assert loaded(normal).func is written


@pytest.mark.parametrize(
    ("source", "name", "sentence"),
    [
        ("score = lambda completions, **columns: []\n", "score", "not a function that is defined by name"),
        ("def around():\n    def score(completions): ...\n    return score\nscore = around()\n", "score", "top level"),
        ("model = object()\ndef score(completions):\n    return model\n", "score", "score uses model, <object"),
        (
            "class Judge:\n    def __call__(self, completions): ...\nscore = Judge()\nscore.model = object()\n",
            "score",
            "judge uses .*object",
        ),
        ("class Judge:\n    def score(self, completions): ...\nscore = Judge().score\n", "score", "not a function"),
    ],
)
def test_what_cannot_be_written_is_said(tmp_path: Path, source: str, name: str, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        written(cell(source)[name], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_function_without_source_is_said(tmp_path: Path):
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def score(completions):\n    return []", names)
    with pytest.raises(ValueError, match="source of score is not at hand"):
        written(names["score"], tmp_path)
