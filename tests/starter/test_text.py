"""The corpora of the embedded default: what they contain, and what they must not."""

import random

import pytest

from tinyrl.starter.grammar import polarity, unparsable_share
from tinyrl.starter.reviews import HELD_OUT_NOUNS, NOUNS, write_review
from tinyrl.starter.splits import split_of
from tinyrl.starter.text import broken, language_rows, reward_pairs


def test_a_longer_corpus_begins_with_the_shorter_one() -> None:
    assert language_rows(50, 7)[:20] == language_rows(20, 7)
    assert language_rows(20, 7) != language_rows(20, 8)
    assert reward_pairs("train", num_rows=30, seed=7)[:10] == reward_pairs("train", num_rows=10, seed=7)


def test_pre_training_prompts_are_of_the_pre_training_split_and_half_of_them_sort() -> None:
    rows = language_rows(2000)
    assert {split_of(row["prompt"]) for row in rows} == {"pretrain"}
    assert 900 < sum(row["prompt"].startswith("letters:") for row in rows) < 1100
    for row in rows:
        if not row["prompt"].startswith("letters:"):
            assert unparsable_share(row["completion"]) == 0.0


def test_the_chosen_review_has_more_positive_clauses() -> None:
    for split in ("train", "eval"):
        pairs = reward_pairs(split, num_rows=500)
        assert {pair["kind"] for pair in pairs} == {"clear", "contradicting", "broken"}
        for pair in pairs:
            assert unparsable_share(pair["chosen"]) == 0.0
            if pair["kind"] == "broken":
                assert unparsable_share(pair["rejected"]) > 0.0
            else:
                assert polarity(pair["chosen"]) > polarity(pair["rejected"])


def test_reward_pairs_hold_out_nouns_and_openings() -> None:
    for split, absent, prompt_split in (("train", HELD_OUT_NOUNS, "pretrain"), ("eval", NOUNS, "eval")):
        pairs = reward_pairs(split, num_rows=300)
        assert {split_of(pair["prompt"]) for pair in pairs} == {prompt_split}
        words = {word.strip(".,") for pair in pairs for word in (pair["chosen"] + pair["rejected"]).split()}
        assert not words & set(absent)


def test_an_unknown_split_of_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="'dev' has no reward pairs; there are train and eval"):
        reward_pairs("dev", num_rows=1)


def test_broken_text_is_never_a_review_any_more() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        assert unparsable_share(broken(write_review(rng), rng)) > 0.0
