"""Several sources of rows in one run (task.sources): each row keeps the prompt and the verifier of its own task.

A row says where it is from in two columns: `source`, the name that metrics have, and `source_task`. Reward functions
get both, so one may return None ("does not apply") for rows of other sources.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from tinyrl.config.sections import SourceConfig
from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.tasks.task import Task

SOURCE, SOURCE_TASK = "source", "source_task"


def rows(split: str) -> list[Row]:
    """There are none: the rows are those of task.sources."""
    raise ValueError("task 'mixture' has no rows of its own: name some in task.sources")


def mixed_rows(sources: list[SourceConfig], split: str, *, seed: int, verified: bool) -> list[Row]:
    """The rows of every source, one of each in turn, so that the first held-out ones are of all. A prompt that any of
    them holds out is not trained on.

    Raises ValueError, naming the source, for rows that its task cannot use and for tasks that play episodes.
    """
    of_each = [_rows_of(source, split, seed=seed, verified=verified) for source in sources]
    mixed = [row for turn in zip_longest(*of_each) for row in turn if row is not None]
    if split == "eval":
        return mixed
    held_out = {str(prompt(row)) for row in mixed_rows(sources, "eval", seed=seed, verified=verified)}
    return [row for row in mixed if str(prompt(row)) not in held_out]


def _rows_of(source: SourceConfig, split: str, *, seed: int, verified: bool) -> list[Row]:
    from tinyrl.tasks import load_rows, load_task  # this task is in their table

    try:
        task = load_task(source.task)
        if task.respond is not None or task.environment is not None or task.name == "mixture":
            raise ValueError(f"task {task.name} plays episodes, or mixes itself; it cannot be one of several sources")
        found = load_rows(
            task,
            split,
            data=source.data,
            eval_data=source.eval_data,
            columns=source.columns,
            max_samples=source.max_samples,
            seed=seed,
            verified=verified,
        )
    except ValueError as error:
        raise ValueError(f"task.sources: {source.label}: {error}") from None
    return [{SOURCE: source.label, SOURCE_TASK: source.task, **row} for row in found]


def prompt(row: Row) -> Prompt:
    """The prompt that the row's own task makes of it."""
    return _task(row[SOURCE_TASK]).prompt(row)


def gold(row: Row) -> str | None:
    """The gold answer of the row's own task."""
    return _task(row[SOURCE_TASK]).gold(row)


def verify(
    prompts: list[Prompt], completions: list[Any], *, source_task: list[str], **columns: Any
) -> list[float | None]:
    """Each row's score by the verifier of its own task; None where that has none."""
    scores: list[float | None] = [None] * len(prompts)
    for name in dict.fromkeys(source_task):
        places = [place for place, other in enumerate(source_task) if other == name]
        judge = _task(name).verify
        if judge is None:
            continue
        own = {column: [values[place] for place in places] for column, values in columns.items()}
        there = {column: values for column, values in own.items() if any(value is not None for value in values)}
        found = judge([prompts[p] for p in places], [completions[p] for p in places], **there)
        for place, score in zip(places, found, strict=True):
            scores[place] = score
    return scores


def _task(name: str) -> Task:
    from tinyrl.tasks import load_task

    return load_task(name)


TASK = Task(
    name="mixture",
    summary="several sources in one run, each with its own rows, verifier and weight: task.sources=[...]",
    rows=rows,
    prompt=prompt,
    verify=verify,
    gold=gold,
    columns=(SOURCE, SOURCE_TASK),
    grader="tinyrl.tasks.mixture:verify",
)
