"""What rewards get of an episode, and of a text that nobody played, by what it was played with."""

from pathlib import Path
from typing import Any

import pytest

from tinyrl.config.sections import EnvironmentConfig
from tinyrl.environments.agent import Agents
from tinyrl.environments.environment import Environment, Replies

CHAT = [{"role": "user", "content": "2 + 2?"}]
PLAYED = [{"role": "assistant", "content": "four"}, {"role": "tool", "content": "right"}]
RETURNED = [{"role": "assistant", "content": "four"}]  # by an agent


@pytest.fixture
def agents(tmp_path: Path) -> Environment:
    (tmp_path / "mine.py").write_text("def play(row, base_url):\n    return 'four'\n")
    return Agents(EnvironmentConfig(agent=f"{tmp_path / 'mine.py'}:play"), call_tokens=8)


@pytest.fixture
def replies() -> Environment:
    def respond(prompts: Any, transcripts: Any, *, world: Any, seed: int = 0, **columns: Any) -> list[None]:
        return [None] * len(prompts)

    return Replies(EnvironmentConfig(), task="mine", respond=respond, use=None, stop=(";",), length=len)


def test_an_episode_of_replies_is_its_messages(replies: Environment) -> None:
    assert replies.completion(PLAYED, "2 + 2?") == PLAYED
    assert replies.completion(PLAYED, CHAT) == PLAYED


def test_an_agents_episode_has_the_form_of_the_data(agents: Environment) -> None:
    assert agents.completion(RETURNED, "2 + 2?") == "four"
    assert agents.completion(RETURNED, CHAT) == RETURNED


def test_a_text_has_the_form_of_episodes(replies: Environment, agents: Environment) -> None:
    assert replies.as_completion("four", "2 + 2?") == RETURNED
    assert replies.as_completion("four", CHAT) == RETURNED
    assert agents.as_completion("four", "2 + 2?") == "four"
    assert agents.as_completion("four", CHAT) == RETURNED


def test_columns_that_replies_need_are_those_without_a_default(replies: Environment, agents: Environment) -> None:
    assert [*replies.needed_columns] == ["world"]
    assert [*agents.needed_columns] == []
    assert (replies.stop, agents.stop) == ((";",), ())
