"""GSM8K: grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168), scored by the final number alone.

The number is what follows the last "####" (the format of the data), else the one that the completion states by
<answer>, \\boxed{...} or "the answer is" (tasks/stated.py), else its last number: a right answer counts, however the
model was taught to mark it.
"""

from __future__ import annotations

from fractions import Fraction

from tinyrl.data.readers import Row
from tinyrl.data.sources import read_rows
from tinyrl.tasks import Task, text_in
from tinyrl.tasks.grading import after_last, by_row, first_number
from tinyrl.tasks.stated import begun_number, number_of, stated_answer, stated_number

HUB = {"train": "openai/gsm8k:main@train", "eval": "openai/gsm8k:main@test"}
INSTRUCTION = "Reason step by step, then give the final number on a line of its own after ####."


def gold(row: Row) -> str:
    """Return the reasoning of the data, which ends in "#### number"; a bare number is an answer too."""
    text = str(row["answer"])
    if answer(text, row) is None:
        raise ValueError(f"'answer' must end in '#### number', not {text[-60:]!r}")
    return text


def answer(text: str, row: Row) -> Fraction | None:
    """Return the number that a completion gives as its answer; None if it gives none."""
    line = after_last(text, "####") or ""
    if first_number(line) is not None:
        return begun_number(line)
    stated = stated_answer(text)
    return stated_number(text) if first_number(stated.text) is None else number_of(stated, text)


def score(text: str, row: Row) -> float:
    """Return 1.0 if a completion's number equals that of the row's `answer`, else 0.0."""
    number = answer(text, row)
    return float(number is not None and number == answer(str(row["answer"]), row))


TASK = Task(
    name="gsm8k",
    summary="grade-school word problems with a number as the answer (openai/gsm8k, MIT)",
    rows=lambda split: read_rows(HUB[split]),
    prompt=lambda row: f"{text_in(row, 'question')}\n{INSTRUCTION}",
    verify=by_row(score),
    right_or_wrong=True,
    gold=gold,
    columns=("question", "answer"),
    answer=answer,
    can_grade_math=True,
)
