"""Which tasks ship, and which of them have replies between turns."""

import importlib
import pkgutil

import pytest

from tinyrl import starter, tasks
from tinyrl.config.task_files import SHIPPED, TaskFacts, has_turns, searches
from tinyrl.tasks.task import Task


def test_the_facts_are_those_of_the_tasks() -> None:
    found: dict[str, TaskFacts] = {}
    for room, package in (("starter", starter), ("tasks", tasks)):
        for file in pkgutil.iter_modules(package.__path__):
            task = getattr(importlib.import_module(f"{package.__name__}.{file.name}"), "TASK", None)
            if isinstance(task, Task):
                assert task.name == file.name
                found[file.name] = TaskFacts(room, environment=task.environment, replies=task.respond is not None)
    assert found == SHIPPED


@pytest.mark.parametrize(
    ("name", "with_turns", "with_search"),
    [
        ("lookup", True, False),
        ("search_qa", True, True),
        ("sums", False, False),
        (None, False, False),
        ("a folder/mine.py:TASK", True, True),  # may be: it is known once it is loaded
    ],
)
def test_settings_of_turns_and_of_search_count_by_task(name: str | None, with_turns: bool, with_search: bool) -> None:
    assert (has_turns(name), searches(name)) == (with_turns, with_search)
