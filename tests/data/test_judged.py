"""Rows that judge answers: what they are taken for, and what nothing can be learnt from."""

from typing import Any, Literal

import pytest

from tinyrl.data.shapes import Objective, Scored, judged, mean_and_deviation, objective_of, two_labels


@pytest.mark.parametrize(
    ("row", "asked", "objective"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "auto", "pairs"),
        ({"chosen": "b", "rejected": "c", "score": 3}, "auto", "pairs"),
        ({"text": "a", "label": False}, "auto", "labels"),
        ({"text": "a", "label": 0, "score": 2}, "auto", "labels"),
        ({"text": "a", "label": None, "score": 2}, "auto", "ratings"),
        ({"text": "a", "label": 4}, "ratings", "ratings"),
    ],
)
def test_what_the_columns_say(row: dict[str, Any], asked: Any, objective: Objective) -> None:
    assert objective_of(row, asked) == objective


def test_columns_that_say_nothing() -> None:
    with pytest.raises(
        ValueError, match=r"this row has prompt, completion\. Rename columns with task\.columns\.NEW=OLD"
    ):
        objective_of({"prompt": "a", "completion": "b"}, "auto")


ASSISTANT = {"role": "assistant", "content": "four"}
USER = {"role": "user", "content": "2+2?"}


@pytest.mark.parametrize(
    ("row", "objective", "read"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": 0.5}, "pairs", Scored("p", ("a", "b"), 0.5)),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": None}, "pairs", Scored("p", ("a", "b"), 0.0)),
        ({"chosen": "x one", "rejected": "x two"}, "pairs", Scored("x", (" one", " two"), 0.0)),
        ({"text": "good", "label": True}, "labels", Scored(None, ("good",), 1.0)),
        ({"prompt": "p", "completion": "c", "label": "0"}, "labels", Scored("p", ("c",), 0.0)),  # a .csv
        ({"prompt": "p", "completion": "c", "label": " False"}, "labels", Scored("p", ("c",), 0.0)),
        ({"messages": [USER, ASSISTANT], "label": -1}, "labels", Scored([USER], ([ASSISTANT],), -1.0)),
        ({"text": "t", "label": 1, "score": "3.5"}, "ratings", Scored(None, ("t",), 3.5)),
        ({"text": "t", "label": 4}, "ratings", Scored(None, ("t",), 4.0)),
        ({"text": "t", "score": 4}, "labels", Scored(None, ("t",), 4.0)),
        ({"prompt": "2+2?", "completion": [ASSISTANT], "label": 1}, "labels", Scored([USER], ([ASSISTANT],), 1.0)),
    ],
)  # fmt: skip
def test_what_a_row_says(row: dict[str, Any], objective: Objective, read: Scored) -> None:
    assert judged(row, objective) == read


@pytest.mark.parametrize(
    ("row", "objective", "sentence"),
    [
        ({"text": "t", "label": "good"}, "labels", "'label' must be true, false or a number, not 'good'"),
        ({"text": "t", "label": "nan"}, "labels", "'label' must be true, false or a number, not 'nan'"),
        ({"text": "t", "label": float("nan")}, "labels", "'label' must be .* not nan"),
        ({"text": "t", "label": 10**400}, "labels", "'label' must be"),
        ({"text": "t", "score": 1e300}, "ratings", r"'score' must be .* not 1e\+300 \(at most 1,000,000"),
        ({"text": "t", "score": "high"}, "ratings", "'score' must be a number, not 'high'"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "big"}, "pairs", "'margin' must be a number"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": 1e9}, "pairs", "'margin' must .*at most"),
        ({"text": "t", "score": True}, "ratings", "'score' must be a number, not True"),
        ({"text": "t", "label": [1]}, "labels", r"'label' must be true, false or a number, not \[1\]"),
        ({"prompt": "p", "chosen": "a"}, "pairs", "no column 'rejected'"),
        ({"label": 1}, "labels", "no column 'completion', 'messages', 'conversations' or 'text'. Columns: label"),
        ({"messages": [ASSISTANT, USER], "label": 1}, "labels", "'messages' must end .* not assistant, user"),
        ({"messages": [ASSISTANT], "label": 1}, "labels", "'messages' must end with an .* not assistant"),
        ({"text": "t"}, "labels", "no column 'label' or 'score'"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(row: dict[str, Any], objective: Objective, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        judged(row, objective)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (Scored("p", ("a", "a"), 0.0), "two equal answers"),
        (Scored("p", ("a", " \n"), 0.0), "an empty answer"),
        (Scored("p", ("",), 1.0), "an empty answer"),
        (Scored([USER], ([{"role": "assistant", "content": ""}],), 1.0), "an empty answer"),
        (Scored("p", ("a", "b"), 0.0), None),
        (Scored(None, ("a",), 0.0), None),
    ],
)
def test_what_teaches_nothing(one: Scored, why: Literal["two equal answers", "an empty answer"] | None) -> None:
    assert one.unusable == why


def test_two_labels() -> None:
    assert two_labels([1.0, 0.0, 1.0]) == (0.0, 1.0)
    assert two_labels([1.0, -1.0]) == (-1.0, 1.0)
    with pytest.raises(ValueError, match="every row to train on has the label 1: there is nothing to tell apart"):
        two_labels([1.0, 1.0])
    with pytest.raises(ValueError, match=r"7 different labels \(0, 1, 2, 3, 4, \.\.\.\), .*\.objective=ratings"):
        two_labels([float(i % 7) for i in range(20)])


def test_mean_and_deviation() -> None:
    assert mean_and_deviation([1.0, 3.0, 5.0, 7.0]) == (4.0, pytest.approx(5**0.5))
    with pytest.raises(ValueError, match=r"has the rating 3\.000"):
        mean_and_deviation([3.0, 3.0])
