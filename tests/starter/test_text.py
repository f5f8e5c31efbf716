"""The corpora of the embedded default: what they contain, and what they must not."""

import json
import random
from pathlib import Path

import pytest

from tinyrl.starter import split_of
from tinyrl.starter.sentiment import (
    HELD_OUT,
    TRAINING,
    broken,
    clause_moods,
    labelled_reviews,
    reward_pairs,
    unparsable_share,
    write,
    write_review,
)
from tinyrl.starter.text import language_rows


def polarity(text: str) -> int:
    return sum(mood or 0 for mood in clause_moods(text))


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
    for split, absent, prompt_split in (("train", HELD_OUT.nouns, "pretrain"), ("eval", TRAINING.nouns, "eval")):
        pairs = reward_pairs(split, num_rows=300)
        assert {split_of(pair["prompt"]) for pair in pairs} == {prompt_split}
        words = {word.strip(".,") for pair in pairs for word in (pair["chosen"] + pair["rejected"]).split()}
        assert not words & set(absent)


def test_labels_say_what_the_grammar_says_and_broken_text_is_never_praised() -> None:
    for split, absent in (("train", HELD_OUT.nouns), ("eval", TRAINING.nouns)):
        rows = labelled_reviews(split, num_rows=500)
        broken_rows = [row for row in rows if unparsable_share(str(row["completion"])) > 0]
        assert 60 < len(broken_rows) < 140  # a fifth
        assert not any(row["label"] for row in broken_rows)
        for row in rows:
            if row not in broken_rows:
                assert (polarity(str(row["completion"])) > 0) == bool(row["label"])
        words = {word.strip(".,") for row in rows for word in str(row["completion"]).split()}
        assert not words & set(absent)


def test_the_sentiment_experiment_writes_its_rows_with_held_out_twins(tmp_path: Path) -> None:
    paths = write(tmp_path / "data")
    columns = {"reviews": {"prompt", "completion"}, "labelled": {"prompt", "completion", "label"}}
    columns["pairs"] = {"prompt", "chosen", "rejected"}
    for name, wanted in columns.items():
        train, held_out = (
            [json.loads(line) for line in path.read_text().splitlines()] for path in paths if path.name.startswith(name)
        )
        assert (len(train), len(held_out)) == (6400, 512)
        assert {*train[0]} == {*held_out[0]} == wanted
        if name == "pairs":
            assert all(polarity(row["chosen"]) > 0 == unparsable_share(row["chosen"]) for row in train)
            assert all(polarity(row["rejected"]) < 0 or unparsable_share(row["rejected"]) for row in train)
        assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}


def test_an_unknown_split_of_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="'dev' has no judged reviews; there are train and eval"):
        reward_pairs("dev", num_rows=1)


def test_broken_text_is_never_a_review_any_more() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        assert unparsable_share(broken(write_review(rng), rng)) > 0.0
