"""Valid scores: the checks that a user's function and a task's verifier share."""

import math
from decimal import Decimal
from typing import Any

import numpy
import torch

from tinyrl.rewards.functions import call_in_process
from tinyrl.workers.calls import RowFailure
from tinyrl.workers.worker import check_values

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
    assert check_values(given, 9) == ([0.5, -1e12, 1.0, None, 0.5, 0.5, 1.0, 0.25, [0.0, "why"]], [])
    values, failures = check_values([each for value in BAD for each in (value, 0.5)], 12)
    assert values == [None, 0.5] * 6
    assert failures == [(2 * index, reason) for index, reason in enumerate(BAD.values())]


def test_a_list_or_tensor_has_a_score_for_each_row_and_else_all_rows_fail():
    for returned in ((1, 0), torch.tensor([1, 0]), torch.tensor([[1], [0]])):
        assert check_values(returned, 2) == ([1.0, 0.0], [])
    for returned, reason in [
        ([1.0], "returned a list of 1, not a list of 2"),
        ({0: 1.0}, "returned a dict ({0: 1.0}), not a list of 2"),
    ]:
        assert check_values(returned, 2) == ([None, None], [(0, reason), (1, reason)])


def verifier(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float | None]:
    """Return 1 or 0 where there is an answer, else None."""
    return [given and float(text == given) for text, given in zip(completions, columns["answer"], strict=True)]


def test_a_verifier_in_our_own_process_gets_the_same_checks():
    call = call_in_process(verifier, "gsm8k", ["p"] * 3, ["4", "5", "6"], {"answer": ["4", "4", None]})
    assert (call.scores[:2], math.isnan(call.scores[2]), call.failures) == ([1.0, 0.0], True, [])
    call = call_in_process(verifier, "gsm8k", ["p"] * 2, ["4", "5"], {})
    reason = f"`gsm8k` raised KeyError: 'answer' (test_values.py, line {verifier.__code__.co_firstlineno + 2})"
    assert call.failures == [RowFailure(0, reason), RowFailure(1, reason)]
    assert all(map(math.isnan, call.scores))
