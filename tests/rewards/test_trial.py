"""`tinyrl reward test`: a function's scores of good answers, of nothing and of nonsense, before any training."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tinyrl.cli.commands import app
from tinyrl.rewards.trial import render, try_function
from tinyrl.tasks import load_rows, load_task

REWARDS = """
import itertools, os, random
calls = itertools.count()

def right(prompts, completions, answer, **columns):
    return [float(a in c) for a, c in zip(answer, completions)]

def longer(completions, **columns):
    return [float(len(c)) for c in completions]

def flat(completions, **columns):
    return [0.5] * len(completions)

def moody(completions, **columns):
    return [float(next(calls)) for c in completions]

def half(completions, answer, **columns):
    return [1 / 0 if a == "b" and c else None if a == "c" else 1.0 for a, c in zip(answer, completions)]

def crash(completions, **columns):
    os._exit(7)
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcd"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def tried(files: Path, function: str):
    task = load_task("rows")
    rows = load_rows(task, "eval", eval_data=str(files / "rows.jsonl"))
    return try_function(f"{files / 'rewards.py'}:{function}", task, rows, timeout_s=10)


def test_a_good_reward_has_no_warning(files: Path) -> None:
    trial = tried(files, "right")
    assert {batch.what: batch.scores for batch in trial.batches} == {
        "gold": [1.0] * 4,
        "nothing": [0.0] * 4,
        "nonsense": [0.0] * 4,
    }
    assert trial.warnings() == []
    assert trial.failed_share == 0
    lines = render(trial).splitlines()
    assert lines[1].split()[:6] == ["gold", "4", "1", "0", "1", "1"]
    assert "0.0% failed" in lines[-1]


@pytest.mark.parametrize(
    ("function", "warning"),
    [
        ("longer", "the gold answer scores no more than nothing or nonsense in 4 of 4 rows"),
        ("flat", "every completion scores 0.5, so there is nothing to learn from"),
        ("moody", "the same completions got other scores when they were judged again"),
        ("crash", "100% of the rows failed; a run stops after three batches like that"),
    ],
)
@pytest.mark.wide
def test_what_is_warned_of(files: Path, function: str, warning: str) -> None:
    assert warning in tried(files, function).warnings()


def test_failures_and_rows_that_do_not_apply_are_told_apart(files: Path) -> None:
    trial = tried(files, "half")
    gold = trial.batches[0]
    assert [math.isnan(score) for score in gold.scores] == [False, True, True, False]
    assert [failure.row for failure in gold.failures] == [1]
    assert trial.failed_share == 2 / 12  # gold and nonsense of the second row
    assert not trial.would_stop_a_run
    text = render(trial)
    assert "first failure: row 2: `half` raised ZeroDivisionError" in text
    assert text.splitlines()[1].split()[6:8] == ["1", "1"]  # none, failed


def test_messages_are_answered_with_messages(files: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "say a"}], "answer": "a", "completion": "it is a"}
    (files / "chat.jsonl").write_text(json.dumps(row) + "\n")
    (files / "chat.py").write_text(
        "def last(completions, **columns):\n    return [len(c[-1]['content']) for c in completions]\n"
    )
    task = load_task("rows")
    rows = load_rows(task, "eval", eval_data=str(files / "chat.jsonl"))
    trial = try_function(f"{files / 'chat.py'}:last", task, rows, timeout_s=10)
    assert {batch.what: batch.scores for batch in trial.batches} == {
        "gold": [1.0],
        "completion": [7.0],
        "nothing": [0.0],
        "nonsense": [17.0],
    }


CHAT = """
import asyncio

def readme(prompts, completions, answer, **columns):
    return [1.0 if a in c else 0.0 for c, a in zip(completions, answer)]

async def later(prompts, completions, answer, **columns):
    async def one(completion, answer):
        await asyncio.sleep(0.01)
        print("judged", answer)
        return float(answer in completion[0]["content"])
    return await asyncio.gather(*[one(c, a) for c, a in zip(completions, answer)])
"""


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    rows = [{"prompt": [{"role": "user", "content": f"say {letter}"}], "answer": letter} for letter in "abcd"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(CHAT)
    return tmp_path


def test_a_function_that_takes_messages_for_text_is_told_of(chat: Path) -> None:
    assert tried(chat, "readme").warnings()[0] == (
        "`readme` compares a completion with text, but a completion is a list of messages here, as the prompts are; "
        'its text is completion[0]["content"]'
    )


def test_an_asynchronous_function_is_tried_like_any_other_and_what_it_prints_is_shown(chat: Path) -> None:
    trial = tried(chat, "later")
    assert {batch.what: batch.scores for batch in trial.batches} == {
        "gold": [1.0] * 4,
        "nothing": [0.0] * 4,
        "nonsense": [0.0] * 4,
    }
    assert trial.warnings() == []
    assert render(trial).splitlines()[-13:] == [
        "printed (the last 12 lines):",
        *(f"  later: judged {letter}" for letter in "abcd" * 3),
    ]


def test_reward_test_prints_a_table_and_exits_by_the_failures(files: Path) -> None:
    def run(function: str, *more: str):
        words = ["reward", "test", f"{files / 'rewards.py'}:{function}", "--data", str(files / "rows.jsonl"), *more]
        return CliRunner().invoke(app, words)

    assert run("right").exit_code == 0
    assert "ms a call of 2 (median)" in run("right", "--num-rows", "2").output
    assert run("crash").exit_code == 3
    missing = run("rihgt")
    assert missing.exit_code == 2
    assert "Did you mean `right`?" in missing.output
