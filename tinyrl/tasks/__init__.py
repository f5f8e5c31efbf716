"""Tasks, by name or file: one that ships is a file with its TASK, here or beside the embedded models (starter/); a
user task is file.py:TASK. The rows of a run, a task's own or the user's, are read in run_rows.py.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from typing import Literal

from tinyrl.config.refusal import Refusal
from tinyrl.config.schema import Config
from tinyrl.config.task_files import SHIPPED, is_own
from tinyrl.tasks.own import own_task
from tinyrl.tasks.task import Task, text_in
from tinyrl.text import truncate

__all__ = ["TASKS", "Task", "load_task", "task_of", "text_in"]
TASKS = tuple(SHIPPED)


def task_of(config: Config) -> Task:
    """Load the task of a configuration. Raises ValueError as `load_task` does."""
    return load_task(config.task.name or "rows", grading=config.task.grading)


def load_task(name: str, *, grading: Literal["task", "math"] = "task") -> Task:
    """Load a task of tinyrl, or a user task from `file.py:TASK`, with its own verifier or graded as mathematics.

    Raises ValueError for a task that does not exist or cannot be graded so, and if math-verify is missing.
    """
    if is_own(name):
        try:
            task = own_task(name)
        except ValueError as error:
            raise Refusal(("task.name",), str(error)) from error
    elif name in TASKS:
        task = importlib.import_module(f"tinyrl.{SHIPPED[name].room}.{name}").TASK
    else:
        there_are = f"Tasks: {', '.join(TASKS)}, or file.py:TASK"
        raise Refusal(("task.name",), f"task.name: there is no task '{truncate(name)}'. {there_are}")
    if grading == "task":
        return task
    if not task.can_grade_math:
        raise Refusal(
            ("task.grading", "task.name"),
            f"task.grading=math is for the tasks gsm8k and rows; task {name} has a rule of its own",
        )
    if importlib.util.find_spec("math_verify") is None:
        raise Refusal(("task.grading",), "task.grading=math needs math-verify: pip install 'tinyrl[math]'")
    return replace(task, grader="tinyrl.tasks.math_grading:equal_answers", equal_by_verdict=True)
