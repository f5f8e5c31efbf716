"""GSM8K: grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168), scored by the final number alone.

The number is what follows the last "####" (the format of the data), else the last \\boxed{...}, else the last number
of the completion: a right answer counts, however the model was taught to mark it.
"""

from __future__ import annotations

from fractions import Fraction

from tinyrl.data.readers import Row
from tinyrl.data.rows import read_rows
from tinyrl.tasks import Task, text_in
from tinyrl.tasks.grading import after_last, boxed, by_row, first_number, parse_number
from tinyrl.tasks.stated import stated_number

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
    for written in (first_number(after_last(text, "####") or ""), boxed(text)):
        if (number := parse_number(written)) is not None:
            return number
    return stated_number(text)


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
