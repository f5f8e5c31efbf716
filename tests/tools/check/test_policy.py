"""Answers of a policy: what was planted in them is found with the setting to change, and nothing where a run learns."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tinyrl.config.recipe import load_config
from tinyrl.tools.check.loaded import Answer
from tinyrl.tools.check.policy import Seen, findings, section


def planted(rewards: list[list[float]], *settings: str, texts: list[str] | None = None, **changes: Any) -> Seen:
    """Answers in groups that have these rewards; `changes` are fields of Seen, or of every answer."""
    of_answers = {name: changes.pop(name) for name in ("cut", "gold", "failed", "tokens") if name in changes}
    answers = [
        Answer(
            "sort", texts[i] if texts else f"text {index} {i}", value,
            **{"tokens": 4, "cut": False, "gold": None, "failed": None, "row": str(index), **of_answers},
        )
        for index, group in enumerate(rewards)
        for i, value in enumerate(group)
    ]  # fmt: skip
    greedy = answers[:: len(rewards[0])]
    config = load_config("grpo", "starter-grpo", overrides=list(settings))
    return Seen(config, answers, changes.pop("greedy", greedy), len(rewards[0]), 100, **changes)


def found(seen: Seen) -> dict[str, str]:
    return {one.name: one.change for one in findings(seen)}


MIXED = [[1.0, 0.0] * 4] * 16
SAME = [[0.5] * 8] * 16


@pytest.mark.parametrize(
    ("seen", "name", "change"),
    [
        ({"rewards": [[1.0, math.nan] * 4] * 16, "failed": "no table"}, "rewards dropped", "reward"),
        ({"rewards": SAME}, "one reward for everything", "reward"),
        ({"rewards": MIXED, "cut": True}, "nothing ends", "generation.stop"),
        ({"rewards": MIXED, "texts": ["", "3 4"] * 4}, "empty completions", "task.chat"),
        ({"rewards": [[0.0] * 8] * 16, "knows_gold": True}, "too hard", "tinyrl train sft"),
        ({"rewards": [[1.0] * 8] * 16, "knows_gold": True}, "too easy", "task.sampler=difficulty"),
        ({"rewards": [[1.0] * 8, [0.0] * 8] * 8}, "prompts that are decided", "task.sampler=difficulty"),
        ({"rewards": [[0.0] * 8] * 16, "texts": ["so 7"] * 8, "knows_gold": True, "gold": "#### 7"},
         "right answers in another form", "task.system_prompt"),
        ({"rewards": [[0.0, 1.0] * 4] * 16, "texts": ["a"] * 8}, "all completions alike", "generation.temperature"),
        ({"rewards": MIXED, "step_seconds": 1e6}, "a long run", "run.num_steps"),
    ],
)  # fmt: skip
def test_what_is_planted_is_found(seen: dict[str, Any], name: str, change: str) -> None:
    said = found(planted(**seen))
    assert change in said[name]


def test_groups_whose_rewards_differ_raise_no_alarm() -> None:
    assert found(planted(MIXED)) == {}


def test_cut_off_answers_get_a_longer_limit_within_the_positions() -> None:
    rewards, half = MIXED, planted(MIXED, cut=True).answers[:40]
    seen = planted(rewards, "generation.max_new_tokens=16", positions=100.0, longest_prompt=12)
    mixed = Seen(seen.config, half + seen.answers[40:], seen.greedy, 8, 100, positions=100.0, longest_prompt=12)
    assert "generation.max_new_tokens=32" in found(mixed)["cut off"]
    short = Seen(seen.config, half + seen.answers[40:], seen.greedy, 8, 100, positions=20.0, longest_prompt=12)
    assert "generation.max_new_tokens" not in found(short)["cut off"]


def test_a_group_that_is_too_small_is_found() -> None:
    """Prompts that are mostly wrong: groups of two hardly ever hold a right answer, of eight they do."""
    seen = planted([[1.0] + [0.0] * 15] * 16, "grpo.group_size=2")
    assert {name: change.split(",")[0] for name, change in found(seen).items()} == {
        "group too small": "grpo.group_size=8"
    }
    assert [seen.with_spread(size) for size in (2, 4, 8, 16)] == pytest.approx([0.125, 0.25, 0.5, 1.0])
    assert math.isnan(seen.with_spread(32))


def test_a_reward_that_follows_length_is_found() -> None:
    seen = planted([[float(i) for i in range(8)]] * 16)
    longer = [Answer(**{**vars(a), "tokens": 3 + int(a.reward)}) for a in seen.answers]
    assert "reward follows length" in found(Seen(seen.config, longer, seen.greedy, 8, 100))


def test_a_temperature_that_is_too_high_is_found() -> None:
    seen = planted(MIXED, "generation.temperature=1.5")
    best = [Answer(**{**vars(a), "reward": 1.0}) for a in seen.greedy]
    assert found(Seen(seen.config, seen.answers, best, 8, 100)) == {
        "temperature too high": "generation.temperature=1.0."
    }
    same = [Answer(**{**vars(a), "reward": 0.5}) for a in seen.greedy]
    assert found(Seen(seen.config, seen.answers, same, 8, 100)) == {}


def test_spread_is_that_of_groups_drawn_from_what_was_sampled() -> None:
    seen = planted([[1.0, 1.0, 0.0, 0.0], [0.25, 0.5, 0.75, 1.0], [0.0] * 4, [math.nan] * 3 + [1.0]])
    pairs = 1 - 2 / 6  # of two zeros and two ones
    assert seen.with_spread(2) == pytest.approx((pairs + 1 + 0 + 0) / 4)
    assert seen.pass_rates == [0.5, 0.25, 0.0, 1.0]


def test_facts_hold_what_the_lines_do() -> None:
    facts = section(planted(MIXED)).facts
    assert facts["pass_rates"] == {
        "never": 0, "to 25 %": 0, "to 50 %": 16, "to 75 %": 0, "over 75 %": 0, "always": 0
    }  # fmt: skip
    assert facts["groups_with_spread"] == 1.0
    unknown = section(planted([[math.nan] * 4] * 4))
    assert unknown.facts["pass_rates"] is None
    assert math.isnan(unknown.facts["reward_mean"])
