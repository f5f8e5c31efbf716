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
HOW_TO_REWARD = "reward.functions=[{use: FILE.py:FUNCTION}] or reward.model=PATH"


def check_rewarded(config: Config, task: Task, rows: list[Row], *, by_environment: bool | None = None) -> None:
    """Raise ValueError where a method that needs a reward, or run.patience, has none. by_environment: whether the
    environment gives rewards; None: it is not loaded yet, and may.
    """
    if by_environment is None:
        by_environment = may_be_rewarded_by_environment(config, task)
    is_needed = config.trains.rewarded or config.run.patience is not None
    missing = None if by_environment or not is_needed else missing_reward(config, task, rows)
    if missing is not None:
        none = "no reward" if config.trains.rewarded else f"run.patience={config.run.patience} needs a held-out reward"
        if config.environment.name and may_be_rewarded_by_environment(config, task):  # it has been loaded
            none += f": environment.name={config.environment.name} gives none, as it has no get_reward"
        raise ValueError(f"{none}: {missing}")


def missing_reward(config: Config, task: Task, rows: list[Row]) -> str | None:
    """Return why nothing but an environment can reward completions: neither functions nor a model are set, and the task
    has no verifier or no row has what it compares with. None where something does.
    """
    if not config.reward.is_verifier:
        return None
    if not task.has_verifier:
        return f"task {task.name} has no verifier, and reward.functions is empty. Give {HOW_TO_REWARD}"
    column = task.compares_with
    if not column or any(task.gold(row) is not None for row in rows):
        return None
    others = [name for name in rows[0] if name not in ("prompt", column)]
    there = f"columns: {join_truncated(others)}" if others else "there are no other columns"
    if any(column in row for row in rows):
        problem = f"column `{column}` is empty in all rows"
    else:
        problem = f"rows have no column `{column}`"
    rename = f", or rename a column: task.columns.{column}=OLD" if others else ""
    return f"{problem}, and reward.functions is empty; {there}. Give {HOW_TO_REWARD}{rename}"


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
