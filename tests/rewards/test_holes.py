"""Holes that were planted in rewards are found, and sound rewards raise no alarm."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.rewards import planted
from tinyrl.data.readers import Row
from tinyrl.rewards.holes import Attack, find_holes, is_wrong, right_value
from tinyrl.tasks import load_task

MISSED = {"like_the_prompt"}  # a copied prompt gets two thirds of a right answer: below what counts as high
ROWS: list[Row] = [{"prompt": f"What is {7 * i + 13} + {3 * i + 9}?", "answer": str(10 * i + 22)} for i in range(8)]
WORDS: list[Row] = [{"prompt": f"The capital of {i}?", "answer": city} for i, city in enumerate(
    ("Paris", "Rome", "New York", "Oslo", "Lima", "Vienna"))]  # fmt: skip


def attacked(reward: Any, *, task: str = "rows", rows: list[Row] = ROWS) -> Attack | None:
    """Attack a reward that is called row by row, one that raises giving no score."""

    def score(where: list[int], texts: list[str]) -> list[float]:
        found = []
        for i, text in zip(where, texts, strict=True):
            columns = {name: [value] for name, value in rows[i].items() if name != "prompt"}
            try:
                found += reward([rows[i].get("prompt")], [text], **columns)
            except Exception:  # noqa: BLE001
                found.append(math.nan)
        return [math.nan if one is None else one for one in found]

    return find_holes(score, load_task(task), rows)


@pytest.mark.parametrize("name", sorted(planted.HOLES.keys() - MISSED))
def test_a_planted_hole_is_found(name: str) -> None:
    found = attacked(getattr(planted, name))
    assert found is not None
    text, row = found.holes[0].example()
    assert is_wrong(text, str(ROWS[row]["answer"]))
    assert planted.HOLES[name](text, str(ROWS[row]["answer"]), str(ROWS[row]["prompt"])) > 0  # it can be repeated


@pytest.mark.parametrize("name", planted.SOUND)
def test_a_sound_reward_raises_no_alarm(name: str) -> None:
    found = attacked(getattr(planted, name))
    assert found is not None
    assert not found.holes
    assert not found.is_blind


def test_our_own_verifiers_have_none() -> None:
    worked: list[Row] = [{"question": row["prompt"], "answer": f"So.\n#### {row['answer']}"} for row in ROWS]
    for task, rows in (("rows", ROWS), ("rows", WORDS), ("gsm8k", worked)):
        found = attacked(load_task(task).verify, task=task, rows=rows)
        assert found is not None
        assert not found.holes


def test_blind_rewards_and_rows_without_different_answers() -> None:
    blind = attacked(lambda prompts, completions, **columns: [0.5] * len(completions))
    assert blind is not None
    assert blind.is_blind
    for rows in ([{"prompt": "a"}, {"prompt": "b"}], [{"prompt": "a", "answer": "1"}] * 2):
        assert attacked(planted.exact, rows=rows) is None  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ("42", "42", False),
        ("It is 42.", "42", False),
        ("42.0", "42", False),
        ("<answer>42</answer> or 7", "42", False),
        ("\\boxed{42}", "42", False),
        ("7 42 8", "42", True),
        ("427", "42", True),
        ("<answer>7</answer><answer>42</answer><answer>8</answer>", "42", True),
        ("", "42", True),
        ("The answer is New York.", "New York", False),
        ("new york", "New York", False),
        ("Rome New York Oslo", "New York", True),
        ("York", "New York", True),
    ],
)
def test_wrong_is_what_nobody_takes_for_right(text: str, right: str, wrong: bool) -> None:
    assert is_wrong(text, right) is wrong


def test_a_right_value_is_what_is_marked() -> None:
    assert right_value(load_task("gsm8k"), {"question": "?", "answer": "So 7.\n#### 72"}) == "72"
