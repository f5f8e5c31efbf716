"""The table of tasks, and the rows of one: its own or the user's, checked, split and cut to size.

Tasks are modules named in one dict, imported when asked for. Rows a user gives (`task.data`) are checked one by one
against the task before anything is trained, so a bad row is reported with its file and line.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from typing import TYPE_CHECKING, Literal

from tinyrl.data.messages import CONVERSATIONS
from tinyrl.data.readers import Row, placed_rows
from tinyrl.data.rows import hold_out
from tinyrl.data.shapes import shared_prompt
from tinyrl.tasks.task import Task
from tinyrl.text import did_you_mean, listed

if TYPE_CHECKING:
    from tinyrl.config.schema import Config
    from tinyrl.config.sections import EnvironmentConfig

TASKS: dict[str, str] = {
    "sort": "tinyrl.tasks.sort",
    "sums": "tinyrl.tasks.sums",
    "reviews": "tinyrl.tasks.reviews",
    "lookup": "tinyrl.tasks.lookup",
    "gsm8k": "tinyrl.tasks.gsm8k",
    "countdown": "tinyrl.tasks.countdown",
    "knights_and_knaves": "tinyrl.tasks.knights_and_knaves",
    "search_qa": "tinyrl.tasks.search_qa",
    "reasoning_gym": "tinyrl.tasks.reasoning_gym",
    "rows": "tinyrl.tasks.rows",
    "mixture": "tinyrl.tasks.mixture",
}

RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")  # a reward function gets these from us


Grading = Literal["task", "math"]
MATH_GRADER = "tinyrl.tasks.math_grading:equal_answers"


def load_task(name: str, *, grading: Grading = "task") -> Task:
    """The task called `name`, with its own verifier or graded as mathematics.

    ValueError where there is none of that name (lists the names), it cannot be graded so, or math-verify is missing.
    """
    if name not in TASKS:
        meant = did_you_mean(name, list(TASKS))
        raise ValueError(f"task.name: there is no task '{name}'.{meant} Tasks: {', '.join(TASKS)}")
    task: Task = importlib.import_module(TASKS[name]).TASK
    if grading == "task":
        return task
    if not task.can_grade_math:
        raise ValueError(
            f"task.grading=math compares a column 'answer', and task {name} has a rule of its own; "
            "it is for the tasks gsm8k and rows"
        )
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("task.grading=math needs math-verify: pip install 'tinyrl[math]'")
    return dataclasses.replace(task, grader=MATH_GRADER)


def environments(config: Config) -> dict[str, tuple[EnvironmentConfig, Task]]:
    """By source ("" where there is one) the section and the task: either may say what answers between turns."""
    section, where = config.environment, config.task
    if not where.sources:
        return {"": (section, load_task(where.name or "rows", grading=where.grading))}
    return {
        source.label: (section.model_copy(update={"use": source.environment}), load_task(source.task))
        for source in where.sources
    }


def environment_functions(config: Config) -> list[tuple[str, str]]:
    """The settings that name people's code of environments, each with what it names."""
    found = [function for section, _ in environments(config).values() for function in section.functions]
    return list(dict.fromkeys(found))


def load_split(config: Config, split: str) -> list[Row]:
    """The rows of "train" or "eval" that a run has: `load_rows` with the run's settings."""
    where = config.task
    if where.sources:
        from tinyrl.tasks.mixture import mixed_rows

        rows = mixed_rows(where.sources, split, seed=where.split_seed, verified=config.reward.is_verifier)
        return rows[: where.max_samples]
    return load_rows(
        load_task(where.name or "rows"),
        split,
        data=where.data,
        eval_data=where.eval_data,
        columns=where.columns,
        max_samples=where.max_samples,
        seed=where.split_seed,
        verified=config.reward.is_verifier,
        revision=where.revision,
        evaluated=config.run.eval_prompts > 0,
    )


def load_rows(
    task: Task,
    split: str,
    *,
    data: str | None = None,
    eval_data: str | None = None,
    columns: dict[str, str] | None = None,
    max_samples: int | None = None,
    seed: int = 0,
    revision: str | None = None,
    verified: bool = True,
    evaluated: bool = True,
) -> list[Row]:
    """The rows of "train" or "eval": the task's own, or those of `data` and `eval_data`, at most `max_samples` a split.

    With `data` and no `eval_data` a tenth (1 to 512 rows) is held out for "eval", chosen by `seed`; rows with the same
    prompt never end up on both sides. `columns` {new: old} renames the columns of `data` and `eval_data`. `verified`:
    the task's verifier is the reward, so every row must be one that it can judge; `revision` is that of a hub data set.
    A single prompt is trained on and not held out where nothing is `evaluated`.
    """
    assert split in ("train", "eval"), split
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"task.max_samples: must be at least 1, not {max_samples}")
    if columns and data is None and eval_data is None:
        raise ValueError("task.columns renames the columns of task.data, and no task.data is given")
    source = data if split == "train" else eval_data
    if task.generate is not None:
        return task.generate(source or data, split, seed)[:max_samples]
    if source is not None:
        rows = _read(task, source, columns=columns, verified=verified, revision=revision)
    elif data is not None:
        rows = _read(task, data, columns=columns, verified=verified, revision=revision)
    else:
        rows = task.rows(split)
    if data is not None and eval_data is None:
        train, held_out = hold_out(rows, prompt=task.prompt, seed=seed)
        if not train and not evaluated:
            train, held_out = rows, []
        if not train:
            raise ValueError(
                f"{data}: only one prompt, so none can be held out; give task.eval_data too, or run.eval_prompts=0"
            )
        rows = train if split == "train" else held_out
    return rows[:max_samples]


def check_rows(task: Task, rows: list[Row], *, places: list[str], verified: bool) -> None:
    """ValueError for the first row that the task cannot use; `places[i]` ("file:line") says where row i comes from."""
    for row, place in zip(rows, places, strict=True):
        for column in task.columns:
            if column not in row:
                meant = did_you_mean(column, list(row))
                raise ValueError(
                    f"{place}: no column '{column}', which task '{task.name}' needs.{meant} "
                    f"Columns: {listed(row)}. Rename one with task.columns.{column}=OLD"
                    + (", or say that the rows are your own: task.name=rows" if task.name != "rows" else "")
                )
        for column in RESERVED_COLUMNS:
            if column in row:
                raise ValueError(
                    f"{place}: no column may be called '{column}', reward functions get an argument of that name. "
                    f"Rename it with task.columns.NEW={column}"
                )
        try:
            task.prompt(row)
            task.gold(row)
            if verified and task.check_reference is not None:
                task.check_reference(row)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error


def _read(
    task: Task, source: str, *, columns: dict[str, str] | None, verified: bool, revision: str | None
) -> list[Row]:
    placed = placed_rows(source, columns=columns, revision=revision)
    rows = [_with_prompt(row, place) if "prompt" in task.columns else row for place, row in placed]
    check_rows(task, rows, places=[place for place, _ in placed], verified=verified)
    # rewards get every column as a list, so all rows get the same columns
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in names} for row in rows]


def _with_prompt(row: Row, place: str) -> Row:
    """A conversation or a preference pair without a `prompt` of its own, with the prompt that it begins with."""
    has = {name for name, value in row.items() if value is not None}
    if "prompt" in has or not (has & {*CONVERSATIONS} or has >= {"chosen", "rejected"}):
        return row
    try:
        return {**row, "prompt": shared_prompt(row)}
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
