"""The sort-letters text: right answers are right, mistakes never are, and the prompt decides the answer."""

import random
from collections import Counter

import pytest

from tinyrl.starter import SPLITS, split_of
from tinyrl.starter.text import (
    CONFUSED_PAIRS,
    habitual_answer,
    slip,
    sort_completion,
    sort_prompt,
    sort_rows,
    written_answer,
)

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def test_a_prompt_and_an_answer_as_written() -> None:
    assert sort_prompt("dba") == "letters: d b a sorted:"
    assert sort_completion("abd") == " a b d"


def test_rows_have_eight_different_letters_and_their_order() -> None:
    for row in sort_rows("eval", num_rows=200):
        letters = row["prompt"].removeprefix("letters: ").removesuffix(" sorted:").split(" ")
        assert len(set(letters)) == len(letters) == 8
        # a second way to sort: walk the alphabet
        assert row["answer"] == "".join(letter for letter in ALPHABET if letter in letters)


def test_rows_are_the_same_every_time_and_differ_by_seed() -> None:
    assert sort_rows("train", num_rows=20, seed=3) == sort_rows("train", num_rows=20, seed=3)
    assert sort_rows("train", num_rows=20, seed=3) != sort_rows("train", num_rows=20, seed=4)
    # pinned: a change here changes what every reported number was measured on
    assert split_of("letters: d b a sorted:") == "train"
    assert sort_rows("eval", num_rows=1) == [{"prompt": "letters: m n a s e g u c sorted:", "answer": "acegmnsu"}]


def test_no_prompt_is_in_two_splits_whatever_the_seed() -> None:
    seen: Counter[str] = Counter()
    for split in SPLITS:
        seen.update({row["prompt"] for seed in (0, 1) for row in sort_rows(split, num_rows=1000, seed=seed)})
    assert seen.most_common(1)[0][1] == 1


def test_an_unknown_split_is_refused_with_the_splits_there_are() -> None:
    with pytest.raises(ValueError, match="'test' does not exist; the starter text has pretrain, train, dev, eval"):
        sort_rows("test", num_rows=1)


def test_the_best_constant_answer_is_almost_always_wrong() -> None:
    answers = Counter(row["answer"] for row in sort_rows("eval", num_rows=512))
    assert answers.most_common(1)[0][1] / 512 < 0.1
    assert len(answers) > 500


def test_habits_swap_confused_pairs_only() -> None:
    rng = random.Random(0)
    assert {habitual_answer("amnz", rng) for _ in range(100)} == {"amnz", "anmz"}
    assert {habitual_answer("amz", rng) for _ in range(100)} == {"amz"}
    assert {habitual_answer("bcgh", rng) for _ in range(200)} == {"bcgh", "cbgh", "bchg", "cbhg"}


def test_the_confused_pairs_are_neighbours_and_share_no_letter() -> None:
    assert all(ALPHABET.find(pair) >= 0 for pair in CONFUSED_PAIRS)
    assert len(set("".join(CONFUSED_PAIRS))) == 2 * len(CONFUSED_PAIRS)


def test_the_slips_of_a_short_answer() -> None:
    rng = random.Random(0)
    assert {slip("abc", rng) for _ in range(500)} == {"bac", "acb", "bc", "ac", "ab", "aabc", "abbc", "abcc"}


def test_a_slip_is_never_the_right_answer_even_behind_a_habit() -> None:
    rng = random.Random(0)
    for row in sort_rows("pretrain", num_rows=2000):
        slipped = slip(row["answer"], rng)
        assert slipped != row["answer"]
        assert habitual_answer(slipped, rng) != row["answer"]


def test_written_answers_are_right_often_enough_to_learn_from_and_wrong_often_enough_to_repair() -> None:
    rng = random.Random(0)
    rows = sort_rows("pretrain", num_rows=4000)
    right = sum(written_answer(row["answer"], rng) == row["answer"] for row in rows) / len(rows)
    assert 0.2 < right < 0.5
