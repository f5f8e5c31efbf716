"""Findings of scripts that were played in an environment, made from planted replies."""

from tests.tiny_models import TinyModels
from tinyrl.environments import Reply
from tinyrl.runs.resolve import config_of
from tinyrl.tools.check.environment import (
    CHARS_A_TOKEN,
    PlayedScripts,
    Script,
    question_of,
    replies_are_cut,
    room_for_observation,
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
