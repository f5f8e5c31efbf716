"""The tasks that ship, by their files: which there are, and which have replies between turns.

A file of tasks/ or starter/ is a task if it has the line `TASK = Task(...)`. It is read and not run, since settings
depend on what it says (an environment's count only with one), and nothing of a task may be imported here.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
ROOMS = ("starter", "tasks")  # of the embedded models, and what people train on
MARK = "\nTASK = Task("


@dataclass(frozen=True)
class TaskFile:
    """module: what has the TASK; environment: the built-in one that replies; replies: it has replies of its own."""

    module: str
    environment: str | None
    replies: bool


@cache
def shipped_tasks() -> dict[str, TaskFile]:
    """Return the tasks by their names, which are those of their files."""
    found: dict[str, TaskFile] = {}
    for room in ROOMS:
        for file in sorted((PACKAGE / room).glob("*.py")):
            _, mark, arguments = file.read_text(encoding="utf-8").partition(MARK)
            if mark:
                found[file.stem] = _task_file(f"{PACKAGE.name}.{room}.{file.stem}", mark + arguments)
    return found


def _task_file(module: str, text: str) -> TaskFile:
    """Read the call of Task that a text begins with."""
    [assignment] = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)][:1]
    assert isinstance(assignment.value, ast.Call), module
    given = {keyword.arg: keyword.value for keyword in assignment.value.keywords}
    environment = ast.literal_eval(given["environment"]) if "environment" in given else None
    return TaskFile(module, environment=environment, replies="respond" in given)


def has_turns(name: object) -> bool:
    """Return whether a task has replies between turns; a person's own (FILE.py:TASK) may have some."""
    task = shipped_tasks().get(str(name))
    return is_own(name) or (task is not None and (task.replies or task.environment is not None))


def searches(name: object) -> bool:
    """Return whether a task's replies are those of a search; a person's own may be."""
    task = shipped_tasks().get(str(name))
    return is_own(name) or (task is not None and task.environment == "search")


def is_own(name: object) -> bool:
    return ".py:" in str(name)
