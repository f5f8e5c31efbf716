"""Rows without a reward, and hints that name no column, are refused before a model is loaded."""

from pathlib import Path
from typing import Any

import pytest

from tinyrl.config.schema import Config
from tinyrl.data.readers import Row
from tinyrl.data.writers import write_rows
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.resolve import config_of
from tinyrl.tasks import Task, load_task
from tinyrl.tasks.rewarded import check_hint, check_rewarded

WORDS: list[Row] = [
    {"prompt": "sort: cat =", "word": "cat", "vowels": 1},
    {"prompt": "sort: ox =", "word": "ox", "vowels": 1},
]
REWARD = {"functions": [{"use": "rewards.py:score"}]}


def config(method: str = "grpo", **sections: Any) -> Config:
    return config_of({"method": method, "model": {"path": "starter"}, "task": {"data": "rows.jsonl"}, **sections})


def test_rows_without_the_column_that_is_compared_are_refused_with_those_they_have() -> None:
    with pytest.raises(ValueError, match=r"`answer`.*word, vowels"):
        check_rewarded(config(), load_task("rows"), WORDS)


def test_a_column_that_is_empty_throughout_is_none() -> None:
    with pytest.raises(ValueError, match="`answer`"):
        check_rewarded(config(), load_task("rows"), [{"prompt": "a", "answer": None}, {"prompt": "b", "answer": " "}])


def test_a_task_without_a_verifier_is_refused() -> None:
    with pytest.raises(ValueError, match="no verifier"):
        check_rewarded(config(), Task(name="mine"), WORDS)


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        (config(), [*WORDS, {"prompt": "b", "answer": "b"}]),  # some rows have one
        (config(reward=REWARD), WORDS),
        (config(reward={"model": "MODEL"}), WORDS),
        (config(environment={"name": "game.py:respond"}), WORDS),  # its replies may hold rewards
        (config("distill", teacher={"path": "starter"}), WORDS),
    ],
    ids=["some answers", "a function", "a reward model", "an environment", "a method that needs none"],
)
def test_a_run_that_has_or_needs_no_reward_is_not_refused(given: Config, rows: list[Row]) -> None:
    check_rewarded(given, load_task("rows"), rows)


@pytest.mark.parametrize("environment", [{"tools": ["tools.py:add"]}, {"name": "python"}], ids=["tools", "python"])
def test_an_environment_that_gives_no_rewards_is_no_reward(environment: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="`answer`"):
        check_rewarded(config(environment=environment), load_task("rows"), WORDS)


def test_an_environment_that_turns_out_to_give_no_rewards_is_refused() -> None:
    given = config(environment={"name": "guess.py:Guess"})
    with pytest.raises(ValueError, match="get_reward"):
        check_rewarded(given, load_task("rows"), WORDS, by_environment=False)
    check_rewarded(given, load_task("rows"), WORDS, by_environment=True)
    check_rewarded(given, load_task("rows"), [{"prompt": "a", "answer": "b"}], by_environment=False)


def hinted(hint: str) -> Config:
    return config("distill", teacher={"path": "self", "hint": hint})


def test_a_hint_may_name_columns_and_what_a_run_fills_in() -> None:
    check_hint(hinted("Its vowels: {vowels}. Right: {correct}. Why: {why}"), WORDS)


def test_a_hint_that_names_no_column_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"\{vowel\}.*`vowels`"):
        check_hint(hinted("Its vowels: {vowel}"), WORDS)


def test_a_hint_with_an_open_brace_is_refused() -> None:
    with pytest.raises(ValueError, match=r"teacher\.hint"):
        check_hint(hinted("Its vowels: {vowels"), WORDS)


@pytest.mark.parametrize(
    ("method", "sections", "named"),
    [("grpo", {}, "`answer`"), ("distill", {"teacher": {"path": "self", "hint": "{vowel}"}}, "vowel")],
)
def test_a_run_is_refused_before_its_model_is_loaded(
    method: str, sections: dict[str, Any], named: str, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", WORDS)
    given = config(method, task={"data": str(rows)}, **sections)
    with pytest.raises(ValueError, match=named):
        prepare(given)
