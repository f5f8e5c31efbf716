"""The review grammar: what it writes, and what it parses."""

import random
from collections import Counter

import pytest

from tinyrl.starter import SPLITS
from tinyrl.starter.sentiment import (
    ADJECTIVES,
    ENDINGS,
    HELD_OUT,
    TRAINING,
    VERB_PHRASES,
    Review,
    clause_mood,
    clause_moods,
    openings,
    unparsable_share,
    write_review,
)


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


def test_both_moods_occur_and_contradict_each_other() -> None:
    rng = random.Random(2)
    written = [write_review(rng) for _ in range(2000)]
    assert sum(review.polarity > 0 for review in written) / 2000 > 0.3
    assert sum(review.polarity < 0 for review in written) / 2000 > 0.3
    assert sum(review.contradicts_itself for review in written) / 2000 > 0.3
    assert Review("", (1, 0, -1, 1)).polarity == 1
    assert Review("", (1, -1)).contradicts_itself
    assert not Review("", (1, 0)).contradicts_itself


def test_but_joins_opposite_moods_and_and_never_does() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        review = write_review(rng)
        at = 0
        for sentence in review.text.strip().rstrip(".").split(". "):
            if ", but " in sentence:
                assert review.moods[at] * review.moods[at + 1] == -1
            if ", and " in sentence:
                assert review.moods[at] * review.moods[at + 1] >= 0
            at += 1 + sentence.count(", ")


def test_held_out_reviews_share_no_noun_and_no_template_with_training() -> None:
    assert not set(TRAINING.nouns) & set(HELD_OUT.nouns)
    assert not set(TRAINING.adjective_templates) & set(HELD_OUT.adjective_templates)
    assert not set(TRAINING.verb_templates) & set(HELD_OUT.verb_templates)
    rng = random.Random(4)
    text = " ".join(write_review(rng, HELD_OUT).text for _ in range(200))
    assert not any(f" the {noun} " in text for noun in TRAINING.nouns)


def test_no_word_says_two_moods() -> None:
    for table in (ADJECTIVES, VERB_PHRASES, ENDINGS):
        counts = Counter(word for words in table.values() for word in words)
        assert counts.most_common(1)[0][1] == 1
    assert [len(ADJECTIVES[mood]) for mood in (1, -1, 0)] == [30, 30, 15]
    assert [len(VERB_PHRASES[mood]) for mood in (1, -1)] == [10, 10]
    assert [len(ENDINGS[mood]) for mood in (1, -1)] == [8, 8]


def test_openings_are_neutral_and_disjoint_between_splits() -> None:
    seen = Counter(opening for split in SPLITS for opening in set(openings(split)))
    assert seen.most_common(1)[0][1] == 1
    assert len(seen) == 6 * 5 * 9 * 9
    assert len(openings("eval")) >= 512
    moods = {word for table in (ADJECTIVES, VERB_PHRASES, ENDINGS) for words in table.values() for word in words}
    assert not any(f" {word} " in f" {opening[:-1]} " for opening in seen for word in moods)
