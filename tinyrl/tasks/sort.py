"""The sort task: eight different letters; full marks for exactly the right order, nothing for anything else.

The embedded default's own task: its language model makes the mistakes of its pre-training text, all wrong here.
"""

from typing import Any

from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.starter.text import sort_completion, sort_rows
from tinyrl.tasks.grading import completion_text
from tinyrl.tasks.task import Task

NUM_ROWS = {"train": 4096, "eval": 512}


def rows(split: str) -> list[Row]:
    """Rows {"prompt", "answer"}: 4,096 to train on, 512 held out; none was ever in the pre-training text."""
    if split not in NUM_ROWS:
        raise ValueError(f"task sort has no split {split!r}; there are {', '.join(NUM_ROWS)}")
    return list[Row](sort_rows(split, num_rows=NUM_ROWS[split]))


def prompt(row: Row) -> Prompt:
    """'letters: d b a sorted:'."""
    return row["prompt"]


def listed_letters(text: str) -> str | None:
    """The letters a completion lists ('a b d' -> 'abd'); None when it is anything but single letters."""
    parts = text.split()
    return "".join(parts) if parts and all(len(part) == 1 and part.isalpha() for part in parts) else None


def verify(prompts: list[Prompt], completions: list[Any], *, answer: list[str], **columns: Any) -> list[float | None]:
    """1.0 where a completion lists exactly the sorted letters, else 0.0."""
    found = [listed_letters(completion_text(completion)) for completion in completions]
    return [float(letters == right) for letters, right in zip(found, answer, strict=True)]


def gold(row: Row) -> str:
    """The right completion."""
    return sort_completion(row["answer"])


TASK = Task(
    name="sort",
    summary="sort eight letters (the embedded default's own task; right or wrong)",
    rows=rows,
    prompt=prompt,
    verify=verify,
    gold=gold,
    columns=("prompt", "answer"),
    answer=listed_letters,
)
