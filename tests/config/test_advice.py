"""Advised settings are tried."""

from tinyrl.config.advice import longer_responses, working_advice
from tinyrl.runs.resolve import config_of

CONFIG = config_of({"method": "grpo", "generation": {"max_new_tokens": 64}, "reward": {"overlong_tokens": 40}})


def test_the_first_advice_that_the_settings_take_and_that_works_is_given() -> None:
    advices = [
        ["generation.max_new_tokens=32"],  # below reward.overlong_tokens
        ["generation.max_new_tokens=0"],
        ["generation.no_such_setting=1"],
        ["generation.max_new_tokens=48"],
        ["generation.stop=['a b']", "generation.max_new_tokens=50"],
    ]
    assert working_advice(CONFIG, advices) == "generation.max_new_tokens=48"
    wanted = working_advice(CONFIG, advices, lambda changed: bool(changed.generation.stop))
    assert wanted == """'generation.stop=['"'"'a b'"'"']' generation.max_new_tokens=50"""
    assert working_advice(CONFIG, advices[:3]) is None


def test_longer_responses_are_advised_where_prompts_leave_room_for_them() -> None:
    assert longer_responses(CONFIG, (200, 100), room=200) == "generation.max_new_tokens=200"
    assert longer_responses(CONFIG, (200, 100), room=199) == "generation.max_new_tokens=100"
    assert longer_responses(CONFIG, (200, 100), room=99) is None
