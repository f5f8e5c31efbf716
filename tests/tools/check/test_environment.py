"""Findings of scripts that were played in an environment, made from planted replies."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.tiny_models import TinyModels
from tinyrl.data.readers import Row
from tinyrl.environments import Reply
from tinyrl.environments.environment import Replies
from tinyrl.runs.resolve import config_of
from tinyrl.tasks.prompts import row_columns
from tinyrl.tools.check.environment import (
    CHARS_A_TOKEN,
    PlayedScripts,
    Script,
    is_episode_paid,
    no_reward_was_seen,
    no_rewards,
    planted_turns,
    question_of,
    replies_are_cut,
    room_for_observation,
    two_rewards,
)


def played(*, most: int) -> PlayedScripts:
    """Replies of 100 tokens, of which 10 are read."""
    script = Script("gold", ["a"], [Reply("x" * CHARS_A_TOKEN * 100)], [], 0.0)
    return PlayedScripts([script], max_turns=3, max_observation_tokens=10, most_observation_tokens=most)


def test_replies_that_are_cut_get_the_limit_that_the_model_has_positions_for() -> None:
    for most, advised in ((1000, "environment.max_observation_tokens=100."), (60, "max_observation_tokens=60.")):
        found = replies_are_cut(played(most=most))
        assert found is not None
        assert advised in found.change
    found = replies_are_cut(played(most=10))
    assert found is not None
    assert "max_observation_tokens" not in found.change


def test_the_question_of_a_prompt_with_images_is_its_text() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "how green?"}]
    assert question_of({}, [{"role": "user", "content": parts}]) == "how green?"


def test_room_for_a_reply_is_what_responses_leave_of_the_positions(tiny: TinyModels) -> None:
    """Of 512 positions, in two gaps between three turns; a model that is not here has any."""
    values = {"method": "grpo", "environment": {"max_turns": 3}, "generation": {"max_new_tokens": 111}}
    of_tiny, elsewhere = ({**values, "model": {"path": path}} for path in (str(tiny("llama")), "owner/name"))
    assert room_for_observation(config_of(of_tiny)) == 200
    assert room_for_observation(config_of(elsewhere)) > 1 << 20


# ---- rewards ----


def paying(reward: float | None, **facts: Any) -> PlayedScripts:
    script = Script("nonsense", ["a"], [Reply("b", reward=reward)], [], 0.0)
    return PlayedScripts([script], max_turns=3, max_observation_tokens=10, **facts)


def test_an_environment_that_rewards_no_turn_that_was_tried_is_found_where_nothing_else_rewards() -> None:
    finding = no_reward_was_seen(paying(None, rewards="some", is_alone=True))
    assert finding is not None
    assert finding.is_harmless  # it may reward turns that nobody planted
    assert no_reward_was_seen(paying(None, rewards="some", is_alone=True, paid_for="column `answer`")) is None
    assert no_reward_was_seen(paying(None, rewards="some", is_alone=False)) is None
    assert no_reward_was_seen(paying(None, rewards="all", is_alone=True)) is None


def test_a_class_without_get_reward_is_no_reward() -> None:
    finding = no_rewards(paying(None, rewards="none", is_alone=True))
    assert finding is not None
    assert not finding.is_harmless
    assert no_rewards(paying(None, rewards="none", is_alone=False)) is None


def test_rewards_of_replies_beside_a_verifier_are_found() -> None:
    assert two_rewards(paying(0.0, rewards="some", verifier="rows")) is not None
    assert two_rewards(paying(None, rewards="some", verifier="rows")) is None
    assert two_rewards(paying(0.0, rewards="some")) is None


ROWS: list[Row] = [{"prompt": "a", "secret": 4, "way": ["n", "e"]}, {"prompt": "b", "secret": 7, "way": ["s", "w"]}]
Pays = Callable[[list[str], Row], float | None]  # the turns of an episode so far, and its row


def paid_for(pays: Pays) -> list[str]:
    """Return the kinds of planted turns that an environment rewards."""

    def respond(prompts: list[Any], transcripts: list[Any], **columns: list[Any]) -> list[Reply]:
        said = [[message["content"] for message in turns if message["role"] == "assistant"] for turns in transcripts]
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [Reply("go on", reward=pays(turns, row)) for turns, row in zip(said, rows, strict=True)]

    config = config_of({"method": "grpo"}).environment
    environment = Replies(config, task="own", respond=respond, use=None, stop=(), length=len)
    columns = row_columns(ROWS)
    planted = planted_turns(ROWS, max_turns=3)
    return [*dict.fromkeys(kind for kind, turns in planted if is_episode_paid(environment, turns, ["a", "b"], columns))]


@pytest.mark.parametrize(
    ("pays", "kinds"),
    [
        (lambda turns, row: None, []),
        (lambda turns, row: 1.0 if turns[-1] == str(row["secret"]) else None, ["column `secret`"]),
        (lambda turns, row: 1.0 if turns[-1] == f"<answer>{row['secret']}</answer>" else None, ["column `secret`"]),
        (lambda turns, row: 1.0 if turns == row["way"] else None, ["column `way`"]),
        (lambda turns, row: 0.0 if len(turns) == 3 else None, ["nonsense", "column `secret`"]),  # the last turn
    ],
    ids=["nothing", "right answers", "right answers in a form", "items of a list", "the end of an episode"],
)
def test_planted_turns_find_what_an_environment_rewards(pays: Pays, kinds: list[str]) -> None:
    assert paid_for(pays) == kinds
