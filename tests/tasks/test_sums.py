"""The sums task: rows, the verifier, and the files for the other methods."""

import json
from pathlib import Path
from typing import Any

import pytest

from tinyrl.tasks.grading import by_row
from tinyrl.tasks.sums import TASK, score, write

verify = by_row(score)


def test_no_sum_is_in_both_splits_and_rows_are_the_same_every_time() -> None:
    pairs = {split: {tuple(sorted((r["first"], r["second"]))) for r in TASK.rows(split)} for split in ("train", "eval")}
    assert {split: len(some) for split, some in pairs.items()} == {"train": 4096, "eval": 512}
    assert not pairs["train"] & pairs["eval"]
    assert TASK.rows("eval") == TASK.rows("eval")
    assert TASK.rows("train")[0]["prompt"] == "What is 866 + 396?"


def test_gold_scores_full_marks_and_no_constant_answer_does() -> None:
    rows = TASK.rows("eval")
    answer: list[int] = [row["answer"] for row in rows]
    prompts: list[Any] = [TASK.prompt(row) for row in rows]
    assert verify(prompts, [TASK.gold(row) for row in rows], answer=answer) == [1.0] * 512
    assert all(str(row["answer"]) not in prompt.split() for row, prompt in zip(rows, prompts, strict=True))
    for constant in ("100", "", "12 + 30", "9" * 1_000_000):
        scores = verify(prompts, [constant] * 512, answer=answer)
        assert sum(score or 0.0 for score in scores) / 512 < 0.05
    assert sum(score or 0.0 for score in verify(prompts, prompts, answer=answer)) == 0


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("42", 1.0),
        ("12 + 30 = 42", 1.0),
        ("Ann has 42 apples now.", 1.0),
        ("42, that is 12 and 30", 0.0),  # ends with another number
        ("12 + 30 = 43", 0.0),
        ("٤٢", 0.0),
        ([{"role": "assistant", "content": "42"}], 1.0),
    ],
)
def test_the_score_of_a_completion(completion: object, score: float) -> None:
    assert verify(["Ann has 12"], [completion], answer=[42]) == [score]


def test_answers_in_the_files_end_with_the_sum_but_the_wrong_ones(tmp_path: Path) -> None:
    files = write(tmp_path)
    assert sorted(p.name for p in files) == [
        f"{n}{e}.jsonl" for n in ("answers", "pairs", "styles") for e in (".eval", "")
    ]
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        answer = [row["answer"] for row in rows]
        for column in {"completion", "chosen", "rejected"} & set(rows[0]):
            said = [row[column] for row in rows]
            right = 0.0 if column == "rejected" and file.name.startswith("pairs") else 1.0
            assert set(verify(said, said, answer=answer)) == {right}
