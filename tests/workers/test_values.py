"""Valid scores: the checks that a user's function and a task's verifier share."""

import math
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy
import torch

from tinyrl.rewards.functions import verifier_of
from tinyrl.tasks import Task
from tinyrl.workers.values import RowFailure, RowResults, check_scores, is_score

BAD = {
    math.nan: "returned NaN",
    -math.inf: "returned -inf",
    "1.0": "returned a str ('1.0'), not a number",
    (1.0, 2.0): "returned a tuple ((1.0, 2.0)), not a number",
    1j: "returned complex, not a number",
    3e38: "returned a number beyond 1e+12",
}


def test_numbers_of_any_library_are_scores_and_a_bad_value_costs_its_own_row_only():
    given = [0.5, -1e12, True, None, numpy.float32(0.5), Decimal("0.5"), [1.0], torch.tensor([0.25]), (0, "why")]
    comments = [""] * 8 + ["why"]
    assert check_scores(given, 9) == RowResults([0.5, -1e12, 1.0, None, 0.5, 0.5, 1.0, 0.25, 0.0], comments=comments)
    found = check_scores([each for value in BAD for each in (value, 0.5)], 12)
    assert found.values == [None, 0.5] * 6
    assert found.failures == [RowFailure(2 * index, reason) for index, reason in enumerate(BAD.values())]


def test_a_list_or_tensor_has_a_score_for_each_row_and_else_all_rows_fail():
    for returned in ((1, 0), torch.tensor([1, 0]), torch.tensor([[1], [0]])):
        assert check_scores(returned, 2) == RowResults([1.0, 0.0])
    for returned, reason in [
        ([1.0], "returned a list of 1, not a list of 2"),
        ({0: 1.0}, "returned a dict ({0: 1.0}), not a list of 2"),
    ]:
        assert check_scores(returned, 2) == RowResults([None, None], [RowFailure(0, reason), RowFailure(1, reason)])


def test_a_reply_has_floats_within_the_limits_for_scores_or_none():
    """A worker sends nothing else, so other values are forged."""
    assert all(map(is_score, (None, 0.5, -1e12, 1e12)))
    assert not any(map(is_score, (1, True, "1.0", [1.0], 1.1e12, -math.inf, math.nan)))


def verifier(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float | None]:
    """Return 1 or 0 where there is an answer, else None."""
    if 5j in columns["answer"]:
        raise TypeError("no complex number")
    return [given and float(text == given) for text, given in zip(completions, columns["answer"], strict=True)]


def test_a_verifier_in_our_own_process_gets_the_same_checks_and_one_bad_row_fails_alone():
    judge = verifier_of(Task(name="gsm8k", verify=verifier), timeout_s=1)
    call = judge(["p"] * 3, ["4", "5", "6"], {"answer": ["4", "4", None]})
    assert (call.values[:2], math.isnan(call.values[2]), call.failures) == ([1.0, 0.0], True, [])
    call = judge(["p"] * 2, ["4", "five"], {"answer": ["4", 5j]})
    assert call.values[0] == 1.0
    assert math.isnan(call.values[1])
    reason = f"raised TypeError: no complex number (test_values.py, line {verifier.__code__.co_firstlineno + 3})"
    assert call.failures == [RowFailure(1, f"`gsm8k` {reason}")]


def test_a_column_that_is_not_json_reaches_a_verifier_of_ours_which_cannot_change_it():
    """As a timestamp of a parquet file, which the verifier may not read."""
    when = [[datetime(2026, 1, 1, tzinfo=UTC)]]

    def takes(prompts: list[str], completions: list[str], when: list[list[datetime]]) -> list[float | None]:
        when[0].append(when[0][0])
        return [float(when[0][0].year)]

    call = verifier_of(Task(name="dated", verify=takes), timeout_s=1)(["p"], ["c"], {"when": when})
    assert (call.values, len(when[0])) == ([2026.0], 1)
