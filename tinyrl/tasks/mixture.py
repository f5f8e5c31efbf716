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
from tinyrl.data.rows import SOURCE, by_kind
from tinyrl.tasks import Task

SOURCE_TASK = "source_task"


def rows(split: str) -> list[Row]:
    """There are none: the rows are those of task.sources."""
    raise ValueError("task 'mixture' has no rows of its own: name some in task.sources")


def mixed_rows(sources: list[SourceConfig], split: str, *, seed: int, verified: bool) -> list[Row]:
    """The rows of every source, one of each in turn, so that the first held-out ones are of all. A prompt that
    another of them holds out is not trained on.

    Raises ValueError, naming the source, for rows that its task cannot use.
    """
    of_each = [_rows_of(source, split, seed=seed, verified=verified) for source in sources]
    mixed = [row for turn in zip_longest(*of_each) for row in turn if row is not None]
    if split == "eval":
        return mixed
    held_out: dict[str, set[str]] = {}  # by prompt the sources that hold it out
    for row in mixed_rows(sources, "eval", seed=seed, verified=verified):
        held_out.setdefault(str(prompt(row)), set()).add(row[SOURCE])
    return [row for row in mixed if held_out.get(str(prompt(row)), {row[SOURCE]}) == {row[SOURCE]}]


def _rows_of(source: SourceConfig, split: str, *, seed: int, verified: bool) -> list[Row]:
    from tinyrl.tasks import load_rows, load_task  # this task is in their table

    try:
        task = load_task(source.task)
        if task.name == "mixture":
            raise ValueError("task mixture mixes itself; it cannot be one of several sources")
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
    for name, places, own in by_kind(source_task, columns):
        judge = _task(name).verify
        if judge is None:
            continue
        found = judge([prompts[p] for p in places], [completions[p] for p in places], **own)
        for place, score in zip(places, found, strict=True):
            scores[place] = score
    return scores


def asking_turn(row: Row) -> str | None:
    """The first turn that the row's own task knows."""
    asks = _task(row[SOURCE_TASK]).asking_turn
    return None if asks is None else asks(row)


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
    asking_turn=asking_turn,
    grader="tinyrl.tasks.mixture:verify",
)
