"""Valid scores: the checks that a user's function and a task's verifier share."""

import itertools
import math
from decimal import Decimal
from typing import Any

import numpy
import torch

from tinyrl.rewards.functions import call_in_process
from tinyrl.workers.calls import RowFailure
from tinyrl.workers.worker import check_values

NAN, INF = float("nan"), float("inf")
BAD = [
    (NAN, "returned NaN"),
    (-INF, "returned -inf"),
    ("1.0", "returned a str ('1.0'), not a number"),
    ([1.0, 2.0], "returned a list ([1.0, 2.0]), not a number"),
    ({"score": 1}, "returned a dict ({'score': 1}), not a number"),
    (1j, "returned complex, not a number"),
    (-(10**400), "returned a number beyond 1e+12"),
    (3e38, "returned a number beyond 1e+12"),
]


def test_numbers_of_any_library_are_scores():
    given = [0.5, -1e12, True, None, numpy.float32(0.5), Decimal("0.5"), [1.0], torch.tensor([0.25])]
    assert check_values(given, 8) == ([0.5, -1e12, 1.0, None, 0.5, 0.5, 1.0, 0.25], [])


def test_a_bad_value_costs_its_own_row_only():
    values, failures = check_values([each for value, _ in BAD for each in (value, 0.5)], 16)
    assert values == [None, 0.5] * 8
    assert failures == [(2 * index, reason) for index, (_, reason) in enumerate(BAD)]


def test_anything_with_a_score_for_each_row_is_a_list_and_else_all_rows_fail():
    scores = torch.tensor([1, 0])
    for returned in ((1, 0), scores, scores[:, None], iter([1.0, 0.0])):
        assert check_values(returned, 2) == ([1.0, 0.0], [])
    for returned, reason in [
        ([1.0], "returned a list of 1 for a batch of 2"),
        (None, "returned NoneType, not a list with one score for each completion"),
        ({0: 1.0}, "returned a dict ({0: 1.0}), not a list with one score for each completion"),
        (itertools.repeat(1.0), "returned a list of 3 for a batch of 2"),
    ]:
        assert check_values(returned, 2) == ([None, None], [(0, reason), (1, reason)])


def verifier(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float | None]:
    """Return 1 or 0 where there is an answer, else None."""
    pairs = zip(completions, columns["answer"], strict=True)
    return [None if answer is None else float(text == answer) for text, answer in pairs]


def test_a_verifier_in_our_own_process_gets_the_same_checks():
    call = call_in_process(verifier, "gsm8k", ["p"] * 3, ["4", "5", "6"], {"answer": ["4", "4", None]})
    assert (call.scores[:2], math.isnan(call.scores[2]), call.failures) == ([1.0, 0.0], True, [])
    call = call_in_process(verifier, "gsm8k", ["p"] * 2, ["4", "5"], {})
    reason = f"`gsm8k` raised KeyError: 'answer' (test_values.py, line {verifier.__code__.co_firstlineno + 2})"
    assert call.failures == [RowFailure(0, reason), RowFailure(1, reason)]
    assert [math.isnan(score) for score in call.scores] == [True, True]
