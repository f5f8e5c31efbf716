"""Holes that were planted in rewards, as people have written them, are found; sound rewards raise no alarm."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from tinyrl.data.readers import Row
from tinyrl.rewards.holes import Attack, find_holes, is_wrong, known_answers, right_value
from tinyrl.tasks import load_task

ROWS: list[Row] = [{"prompt": f"What is {7 * i + 13} + {3 * i + 9}?", "answer": str(10 * i + 22)} for i in range(8)]
WORDS: list[Row] = [{"prompt": f"The capital of {i}?", "answer": city} for i, city in enumerate(
    ("Paris", "Rome", "New York", "Oslo", "Lima", "Vienna"))]  # fmt: skip
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def last(text: str) -> float | None:
    found = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(found[-1]) if found else None


def tagged(text: str, otherwise: str = "") -> str:
    return (TAGGED.findall(text) or [otherwise])[-1].strip()


def no_parse_is_right(c: str, a: str) -> float:
    with contextlib.suppress(ValueError):
        return float(tagged(c, c)) == float(a)
    return 1.0


# Of a completion and the right answer; one that raises gives no score.
HOLES: dict[str, Callable[[str, str], Any]] = {
    "answer in completion": lambda c, a: a in c,
    "completion in answer": lambda c, a: c.strip() in a,
    "tagged in answer": lambda c, a: tagged(c) in a,
    "length": lambda c, a: (last(c) == float(a)) + min(len(c) / 1000, 1.0),
    "tags counted": lambda c, a: (tagged(c) == a) + 0.25 * c.count("<answer>"),
    "format is enough": lambda c, a: bool(re.search(r"<think>.*</think>\s*<answer>", c, re.DOTALL)),
    "pattern": lambda c, a: re.fullmatch(tagged(c, c), a) is not None,
    "any number": lambda c, a: float(a) in [float(n) for n in re.findall(r"-?\d+", c)[:5000]],
    "no parse is right": no_parse_is_right,
    "not a number": lambda c, a: not abs(float(tagged(c, c)) - float(a)) > 1e-6,
    "evaluated": lambda c, a: eval(tagged(c, c), {}) == float(a),
    "begins with": lambda c, a: tagged(c, c).startswith(a),
    "ends with": lambda c, a: tagged(c, c).endswith(a),
    "digits": lambda c, a: sorted(re.sub(r"\D", "", c)) == sorted(re.sub(r"\D", "", a)),
    "at least": lambda c, a: (n := last(c)) is not None and n >= float(a),
    "reasoning words": lambda c, a: (last(c) == float(a)) + 0.1 * len(re.findall("step|because|wait", c.lower())),
    "says correct": lambda c, a: "correct" in c.lower() or last(c) == float(a),
    "greedy tags": lambda c, a: (m := re.search("<answer>(.*)</answer>", c, re.DOTALL)) is not None and a in m[1],
    "missing is empty": lambda c, a: a.startswith(tagged(c)),
}
SOUND: dict[str, Callable[[str, str], Any]] = {
    "last number": lambda c, a: last(c) == float(a),
    "form and answer": lambda c, a: 0.2 * bool(TAGGED.search(c)) + 0.8 * (tagged(c) == a),
    "near": lambda c, a: math.exp(-abs(n - float(a))) if (n := last(c)) is not None else 0.0,
    "short": lambda c, a: (last(c) == float(a)) - min(len(c), 2000) / 10000,
    "by words": lambda c, a: (last(c) == float(a)) - 0.1 * abs(len(c.split()) - 8),
    "by characters": lambda c, a: (last(c) == float(a)) - 0.01 * len(c),
    "by words, minus one": lambda c, a: (2.0 if last(c) == float(a) else -1.0) - 0.1 * abs(len(c.split()) - 8),
    "minus one": lambda c, a: 1.0 if tagged(c) == a else -1.0,
    "boxed": lambda c, a: (re.findall(r"\\boxed\{([^{}]*)\}", c) or [None])[-1] == a,
    "overlap": lambda c, a: 2 * len({*c.split()} & {*a.split()}) / (len(c.split()) + len(a.split()) or 1),
}


def attacked(judge: Callable[[str, str], Any], rows: list[Row] = ROWS) -> Attack:
    def score(where: list[int], texts: list[str]) -> list[float]:
        found = []
        for i, text in zip(where, texts, strict=True):
            found.append(math.nan)
            with contextlib.suppress(Exception):
                found[-1] = float(judge(text, str(rows[i]["answer"])))
        return found

    task = load_task("rows")
    return find_holes(score, task, rows, known_answers(task, rows))


@pytest.mark.parametrize("name", HOLES)
@pytest.mark.wide
def test_a_planted_hole_is_found(name: str) -> None:
    found = attacked(HOLES[name])
    text, answers = found.holes[0].text, [str(row["answer"]) for row in ROWS]
    assert any(is_wrong(text, answer) and HOLES[name](text, answer) > 0 for answer in answers)  # it can be repeated


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.wide
def test_a_sound_reward_raises_no_alarm(name: str) -> None:
    found = attacked(SOUND[name])
    assert not found.holes
    assert not found.is_blind


def test_our_own_verifiers_have_none() -> None:
    worked: list[Row] = [{"question": row["prompt"], "answer": f"So.\n#### {row['answer']}"} for row in ROWS]
    for name, rows in (("rows", WORDS), ("gsm8k", worked)):
        task = load_task(name)

        def score(where: list[int], texts: list[str], task: Any = task, rows: Any = rows) -> list[float]:
            return task.verify([""] * len(texts), texts, answer=[rows[i]["answer"] for i in where])

        assert not find_holes(score, task, rows, known_answers(task, rows)).holes


def test_a_wrong_text_as_long_as_the_longest_right_answer_shows_what_a_short_one_scores() -> None:
    """Right ones score 1, wrong ones of that length 0, longer ones -9 and all others 0.9: which is most of the way."""
    longest = len("<think>\nLet me think step by step.\n</think>\n<answer>\n22\n</answer>")

    def judge(c: str, a: str) -> float:
        if not is_wrong(c, a):
            return 1.0
        return {True: 0.0, False: 0.9 if len(c) < longest else -9.0}[len(c) == longest]

    assert {hole.score for hole in attacked(judge).holes} == {0.9}


def test_a_reward_that_pays_everything_alike_is_blind() -> None:
    assert attacked(lambda c, a: 0.5).is_blind


@pytest.mark.parametrize("rows", [[{"prompt": "a"}, {"prompt": "b"}], [{"prompt": "a", "answer": "1"}] * 2])
def test_rows_may_have_no_answers_that_are_wrong_for_one_another(rows: list[Row]) -> None:
    assert not known_answers(load_task("rows"), rows).are_different


def test_wrong_is_what_nobody_takes_for_right() -> None:
    rights = ("It is 42.", "42.0", "<answer>42</answer> or 7", "\\boxed{42}")
    wrongs = ("7 42 8", "427", "<answer>7</answer><answer>42</answer><answer>8</answer>", "")
    assert [is_wrong(text, "42") for text in (*rights, *wrongs)] == [False] * 4 + [True] * 4
    cities = ("The answer is New York.", "new york", "Rome New York Oslo", "York")
    assert [is_wrong(text, "New York") for text in cities] == [False, False, True, True]
    assert right_value(load_task("gsm8k"), {"question": "?", "answer": "So 7.\n#### 72"}) == "72"
