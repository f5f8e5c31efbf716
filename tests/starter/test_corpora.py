"""The corpora of the embedded models: what they contain, and what they must not."""

import json
import random
import string
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from examples.embedded_models.build import build_tokenizer
from examples.embedded_models.reviews import (
    broken,
    labelled_reviews,
    reward_pairs,
    unparsable_share,
    write,
    write_review,
)
from examples.embedded_models.text import (
    habitual_answer,
    language_rows,
    slip,
    written_episode,
)
from tinyrl.starter import split_of
from tinyrl.tasks.lookup import Question, fact, respond, right_answer
from tinyrl.tasks.reviews import HELD_OUT, TRAINING, clause_mood, clause_moods
from tinyrl.tasks.sort import sort_rows

# ---- sorting ----


def test_rows_are_the_same_every_time_and_differ_by_seed() -> None:
    assert sort_rows("train", num_rows=20, seed=3) == sort_rows("train", num_rows=20, seed=3)
    assert sort_rows("train", num_rows=20, seed=3) != sort_rows("train", num_rows=20, seed=4)
    # pinned: a change here changes what every reported number was measured on
    assert split_of("letters: d b a sorted:") == "train"
    assert sort_rows("eval", num_rows=1) == [{"prompt": "letters: m n a s e g u c sorted:", "answer": "acegmnsu"}]


def test_a_slip_is_never_the_right_answer_even_behind_a_habit() -> None:
    rng = random.Random(0)
    for row in sort_rows("pretrain", num_rows=2000):
        slipped = slip(row["answer"], rng)
        assert slipped != row["answer"]
        assert habitual_answer(slipped, rng) != row["answer"]


# ---- looking up ----


def test_a_question_as_written_and_its_answer() -> None:
    own = Question("Ada Stone", None, "city")
    kin = Question("Ada Stone", "twin", "pet")
    assert (own.prompt, own.keys) == ("question: city of Ada Stone ?", ["city"])
    assert (kin.prompt, kin.keys) == ("question: pet of the twin of Ada Stone ?", ["twin", "pet"])
    assert fact("w", "Ada", "Stone", "twin") == "Gail Stone"
    assert right_answer("w", own) == fact("w", "Ada", "Stone", "city") == "Tunis"
    assert right_answer("w", kin) == fact("w", "Gail", "Stone", "pet") == "cow"


def test_what_a_search_answers_in_the_text_is_what_the_task_answers() -> None:
    question = Question("Ada Stone", "twin", "pet")
    for i in range(300):
        text = written_episode(f"w{i}", question, random.Random(i))
        *observed, _ = text.split(" ;")
        for query, found in zip(observed[::2], observed[1::2], strict=True):
            [reply] = respond(["q"], [[{"role": "assistant", "content": f"{query} ;"}]], world=[f"w{i}"])
            assert reply is not None
            assert not isinstance(reply, str)
            assert reply.text == f"{found} ;"


# ---- reviews ----


@pytest.mark.parametrize(
    ("clause", "mood"),
    [
        ("the plot was gripping", 1),
        ("the cast was very dull", -1),
        ("the ending put me to sleep", -1),
        ("for me the twist felt rather stale", -1),
        ("i would not watch it again", -1),
        ("the plot gripping", None),  # a word missing
        ("the plot was gripping gripping", None),
        ("the table was gripping", None),  # no noun of the grammar
        ("The plot was gripping", None),  # the grammar writes no capitals
        ("", None),
    ],
)
def test_the_mood_of_a_clause(clause: str, mood: int | None) -> None:
    assert clause_mood(clause) == mood


def test_the_grammar_reads_back_every_review_it_writes() -> None:
    for lexicon in (TRAINING, HELD_OUT):
        rng = random.Random(1)
        for _ in range(2000):
            review = write_review(rng, lexicon)
            assert tuple(clause_moods(review.text)) == review.moods, review.text
            assert 2 <= len(review.moods) <= 4
            assert review.text.startswith(" ")
            assert review.text.endswith(".")


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


def test_broken_text_is_never_a_review_any_more() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        assert unparsable_share(broken(write_review(rng), rng)) > 0.0


# ---- the tokenizer ----


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def test_every_letter_behind_a_space_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    for letter in string.ascii_lowercase:
        assert len(tokenizer(f" {letter}").input_ids) == 1, letter


def test_any_text_survives_encoding_and_decoding(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("letters: d b a sorted: a b d", "Größe, 東京 🎬\n\ttabs  and   spaces .", "", " ,."):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_prompt_and_its_completion_are_the_tokens_of_the_whole_text(tokenizer: PreTrainedTokenizerFast) -> None:
    for row in language_rows(300, seed=5):
        parts = tokenizer(row["prompt"]).input_ids + tokenizer(row["completion"]).input_ids
        assert parts == tokenizer(row["prompt"] + row["completion"]).input_ids
