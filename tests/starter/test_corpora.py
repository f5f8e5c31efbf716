"""The corpora of the embedded models: what they contain, and what they must not."""

import json
import random
import string
from collections import Counter
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
    episode_rows,
    habitual_answer,
    language_rows,
    slip,
    written_answer,
    written_episode,
)
from tinyrl.starter import SPLITS, split_of
from tinyrl.tasks.lookup import ATTRIBUTES, Question, fact, lookup_rows, respond, right_answer
from tinyrl.tasks.reviews import HELD_OUT, TRAINING, clause_mood, clause_moods, openings
from tinyrl.tasks.sort import sort_rows

# ---- sorting ----


def test_rows_have_eight_different_letters_and_their_order() -> None:
    for row in sort_rows("eval", num_rows=200):
        letters = row["prompt"].removeprefix("letters: ").removesuffix(" sorted:").split(" ")
        assert len(set(letters)) == len(letters) == 8
        # a second way to sort: walk the alphabet
        assert row["answer"] == "".join(letter for letter in string.ascii_lowercase if letter in letters)


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


def test_habits_swap_confused_pairs_only() -> None:
    rng = random.Random(0)
    assert {habitual_answer("amnz", rng) for _ in range(100)} == {"amnz", "anmz"}
    assert {habitual_answer("amz", rng) for _ in range(100)} == {"amz"}
    assert {habitual_answer("bcgh", rng) for _ in range(200)} == {"bcgh", "cbgh", "bchg", "cbhg"}


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


# ---- looking up ----


def test_a_question_as_written_and_its_answer() -> None:
    own = Question("Ada Stone", None, "city")
    kin = Question("Ada Stone", "twin", "pet")
    assert (own.prompt, own.keys) == ("question: city of Ada Stone ?", ["city"])
    assert (kin.prompt, kin.keys) == ("question: pet of the twin of Ada Stone ?", ["twin", "pet"])
    assert fact("w", "Ada", "Stone", "twin") == "Gail Stone"
    assert right_answer("w", own) == fact("w", "Ada", "Stone", "city") == "Tunis"
    assert right_answer("w", kin) == fact("w", "Gail", "Stone", "pet") == "cow"


def test_questions_are_the_same_every_time_and_in_one_split_only() -> None:
    assert lookup_rows("train", num_rows=20, seed=3) == lookup_rows("train", num_rows=20, seed=3)
    assert lookup_rows("train", num_rows=20, seed=3) != lookup_rows("train", num_rows=20, seed=4)
    for split in SPLITS:
        assert {split_of(row["prompt"]) for row in lookup_rows(split, num_rows=200)} == {split}


def test_pre_training_episodes_are_what_the_shares_say() -> None:
    rows = episode_rows(4000, 7)
    assert rows[:20] == episode_rows(20, 7)
    assert {split_of(row["prompt"]) for row in rows} == {"pretrain"}
    texts = [row["completion"] for row in rows]
    assert sum("search" not in text for text in texts) / 4000 == pytest.approx(0.55, abs=0.03)
    searched = [row for row in rows if "search" in row["completion"]]
    two = [row["completion"] for row in searched if " the " in row["prompt"]]
    halfway = sum(not any(f" {key} ;" in text for key in ATTRIBUTES) for text in two)
    assert halfway / len(two) == pytest.approx(0.3, abs=0.05)
    queries = sum(text.count("search") for text in texts)
    nothing = sum(text.count("found nothing") for text in texts)
    assert 0.005 < nothing / queries < 0.04  # 0.02: a third of the wrong ones
    assert all(text.count(" answer ") == 1 and text.endswith(" .") for text in texts)


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
        ("i found the music old", 0),
        ("the villain seemed charming", 1),
        ("the ending put me to sleep", -1),
        ("the sequel turned out stunning", 1),
        ("for me the twist felt rather stale", -1),
        ("somehow the chemistry won me over", 1),
        ("i would watch it again", 1),
        ("i would not watch it again", -1),
        ("not recommended", -1),
        ("highly recommended", 1),
        ("the plot gripping", None),  # a word missing
        ("the plot was gripping gripping", None),
        ("the table was gripping", None),  # no noun of the grammar
        ("the plot was very", None),
        ("the plot was kept me hooked", None),
        ("The plot was gripping", None),  # the grammar writes no capitals
        ("", None),
    ],
)
def test_the_mood_of_a_clause(clause: str, mood: int | None) -> None:
    assert clause_mood(clause) == mood


@pytest.mark.parametrize(
    ("text", "expected", "unparsable"),
    [
        (" the plot was dull. i loved it.", 0, 0.0),
        (" the plot was superb, and the cast kept me hooked. the music was long.", 2, 0.0),
        (" the plot was superb, but the cast wore me out, and the hero was weak.", -1, 0.0),
        (" i loved it. i loved it. i loved it.", 1, 2 / 3),  # said before: counted once
        (" the plot was superb. the cast was", 1, 1 / 2),  # cut off
        (" the plot was superb. the cast was dull", 1, 1 / 2),  # the last full stop is missing
        (" plot the superb was. the cast was dull.", -1, 1 / 2),
        (" kept me hooked . kept me hooked .", 0, 1.0),
        ("", 0, 1.0),
    ],
)
def test_the_polarity_of_a_text(text: str, expected: int, unparsable: float) -> None:
    assert sum(mood or 0 for mood in clause_moods(text)) == expected
    assert unparsable_share(text) == pytest.approx(unparsable)


def test_the_grammar_reads_back_every_review_it_writes() -> None:
    for lexicon in (TRAINING, HELD_OUT):
        rng = random.Random(1)
        for _ in range(2000):
            review = write_review(rng, lexicon)
            assert tuple(clause_moods(review.text)) == review.moods, review.text
            assert 2 <= len(review.moods) <= 4
            assert review.text.startswith(" ")
            assert review.text.endswith(".")


def test_held_out_reviews_share_no_noun_and_no_template_with_training() -> None:
    assert not set(TRAINING.nouns) & set(HELD_OUT.nouns)
    assert not set(TRAINING.adjective_templates) & set(HELD_OUT.adjective_templates)
    assert not set(TRAINING.verb_templates) & set(HELD_OUT.verb_templates)
    rng = random.Random(4)
    text = " ".join(write_review(rng, HELD_OUT).text for _ in range(200))
    assert not any(f" the {noun} " in text for noun in TRAINING.nouns)


def test_openings_are_disjoint_between_splits() -> None:
    seen = Counter(opening for split in SPLITS for opening in set(openings(split)))
    assert seen.most_common(1)[0][1] == 1
    assert len(seen) == 6 * 5 * 9 * 9
    assert len(openings("eval")) >= 512


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
