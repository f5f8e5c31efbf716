"""The user's own rows: a `prompt` (text or chat messages) and, if there is one, the `answer` to compare with.

A completion's answer is the one it marks: the last <answer>...</answer>, else the text after the last "####", else the
last \\boxed{...}, else the whole completion (for a numeric answer: its last number). It is right if it is the same
number or the same text, up to case, spacing and a final full stop. Rows without an answer have no score here (None):
they need a reward function or a reward model, which may read an `answer` of any kind, an empty one too.
"""

from __future__ import annotations

from tinyrl.data.readers import Row
from tinyrl.tasks import Task
from tinyrl.tasks.grading import by_row, last_number, marked_answer, normalised_text, parse_number


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


def answer(text: str) -> str | None:
    """Return a completion's answer, normalised: equal answers are equal texts. None for an empty one."""
    marked = marked_answer(text)
    given = text if marked is None else marked
    number = parse_number(given)
    return str(number) if number is not None else normalised_text(given) or None


def score(text: str, row: Row) -> float | None:
    """Return 1.0 if a completion gives the row's `answer`, 0.0 if not, None if the row has none."""
    if (reference := gold(row)) is None:
        return None
    reference = marked_answer(reference) or reference  # worked solutions that end in "#### 72" are answers too
    marked = marked_answer(text)
    given = text if marked is None else marked
    if (wanted := parse_number(reference)) is not None:
        return float(wanted in (parse_number(given), parse_number(last_number(text)) if marked is None else None))
    return float(normalised_text(reference) in (normalised_text(given), normalised_text(text)))


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
