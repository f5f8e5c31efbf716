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


def test_an_object_keeps_its_state_and_columns_arrive():
    judge = Judge()
    use = use_of(judge)
    assert use == "__main__:judge"
    assert imported_beside(parse_use(use)) == []
    with FunctionReward(use) as reward:
        call = reward(["p", "p"], ["a", "b"], {"answer": ["a", "x"]})
        assert (call.scores, call.failures) == ([1.0, 0.0], [])
        assert "a bad row" in str(call.retried)
        assert judge.seen == ["x"]
        with pytest.raises(ValueError, match="takes a column 'answer'"):
            reward(["p"], ["a"], {})


def test_what_can_be_called_by_name_is_a_function():
    assert use_of(varied_reward.variety) == f"{varied_reward.__file__}:variety"
    for function, score in ((functools.partial(score_by, length=2), 0.5), (functools.partial(waited), 1.0)):
        with FunctionReward(use_of(function)) as reward:
            assert reward(["p"], ["a"], {}).scores == [score]
    with pytest.raises(ValueError, match="'__main__:gone'"):
        parse_use("__main__:gone")
    with pytest.raises(ValueError, match="defined by name"):
        use_of(lambda completions: [])
