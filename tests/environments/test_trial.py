"""`tinyrl env test`: what an environment answers to scripted turns, before any training."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tinyrl.cli.commands import app

ENVIRONMENTS = '''
import itertools, os
from tinyrl.environments import Reply

calls = itertools.count()

def game(prompts, transcripts, answer, **columns):
    ended = [right in turns[-1]["content"] for turns, right in zip(transcripts, answer)]
    return [Reply("right", done=True, reward=2.0) if over else "no, \\x1b[2J again\\n" for over in ended]

def moody(prompts, transcripts, **columns):
    return [str(next(calls)) if t[-1]["content"] else None for t in transcripts]

def endless(prompts, transcripts, **columns):
    return ["x" * 5000 for _ in prompts]

def silent(prompts, transcripts, **columns):
    return [None for _ in prompts]

def half(prompts, transcripts, answer, **columns):
    print("asked about", *answer)
    return [5 if a in "ab" else None for a in answer]

def lacking(prompts, transcripts, town):
    return [None for _ in prompts]

def add(a: int, b: list[int]) -> int:
    """Add.

    Args:
        a: One.
        b: Others.
    """
    return a + sum(b)

class Guessing:
    def reset(self, answer, seed, **row):
        self.right, self.won = answer, False
        return f" (hint {seed})"

    def guess(self, word: str) -> str:
        """Guess.

        Args:
            word: What.
        """
        self.won = True
        return f"you said {word}"

    def get_reward(self) -> float:
        return 1.0 if self.won else -1.0
'''


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "env.py").write_text(ENVIRONMENTS)
    rows = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcd"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = [{"question": f"Where is {name}?", "golden_answers": ["Bern"]} for name in ("Ada", "Bob")]
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (tmp_path / "corpus.jsonl").write_text('{"id": 1, "contents": "\\"Ada\\"\\nAda is in Bern."}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tried(*arguments: str, code: int = 0, data: str = "rows.jsonl") -> Result:
    done = CliRunner().invoke(app, ["env", "test", *arguments, "--data", data])
    assert done.exit_code == code, done.output
    return done


def table(done: Result) -> dict[str, list[str]]:
    """The cells of each row but the milliseconds, by what the turns are (two words at most)."""
    lines = done.stdout.split("\n\n")[1].splitlines()[1:]
    cells = {line[:14].strip(): line.split()[-8:] for line in lines}
    return {what: [*row[:6], row[7]] for what, row in cells.items()}


def test_a_function_is_asked_about_gold_answers_nothing_and_nonsense(files: Path) -> None:
    done = tried("env.py:game")
    assert table(done) == {  # rows, replies, over, invalid, rewards, failed, repeatable
        "gold": ["4", "4", "4", "0", "2", "0", "yes"],
        "nothing": ["4", "4", "0", "0", "0", "0", "yes"],
        "nonsense": ["4", "4", "0", "0", "0", "0", "yes"],
    }
    assert "turn (nothing):\n  (nothing)\nreply:\n  no, [ESC][2J again\n" in done.stdout
    assert "warning" not in done.stdout


@pytest.mark.slow
def test_tools_are_called_rightly_and_wrongly(files: Path) -> None:
    done = tried("env.py:add", "--tools")
    found = table(done)
    assert found["call add"] == ["4", "4", "0", "0", "0", "0", "yes"]
    assert found["unknown tool"] == found["not JSON"] == ["4", "4", "0", "4", "0", "0", "yes"]
    assert found["gold"] == ["4", "0", "4", "0", "-", "0", "yes"]
    assert '{"name": "add", "arguments": {"a": 1, "b": [1]}}\n  </tool_call>\nreply:\n  2\n' in done.stdout
    assert done.stdout.startswith("tools: add(a, b); at most 4 turns")


@pytest.mark.slow
def test_a_class_is_played_from_its_opening(files: Path) -> None:
    done = tried("env.py:Guessing")
    found = table(done)
    assert found["call guess"] == ["4", "4", "0", "0", "0", "0", "yes"]
    assert found["nonsense"] == ["4", "0", "4", "0", "-1", "0", "yes"]
    assert "at the end of the first prompt:\n   (hint 0)" in done.stdout
    assert "reply:\n  you said say a" in done.stdout


@pytest.mark.parametrize(
    ("name", "warnings"),
    [
        ("moody", ["the same turns (gold) got other answers when it was asked again"]),
        ("silent", ["it answered none of these turns, so no episode has a second one"]),
        (
            "endless",
            ["none of these turns ended an episode", "the longest reply has 5,000 characters, some 1,250 tokens"],
        ),
    ],
)
def test_what_is_warned_of(files: Path, name: str, warnings: list[str]) -> None:
    said = [line for line in tried(f"env.py:{name}").stdout.splitlines() if line.startswith("warning: ")]
    assert len(said) == len(warnings)
    assert all(wanted in line for wanted, line in zip(warnings, said, strict=True))


def test_more_failures_than_a_run_stands_are_exit_3(files: Path) -> None:
    done = tried("env.py:half", code=3)
    assert table(done)["gold"] == ["4", "0", "2", "0", "-", "2", "-"]
    assert "first failure: row 1: `half` answered with int, not with text" in done.stdout
    assert "half: asked about a b c d" in done.stdout
    assert "warning: 50% of the rows failed; a run stops after three batches like that" in done.stdout


def test_search_and_python_are_tried_too(files: Path) -> None:
    done = tried("search", "--corpus", "corpus.jsonl", "--task", "search_qa", data="qa.jsonl")
    assert table(done)["search"] == ["2", "2", "0", "0", "0", "0", "yes"]
    assert table(done)["gold"] == ["2", "0", "2", "0", "-", "0", "yes"]
    assert done.stdout.startswith("search of corpus.jsonl (passages: 1), 3 a query;")
    assert "  <search>Where is Ada?</search>\nreply:\n" in done.stdout
    done = tried("python")
    assert table(done)["python"] == ["4", "4", "0", "0", "0", "0", "yes"]
    assert "reply:\n  ```output\n  2\n  ```" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["env.py:gaem"], "has no function 'gaem'. Did you mean `game`?"),
        (["env.py:game", "env.py:half"], "one environment at a time, and these are 2"),
        (["env.py:lacking"], "takes a column 'town', which the data does not have"),
        (["search"], "environment.corpus is missing"),
        (["env.py:game", "--tools"], "environment.tools 'env.py:game'"),
    ],
)
def test_what_cannot_be_tried_is_said(files: Path, arguments: list[str], said: str) -> None:
    done = tried(*arguments, code=2)
    assert said in done.stderr
    assert done.stdout == ""
