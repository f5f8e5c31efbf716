"""Right answers are found in the column that a reward reads, in the form that it pays for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest

from tinyrl.data.readers import Row
from tinyrl.rewards.holes import Score, answers_in, known_answers
from tinyrl.tasks import load_task
from tinyrl.tools.check.right_answers import PaidForm, columns_to_try, paid_column, paid_form

ROWS: list[Row] = [{"prompt": f"{i}?", "level": i % 3, "solution": f"So.\n#### {7 * i}"} for i in range(1, 9)]
TAGGED = re.compile(r"<answer>(.*?)</answer>")


def scored_by(judge: Callable[[str, Row], float]) -> Score:
    return lambda where, texts: [judge(text, ROWS[i]) for i, text in zip(where, texts, strict=True)]


def in_tags(text: str, row: Row) -> float:
    """Pay for the right number in tags; NaN for a text without any."""
    found = TAGGED.findall(text)
    return float(found[-1] == row["solution"].split()[-1]) if found else math.nan


def found_with(judge: Callable[[str, Row], float], *named: str, takes_any: bool = False) -> PaidForm | None:
    columns = columns_to_try(ROWS, named={*named}, takes_any=takes_any)
    return paid_column(scored_by(judge), ROWS, columns, enough=1.0)


@pytest.mark.parametrize(("named", "takes_any"), [(("solution",), False), ((), True), (("level",), True)])
def test_the_column_of_right_answers_is_the_one_that_is_paid_for(*, named: tuple[str, ...], takes_any: bool) -> None:
    found = found_with(in_tags, *named, takes_any=takes_any)
    assert found is not None
    assert (found.answers.column, found.form, found.score) == ("solution", "<answer>", 1.0)
    assert found.example == "<answer>7</answer>"


def test_a_column_that_no_function_can_read_is_not_tried() -> None:
    assert found_with(in_tags, "level") is None


@pytest.mark.parametrize("judge", [lambda text, row: len(text), lambda text, row: 0.5, lambda text, row: math.nan])
def test_a_reward_that_reads_no_row_pays_for_no_answer(judge: Callable[[str, Row], float]) -> None:
    """Lengths grow along the rows, so that an answer would win against the row before it alone."""
    rows: list[Row] = [{"prompt": f"{i}?", "answer": "9" * i} for i in range(1, 9)]
    answers = known_answers(load_task("rows"), rows)
    assert paid_form(scored_by(judge), answers, enough=1.0) is None


def test_the_form_that_scores_best_is_taken_though_others_are_paid_for() -> None:
    def judge(text: str, row: Row) -> float:
        right = row["solution"].split()[-1]
        return 0.4 * (right in text) + 0.6 * (f"\\boxed{{{right}}}" in text)

    found = paid_form(scored_by(judge), answers_in("solution", ROWS), enough=1.0)
    assert found is not None
    assert (found.form, found.score) == ("\\boxed", 1.0)


def test_answers_as_the_rows_have_them_come_first() -> None:
    found = paid_form(scored_by(lambda text, row: text == row["solution"]), answers_in("solution", ROWS), enough=1.0)
    assert found is not None
    assert found.is_given
