"""Rewards and environments are tried on rows without a model: what was planted is found, sound ones raise no alarm."""

import json
from pathlib import Path

import pytest

from tinyrl.config.recipe import load_config
from tinyrl.tasks import load_splits, load_task
from tinyrl.tools.check.functions import check_environment, check_reward
from tinyrl.tools.check.offline import CheckSection

CODE = '''
import itertools, os
from tinyrl.environments import Reply

calls = itertools.count()

def right(prompts, completions, answer, **columns):
    return [float(c.strip() == a) for a, c in zip(answer, completions)]

def longer(completions, **columns):
    return [float(len(c)) for c in completions]

def flat(completions, **columns):
    return [0.5] * len(completions)

def moody(completions, **columns):
    return [float(next(calls)) for c in completions]

def silent(completions, **columns):
    return [None for c in completions]

def crash(completions, **columns):
    os._exit(7)

def inside(completions, answer, **columns):
    return [float(a in c) for a, c in zip(answer, completions)]

def brief(completions, **columns):
    return [-0.01 * min(len(c), 10) for c in completions]

def message(completions, answer, **columns):
    return [float(c[0]["content"].strip() == a) for a, c in zip(answer, completions)]

def game(prompts, transcripts, answer, **columns):
    ended = [right in turns[-1]["content"] for turns, right in zip(transcripts, answer)]
    return [Reply("right", done=True, reward=2.0) if over else "no, \\x1b[2J again\\n" for over in ended]

def changing(prompts, transcripts, **columns):
    return [str(next(calls)) if t[-1]["content"] else None for t in transcripts]

def mute(prompts, transcripts, **columns):
    return [None for _ in prompts]

def half(prompts, transcripts, answer, **columns):
    return [5 if a in "ab" else None for a in answer]

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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)
    rows = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcd"]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    Path("chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    return tmp_path


def reward(*functions: str, data: str = "rows.jsonl") -> CheckSection:
    used = json.dumps([{"use": f"mine.py:{name}"} for name in functions])
    overrides = [f"task.data={data}", f"task.eval_data={data}", f"reward.functions={used}"]
    config = load_config("grpo", None, overrides=overrides)
    return check_reward(config, load_task("rows"), load_splits(config)[0])


def environment(*settings: str) -> CheckSection:
    config = load_config("grpo", None, overrides=["task.data=rows.jsonl", "task.eval_data=rows.jsonl", *settings])
    found = check_environment(config, load_task("rows"), load_splits(config)[0])
    assert found is not None
    return found


def names(section: CheckSection) -> list[str]:
    return [finding.name for finding in section.findings]


@pytest.mark.parametrize(
    ("functions", "data", "found"),
    [
        (["right"], "rows.jsonl", []),
        (["message"], "chat.jsonl", []),
        (["right", "brief"], "rows.jsonl", []),  # the sum is tried, not each by itself
        (["longer"], "rows.jsonl", ["gold answers do not win"]),
        (["flat"], "rows.jsonl", ["one reward for everything"]),
        (["moody"], "rows.jsonl", ["gold answers do not win", "rewards by chance"]),
        (["silent"], "rows.jsonl", ["no rewards"]),
        (["crash"], "rows.jsonl", ["no rewards", "rewards fail"]),
        (["inside"], "rows.jsonl", ["holes in the reward"]),
        (["inside"], "chat.jsonl", ["messages taken for text"]),
    ],
)
def test_what_is_wrong_with_a_reward_is_found(functions: list[str], data: str, found: list[str], folder: Path) -> None:
    assert names(reward(*functions, data=data)) == found


def test_scores_are_those_of_gold_answers_nothing_and_nonsense(folder: Path) -> None:
    facts = reward("right").facts
    assert (facts["gold"], facts["nothing"], facts["nonsense"], facts["failed"]) == (1.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("environment.use=mine.py:game", []),
        ("environment.use=mine.py:Guessing", []),
        ("environment.tools=[mine.py:add]", []),
        ("environment.use=python", []),
        ("environment.use=mine.py:changing", ["answers by chance"]),
        ("environment.use=mine.py:mute", ["the environment is silent"]),
        ("environment.use=mine.py:half", ["the environment fails"]),
    ],
)
def test_what_is_wrong_with_an_environment_is_found(setting: str, found: list[str], folder: Path) -> None:
    assert names(environment(setting)) == found


def test_turns_are_counted_by_what_they_are(folder: Path) -> None:
    game = environment("environment.use=mine.py:game")
    assert game.facts["gold"] == {"answered": 4, "over": 4, "failed": 0}
    assert game.facts["nonsense"] == {"answered": 4, "over": 0, "failed": 0}
    assert "\x1b" not in game.render()
    tools = environment("environment.tools=[mine.py:add]")
    assert tools.facts["call add"] == {"answered": 4, "over": 0, "failed": 0}
    assert tools.facts["gold"]["over"] == 4
