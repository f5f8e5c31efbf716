"""The sort task: rows, the verifier, and what a completion says."""

import pytest

from tinyrl.starter import split_of
from tinyrl.tasks.grading import by_row
from tinyrl.tasks.sort import TASK, listed_letters, score

verify = by_row(score)


def test_splits_are_disjoint_and_big_enough_to_judge_by() -> None:
    train, held_out = TASK.rows("train"), TASK.rows("eval")
    assert len(train) == 4096
    assert len(held_out) == 512
    assert {split_of(row["prompt"]) for row in train} == {"train"}
    assert {split_of(row["prompt"]) for row in held_out} == {"eval"}
    assert len({row["prompt"] for row in train + held_out}) == 4096 + 512
    assert all(column in row for row in train + held_out for column in TASK.columns)


def test_gold_scores_full_marks_and_no_constant_answer_does() -> None:
    rows = TASK.rows("eval")
    columns = {"answer": [row["answer"] for row in rows]}
    prompts = [TASK.prompt(row) for row in rows]
    gold = [TASK.gold(row) for row in rows]
    assert verify(prompts, gold, **columns) == [1.0] * 512
    for constant in (gold[0], gold[1], "", "a b c d e f g h"):
        scores = verify(prompts, [constant] * 512, **columns)
        assert sum(score or 0.0 for score in scores) / 512 < 0.1


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (" a b d", 1.0),
        ("a b d\n", 1.0),
        (" a d b", 0.0),  # neighbours swapped
        (" a d", 0.0),  # one left out
        (" a b b d", 0.0),  # one written twice
        (" a b d e", 0.0),
        ("abd", 0.0),  # one word is not three letters
        (" a, b, d", 0.0),
        (" A B D", 0.0),
        ("", 0.0),
        ([{"role": "assistant", "content": " a b d"}], 1.0),
        ([{"role": "assistant", "content": " b a d"}], 0.0),
    ],
)
def test_the_score_of_a_completion(completion: object, score: float) -> None:
    assert verify(["letters: d b a sorted:"], [completion], answer=["abd"]) == [score]


def test_a_batch_is_scored_row_by_row_whatever_columns_come_along() -> None:
    scores = verify(["p", "q"], [" a b", " a b"], answer=["ab", "ac"], completion_ids=[[1], [2]], prompt=["p", "q"])
    assert scores == [1.0, 0.0]
    with pytest.raises(ValueError, match="shorter"):
        verify(["p", "q"], [" a b", " a b"], answer=["ab"])


def test_what_a_completion_says() -> None:
    assert listed_letters(" a b d") == "abd"
    assert listed_letters(" a d b") == "adb"
    assert listed_letters("") is None
    assert listed_letters(" the plot was dull.") is None
    assert listed_letters(" a 1") is None
