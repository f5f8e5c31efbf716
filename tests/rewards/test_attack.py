"""`tinyrl reward attack`: holes that were planted are found, and sound rewards raise no alarm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.rewards import planted
from tinyrl.cli.commands import app
from tinyrl.data.readers import Row
from tinyrl.rewards.attack import Attack, attack, is_wrong, render, right_value
from tinyrl.rewards.functions import FunctionReward
from tinyrl.tasks import load_task

PLANTED = Path(planted.__file__)
MISSED = {"like_the_prompt"}  # a copied prompt gets two thirds of a right answer: below what counts as high
ROWS: list[Row] = [{"prompt": f"What is {7 * i + 13} + {3 * i + 9}?", "answer": str(10 * i + 22)} for i in range(8)]


def attacked(name: str, *, file: Path = PLANTED, task: str = "rows", rows: list[Row] = ROWS) -> Attack:
    with FunctionReward(f"{file}:{name}", timeout_s=60) as function:
        function.start()
        return attack(function, name, load_task(task), rows)


@pytest.mark.parametrize("name", sorted(planted.HOLES.keys() - MISSED))
@pytest.mark.wide
def test_a_planted_hole_is_found(name: str) -> None:
    found = attacked(name)
    assert found.holes
    text, row = found.holes[0].example()
    assert is_wrong(text, str(ROWS[row]["answer"]))
    assert planted.HOLES[name](text, str(ROWS[row]["answer"]), str(ROWS[row]["prompt"])) > 0  # it can be repeated


@pytest.mark.parametrize("name", planted.SOUND)
@pytest.mark.wide
def test_a_sound_reward_raises_no_alarm(name: str) -> None:
    found = attacked(name)
    assert not found.holes
    assert not found.is_blind
    assert "no hole found" in render(found)


REWARDS = """
from tinyrl.tasks import load_task

def _verified(name):
    verify = load_task(name).verify
    return lambda prompts, completions, **columns: verify(prompts, completions, **columns)

rows, gsm8k = _verified("rows"), _verified("gsm8k")

def flat(completions, **columns):
    return [0.5] * len(completions)

def chat(completions, answer, **columns):
    return [float(a in c[0]["content"]) for a, c in zip(answer, completions)]

def brittle(completions, answer, **columns):
    return [float(c.split()[-1] == a) for a, c in zip(answer, completions)]
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "rewards.py"


def test_our_own_verifiers_have_none(mine: Path) -> None:
    assert not attacked("rows", file=mine).holes
    words: list[Row] = [{"prompt": f"The capital of {i}?", "answer": city} for i, city in enumerate(CITIES)]
    assert not attacked("rows", file=mine, rows=words).holes
    worked: list[Row] = [{"question": row["prompt"], "answer": f"So.\n#### {row['answer']}"} for row in ROWS]
    assert not attacked("gsm8k", file=mine, task="gsm8k", rows=worked).holes


CITIES = ("Paris", "Rome", "New York", "Oslo", "Lima", "Vienna")


def test_chat_rows_are_read_as_messages(mine: Path) -> None:
    rows: list[Row] = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    found = attacked("chat", file=mine, rows=rows)
    assert "the right answer among others" in [hole.family for hole in found.holes]
    assert not found.failed


def test_a_reward_without_right_answers_is_said(mine: Path) -> None:
    found = attacked("flat", file=mine)
    assert found.is_blind
    assert "HOLE: no right answer gets more" in render(found)


def test_what_it_fails_on_is_said(mine: Path) -> None:
    found = attacked("brittle", file=mine)
    assert not found.holes
    assert "nothing" in found.failed
    assert "warning: it fails on" in render(found)


def test_rows_without_answers_are_refused(mine: Path) -> None:
    for rows in ([{"prompt": "a"}, {"prompt": "b"}], [{"prompt": "a", "answer": "1"}] * 2):
        with pytest.raises(ValueError, match="two rows at least with different ones"):
            attacked("flat", file=mine, rows=rows)


def test_the_command(mine: Path) -> None:
    data = ["--data", str(mine.parent / "rows.jsonl")]
    holed = CliRunner().invoke(app, ["reward", "attack", f"{PLANTED}:answer_in_completion", *data])
    assert holed.exit_code == 3
    assert "HOLE: the right answer among others" in holed.stdout
    sound = CliRunner().invoke(app, ["reward", "attack", f"{PLANTED}:tagged", *data])
    assert sound.exit_code == 0, sound.output
    refused = CliRunner().invoke(app, ["reward", "attack", f"{PLANTED}:tagged", *data, "url=http://x"])
    assert refused.exit_code == 2


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("42", False),
        ("It is 42.", False),
        ("42.0", False),
        ("<answer>42</answer> or 7", False),
        ("\\boxed{42}", False),
        ("7 42 8", True),
        ("427", True),
        ("<answer>7</answer><answer>42</answer><answer>8</answer>", True),
        ("", True),
    ],
)
def test_wrong_is_what_nobody_takes_for_right(text: str, wrong: bool) -> None:
    assert is_wrong(text, "42") is wrong


def test_words_are_wrong_in_the_same_way() -> None:
    assert not is_wrong("The answer is New York.", "New York")
    assert not is_wrong("new york", "New York")
    assert is_wrong("Rome New York Oslo", "New York")
    assert is_wrong("York", "New York")
    assert right_value(load_task("gsm8k"), {"question": "?", "answer": "So 7.\n#### 72"}) == "72"
