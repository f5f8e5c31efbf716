"""A shipped task that is named by its file does what it does by its name: an own task can do all that it can."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.running import rows_for
from tests.tiny_models import tiny_model
from tinyrl.starter import lookup
from tinyrl.tasks import load_task

BY_PATH = f"{lookup.__file__}:TASK"


def settings(name: str, model: Path) -> Any:
    reward = {"functions": []}  # its own verifier
    few: dict[str, Any] = {"grpo": {"num_prompts": 2, "group_size": 2}, "run": {"num_steps": 1, "eval_prompts": 2}}
    return running.config("grpo", model, task={"name": name}, reward=reward, environment={"max_turns": 2}, **few)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


def test_its_rows_are_the_same(model: Path) -> None:
    by_path, by_name = rows_for(settings(BY_PATH, model)), rows_for(settings("lookup", model))
    assert (by_path.train, by_path.held_out) == (by_name.train, by_name.held_out)


def test_its_answers_and_replies_are_the_same() -> None:
    by_name, by_path = load_task("lookup"), load_task(BY_PATH)
    row = by_name.rows("eval")[0]
    assert by_path.gold(row) == by_name.gold(row)
    assert by_path.asking_turn is not None
    assert by_name.asking_turn is not None
    assert by_path.asking_turn(row) == by_name.asking_turn(row)


def test_its_facts_are_the_same() -> None:
    """Of each field that is no function."""
    by_name, by_path = load_task("lookup"), load_task(BY_PATH)
    plain = [
        field.name for field in fields(by_name) if not callable(getattr(by_name, field.name)) and field.name != "own"
    ]
    assert {"right_or_wrong", "compares_with", "columns", "stop"} <= {*plain}
    assert {name: getattr(by_path, name) for name in plain} == {name: getattr(by_name, name) for name in plain}


def test_a_run_has_the_same_numbers(model: Path, tmp_path: Path) -> None:
    found = []
    for name, task in (("by-name", "lookup"), ("by-path", BY_PATH)):
        code, run, _ = running.train(settings(task, model), tmp_path, name=name)
        assert code == 0
        found.append(running.lasting(run))
    assert len(found[0]) == 2
    assert found[0] == found[1]
