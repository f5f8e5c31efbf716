"""Functions that a process defined are told apart by their code and the constants that they were made with."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tinyrl.workers.fingerprint import fingerprint


def at(level: float, log: list[str]) -> Callable[..., Any]:
    calls = 0

    def score(completions: list[str], bonus: float = 0.0) -> list[float]:
        nonlocal calls
        calls += 1
        log.append("called")
        return [level + bonus for _ in completions]

    return score


def graded(completions: list[str], base: float) -> list[float]:
    return [base for _ in completions]


class Scores:
    high = 1.0

    def __init__(self, unit: float) -> None:
        self.unit = unit

    def __call__(self, completions: list[str]) -> list[float]:
        self.unit += 1.0
        return [self.high for _ in completions]


class Halves(Scores):
    high = 0.5


def defined(code: str) -> Callable[..., Any]:
    """Return `score` of code that no file has."""
    names: dict[str, Any] = {}
    exec(code, names)
    return names["score"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (at(0.0, []), at(100.0, [])),
        (graded, at(0.0, [])),
        (functools.partial(graded, base=0.0), functools.partial(graded, base=1.0)),
        (functools.partial(graded, base=0.0), graded),
        (functools.partial(graded, ["a"], 0.0), functools.partial(graded, ["a"], 1.0)),
        (functools.partial(pow, 2), functools.partial(divmod, 2)),
        (Scores, Halves),
        (Scores(1.0), Halves(1.0)),
        (Scores(1.0), Scores(1.0).__call__),
        (defined("def score(c, k=1): return k"), defined("def score(c, k=2): return k")),
        (defined("def score(c): return 1.0"), defined("def score(c): return 2.0")),
        (defined("def score(c): return [x + 1 for x in c]"), defined("def score(c): return [x + 2 for x in c]")),
        (defined("def score(c): return max(c)"), defined("def score(c): return min(c)")),
    ],
)
def test_other_code_and_other_constants_are_another_function(one: Callable[..., Any], other: Callable[..., Any]):
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (at(0.0, []), at(0.0, ["another"])),
        (functools.partial(graded, base=0.0), functools.partial(graded, base=0.0)),
        (Scores(1.0), Scores(2.0)),  # their state is not seen
        (defined("def score(c): return {'a', 'b'}"), defined("\n\ndef score(c): return {'a', 'b'}")),
    ],
)
def test_the_same_code_and_constants_are_the_same_function(one: Callable[..., Any], other: Callable[..., Any]):
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize("function", [at(1.0, []), Scores(1.0), defined("def score(c, seen=[]): seen.append(c)")])
def test_calls_of_a_function_make_it_no_other_one(function: Callable[..., Any]):
    before = fingerprint(function)
    function(["a"])
    assert fingerprint(function) == before
