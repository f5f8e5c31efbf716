"""Functions of a notebook: called in the process of the run, by name; a module's function keeps its file."""

import functools
from typing import Any

import pytest

from tests import varied_reward
from tinyrl.rewards.functions import FunctionReward
from tinyrl.workers import loading
from tinyrl.workers.loading import imported_beside, parse_use, use_of


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_defined", {})


def score_by(completions: list[str], length: int, **columns: Any) -> list[float]:
    return [len(text) / length for text in completions]


class Judge:
    def __call__(self, prompts: list[str], completions: list[str], *, answer: list[str]) -> list[float]:
        self.seen = answer
        if "x" in answer and len(answer) > 1:
            raise RuntimeError("a bad row")
        return [float(pair[0] == pair[1]) for pair in zip(completions, answer, strict=True)]


async def waited(completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def test_a_function_of_a_module_is_named_by_its_own_file():
    assert use_of(varied_reward.variety) == f"{varied_reward.__file__}:variety"


def test_an_object_keeps_its_state_and_columns_arrive():
    judge = Judge()
    use = use_of(judge)
    assert use == "__main__:judge"
    assert imported_beside(parse_use(use)) == []
    with FunctionReward(use) as reward:
        call = reward(["p", "p"], ["a", "b"], {"answer": ["a", "c"]})
        assert (call.scores, call.failures) == ([1.0, 0.0], [])
        assert judge.seen == ["a", "c"]
        call = reward(["p", "p"], ["a", "b"], {"answer": ["a", "x"]})
        assert (call.scores, call.failures) == ([1.0, 0.0], [])
        assert "a bad row" in str(call.retried)
        with pytest.raises(ValueError, match="takes a column 'answer'"):
            reward(["p"], ["a"], {})


def test_partials_and_coroutines_are_functions_too():
    for function, score in ((functools.partial(score_by, length=2), 0.5), (functools.partial(waited), 1.0)):
        with FunctionReward(use_of(function)) as reward:
            assert reward(["p"], ["a"], {}).scores == [score]


def test_a_function_that_is_not_here_any_more_is_the_persons_to_define():
    with pytest.raises(ValueError, match="'__main__:gone': a notebook or script defined this function"):
        parse_use("__main__:gone")


def test_a_lambda_has_no_name():
    with pytest.raises(ValueError, match="defined by name"):
        use_of(lambda completions: [])
