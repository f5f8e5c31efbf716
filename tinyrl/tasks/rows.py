"""The user's own rows: a `prompt` (text or chat messages) and, if there is one, the `answer` to compare with.

A completion's answer is the one that it states (tasks/stated.py), without markup: what it marks by <answer>, "####" or
\\boxed{}, else what follows "the answer is" in its sentence, else the whole completion. Where the row's `answer` is a
number it is a number too, with a unit or without, or the last one of a completion without a mark. It is right if it is
the same number, or the same text up to case and spacing. Rows without an answer have no score here (None): they need a
reward function or a reward model, which may read an `answer` of any kind, an empty one too.
"""

from __future__ import annotations

from tinyrl.data.readers import Row
from tinyrl.tasks import Task
from tinyrl.tasks.grading import by_row, normalised_text, parse_number
from tinyrl.tasks.stated import number_of, stated_answer


def gold(row: Row) -> str | None:
    """Return the row's answer; None if a completion cannot be compared with it."""
    answer = row.get("answer")
    return str(answer) if isinstance(answer, str | int | float) and str(answer).strip() else None


def check_reference(row: Row) -> None:
    """Raise ValueError for an `answer` that is empty, or neither text nor a number."""
    reference = row.get("answer")
    if isinstance(reference, str) and not reference.strip():
        raise ValueError("'answer' is empty; leave it out (or null) where there is none")
    if not isinstance(reference, str | int | float | None):
        raise ValueError(f"'answer' must be text or a number, not {reference!r:.60}")


def answer(text: str, row: Row) -> str | None:
    """Return a completion's answer as a normalised text, the same for equal ones; None for an empty one, and for one
    without a number where the row's answer is a number.
    """
    reference = gold(row)
    given = stated_answer(text)
    is_number = reference is not None and parse_number(stated_answer(reference).text) is not None
    number = number_of(given, text) if is_number else parse_number(given.text)
    if number is not None or is_number:
        return None if number is None else str(number)
    return normalised_text(given.text) or None


def score(text: str, row: Row) -> float | None:
    """Return 1.0 if a completion gives the row's `answer`, 0.0 if not, None if the row has none."""
    reference = gold(row)
    return None if reference is None else float(answer(text, row) == answer(reference, row))


TASK = Task(
    name="rows",
    summary="your own rows: prompt, and an answer to compare with (or bring a reward function)",
    verify=by_row(score),
    right_or_wrong=True,
    gold=gold,
    compares_with="answer",
    check_reference=check_reference,
    answer=answer,
    can_grade_math=True,
)
