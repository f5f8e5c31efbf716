"""Criteria in a column of the rows: those of HealthBench and of Rubrics as Rewards are read, others refused."""

from typing import Any

import pytest

from tinyrl.data.criteria import RowCriterion, criteria_in


@pytest.mark.parametrize(
    "entry",
    [
        {"text": "Names the dose.", "weight": 5},
        {"criterion": "Names the dose.", "points": 5, "tags": ["axis:accuracy"]},  # HealthBench
        {"title": "Dose", "description": " Names the dose.", "weight": 5.0},  # Rubrics as Rewards
        {
            "text": None,
            "criterion": "Names the dose.",
            "weight": None,
            "points": 5,
        },  # of parquet
    ],
)
def test_criteria_are_read_under_the_names_of_data_sets(entry: dict[str, Any]) -> None:
    assert criteria_in({"rubrics": [entry]}, "rubrics") == [RowCriterion("Names the dose.", 5.0)]


def test_a_criterion_without_a_weight_weighs_1_and_one_may_be_negative() -> None:
    row = {"rubrics": [{"text": "a"}, {"text": "b", "points": -2}]}
    assert criteria_in(row, "rubrics") == [RowCriterion("a", 1.0), RowCriterion("b", -2.0)]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "p", "rubric": []}, "columns: prompt, rubric"),
        ({"rubrics": []}, "must be a list"),
        ({"rubrics": "be short"}, "must be a list"),
        ({"rubrics": ["be short"]}, "entry 1"),
        ({"rubrics": [{"text": "a"}, {"title": "b"}]}, "entry 2.*title"),
        ({"rubrics": [{"text": " "}]}, "no text"),
        ({"rubrics": [{"text": "a", "weight": "high"}]}, "'high'"),
        ({"rubrics": [{"text": "a", "weight": True}]}, "True"),
        ({"rubrics": [{"text": "a", "weight": float("nan")}]}, "nan"),
        ({"rubrics": [{"text": "a", "points": -1}, {"text": "b", "points": 0}]}, "above 0"),
    ],
)
def test_what_makes_no_reward_is_refused_by_its_place(row: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        criteria_in(row, "rubrics")
