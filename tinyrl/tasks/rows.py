"""The user's own rows: a `prompt` (text or chat messages) and, where there is one, the `answer` to compare with.

A completion's answer is what it marks: the last <answer>...</answer>, else what follows the last "####", else the last
\\boxed{...}, else the whole completion (for a numeric answer: its last number). It is right when it is the same number
or the same text, case, spacing and a final full stop aside. Rows without an answer have no score here (None): they
need a reward function or a reward model, which may read an `answer` of any kind, an empty one too.
"""

from __future__ import annotations

from tinyrl.data.readers import Row
from tinyrl.tasks import Task
from tinyrl.tasks.grading import by_row, last_number, marked_answer, normalised_text, parse_number


def gold(row: Row) -> str | None:
    """The row's answer; None where it has none that a completion can be compared with: a reward function of the user's
    own may read anything else.
    """
    answer = row.get("answer")
    return str(answer) if isinstance(answer, str | int | float) and str(answer).strip() else None


def check_reference(row: Row) -> None:
    """ValueError for an `answer` that is there and cannot be compared with: empty, or neither text nor a number."""
    reference = row.get("answer")
    if reference is None or gold(row) is not None:
        return
    if not isinstance(reference, str):
        raise ValueError(f"'answer' must be text or a number, not {reference!r:.60}")
    raise ValueError("'answer' is empty; leave it out (or null) where there is none")


def answer(text: str) -> str | None:
    """What a completion says, normalised: equal answers are equal texts. None for an empty one."""
    marked = marked_answer(text)
    number = parse_number(marked if marked is not None else text)
    return str(number) if number is not None else normalised_text(text if marked is None else marked) or None


def _is_right(text: str, reference: str) -> bool:
    reference = marked_answer(reference) or reference  # worked solutions that end in "#### 72" are answers too
    marked = marked_answer(text)
    wanted = parse_number(reference)
    if wanted is not None:
        said = marked if marked is not None else text
        return wanted == parse_number(said) or (marked is None and wanted == parse_number(last_number(text)))
    return any(normalised_text(said) == normalised_text(reference) for said in (marked, text) if said is not None)


def score(text: str, row: Row) -> float | None:
    """1.0 where a completion gives the row's `answer`, 0.0 where not, None where the row has none."""
    reference = gold(row)
    return None if reference is None else float(_is_right(text, reference))


TASK = Task(
    name="rows",
    summary="your own rows: prompt, and an answer to compare with (or bring a reward function)",
    verify=by_row(score),
    gold=gold,
    check_reference=check_reference,
    columns=("prompt",),
    answer=answer,
    can_grade_math=True,
)
