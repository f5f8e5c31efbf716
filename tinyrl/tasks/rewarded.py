"""Checks of rows before a model is loaded: that a run has a reward, and what a teacher is shown."""

from __future__ import annotations

import string

from tinyrl.config.schema import Config
from tinyrl.config.sections import BUILT_IN_ENVIRONMENTS
from tinyrl.data.readers import Row
from tinyrl.tasks import Task
from tinyrl.text import did_you_mean, join_truncated

CORRECT = "correct"
WHY = "why"  # in a hint: another right response of the group; texts of reward or environment
HOW_TO_REWARD = "Give reward.functions=[{use: FILE.py:FUNCTION}] or reward.model=PATH"


def check_rewarded(config: Config, task: Task, rows: list[Row]) -> None:
    """Raise ValueError where a method that needs a reward, or run.patience, has none: neither functions nor a model are
    set, the environment is not one that may give some, and the task has no verifier or no row has what it compares
    with.
    """
    is_needed = config.trains.rewarded or config.run.patience is not None
    if not is_needed or not config.reward.is_verifier or may_be_rewarded_by_environment(config, task):
        return
    none = "no reward" if config.trains.rewarded else f"run.patience={config.run.patience} needs a held-out reward"
    if not task.has_verifier:
        raise ValueError(f"{none}: task {task.name} has no verifier, and reward.functions is empty. {HOW_TO_REWARD}")
    column = task.compares_with
    if not column or any(task.gold(row) is not None for row in rows):
        return
    others = [name for name in rows[0] if name not in ("prompt", column)]
    there = f"columns: {join_truncated(others)}" if others else "there are no other columns"
    if any(column in row for row in rows):
        problem = f"column `{column}` is empty in all rows"
    else:
        problem = f"rows have no column `{column}`"
    rename = f", or rename a column: task.columns.{column}=OLD" if others else ""
    raise ValueError(f"{none}: {problem}, and reward.functions is empty; {there}. {HOW_TO_REWARD}{rename}")


def may_be_rewarded_by_environment(config: Config, task: Task) -> bool:
    """Return whether replies may hold rewards: of a user environment, or of the task's own."""
    if not config.uses("environment"):
        return False
    name = config.environment.name
    return task.has_replies or (name is not None and name not in BUILT_IN_ENVIRONMENTS)


def check_hint(config: Config, rows: list[Row]) -> None:
    """Raise ValueError where teacher.hint names a column that no row has."""
    if config.teacher.hint is None or not config.learns_from_teacher:
        return
    for name in hint_names(config.teacher.hint):
        if name not in (CORRECT, WHY) and not any(name in row for row in rows):
            there = [*rows[0]]
            raise ValueError(
                f"teacher.hint has {{{name}}}, and no row has such a column.{did_you_mean(name, there)} "
                f"Columns: {join_truncated([*there, CORRECT, WHY])}"
            )


def hint_names(hint: str) -> list[str]:
    """Return the names in braces. Raises ValueError for a brace that does not close."""
    try:
        return [name for _, name, _, _ in string.Formatter().parse(hint) if name is not None]
    except ValueError as error:
        raise ValueError(f"teacher.hint: {error}; a brace of the text is written twice") from None
