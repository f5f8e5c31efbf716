"""The reviews task: openings to continue, and the grammar as an independent judge."""

import pytest

from examples.embedded_models.reviews import unparsable_share
from tinyrl.starter import split_of
from tinyrl.tasks.grading import by_row, completion_text
from tinyrl.tasks.reviews import TASK, score

verify = by_row(score)


def test_openings_are_disjoint_and_enough_are_held_out() -> None:
    train, held_out = TASK.rows("train"), TASK.rows("eval")
    assert len(held_out) == 512
    assert {split_of(row["prompt"]) for row in train} == {"train"}
    assert {split_of(row["prompt"]) for row in held_out} == {"eval"}
    assert len({row["prompt"] for row in train + held_out}) == len(train) + 512
    assert len(train) == 539


@pytest.mark.parametrize(
    ("completion", "score", "broken"),
    [
        (" the plot was superb. i loved it.", 1.0, 0.0),
        (" the plot was dull. i hated it.", -1.0, 0.0),
        (" the plot was superb, but the cast was dull.", 0.0, 0.0),
        (" the plot was superb, and the cast was old. i loved it.", 2 / 3, 0.0),
        (" the plot was superb. plot plot plot.", 0.5, 0.5),  # what cannot be read counts nothing
        (" i loved it. i loved it.", 0.5, 0.5),
        ("", 0.0, 1.0),
        ([{"role": "assistant", "content": " i hated it."}], -1.0, 0.0),
    ],
)
def test_the_judgement_of_a_review(completion: object, score: float, broken: float) -> None:
    assert verify(["i saw it."], [completion]) == [pytest.approx(score)]
    assert unparsable_share(completion_text(completion)) == pytest.approx(broken)


def test_gold_scores_full_marks() -> None:
    row = TASK.rows("eval")[0]
    assert TASK.is_pass(verify([TASK.prompt(row)], [TASK.gold(row)])[0])
