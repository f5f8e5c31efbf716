"""The corpora of the embedded models: splits, the grammar read back, answers as the tasks give them."""

import random

from examples.embedded_models.reviews import (
    HELD_OUT,
    TRAINING,
    broken,
    labelled_reviews,
    reward_pairs,
    unparsable_share,
    write_review,
)
from examples.embedded_models.text import language_rows, written_episode
from tinyrl.starter import split_of
from tinyrl.starter.lookup import Question, fact, respond, right_answer
from tinyrl.starter.reviews import clause_moods
from tinyrl.starter.sort import sort_rows


def polarity(text: str) -> int:
    return sum(mood or 0 for mood in clause_moods(text))


def test_rows_are_pinned_and_differ_by_seed() -> None:
    """A change here changes what every reported number was measured on."""
    assert sort_rows("train", num_rows=20, seed=3) != sort_rows("train", num_rows=20, seed=4)
    assert split_of("letters: d b a sorted:") == "train"
    assert sort_rows("eval", num_rows=1) == [{"prompt": "letters: m n a s e g u c sorted:", "answer": "acegmnsu"}]
    assert language_rows(50, 7)[:20] == language_rows(20, 7) != language_rows(20, 8)
    assert {split_of(row["prompt"]) for row in language_rows(500)} == {"pretrain"}
    assert reward_pairs("train", num_rows=30, seed=7)[:10] == reward_pairs("train", num_rows=10, seed=7)


def test_searches_in_the_text_find_what_the_task_answers() -> None:
    own, kin = Question("Ada Stone", None, "city"), Question("Ada Stone", "twin", "pet")
    assert kin.prompt == "question: pet of the twin of Ada Stone ?"
    assert fact("w", "Ada", "Stone", "twin") == "Gail Stone"
    assert right_answer("w", own) == fact("w", "Ada", "Stone", "city") == "Tunis"
    assert right_answer("w", kin) == fact("w", "Gail", "Stone", "pet") == "cow"
    for i in range(300):
        *observed, _ = written_episode(f"w{i}", kin, random.Random(i)).split(" ;")
        for query, found in zip(observed[::2], observed[1::2], strict=True):
            [reply] = respond(["q"], [[{"role": "assistant", "content": f"{query} ;"}]], world=[f"w{i}"])
            assert getattr(reply, "text", None) == f"{found} ;"


def test_the_grammar_reads_back_every_review_it_writes_and_no_broken_one() -> None:
    for lexicon in (TRAINING, HELD_OUT):
        rng = random.Random(1)
        for _ in range(2000):
            review = write_review(rng, lexicon)
            assert tuple(clause_moods(review.text)) == review.moods, review.text
    assert all(unparsable_share(broken(write_review(rng), rng)) > 0.0 for _ in range(1000))
    moods = {"the plot was gripping": 1, "the ending put me to sleep": -1, "the twist seemed long": 0, "": None,
             "the plot gripping": None, "the table was gripping": None, "The plot was gripping": None}  # fmt: skip
    assert {clause: clause_moods(clause + ".")[0] for clause in moods} == moods


def test_pairs_and_labels_follow_the_grammar_without_held_out_nouns() -> None:
    for split, absent, prompts in (("train", HELD_OUT.nouns, "pretrain"), ("eval", TRAINING.nouns, "eval")):
        pairs, labelled = reward_pairs(split, num_rows=500), labelled_reviews(split, num_rows=500)
        assert {split_of(pair["prompt"]) for pair in pairs} == {prompts}
        for pair in pairs:
            assert unparsable_share(pair["chosen"]) == 0.0
            is_broken = unparsable_share(pair["rejected"]) > 0.0
            assert is_broken if pair["kind"] == "broken" else polarity(pair["chosen"]) > polarity(pair["rejected"])
        good = [row for row in labelled if unparsable_share(str(row["completion"])) == 0]
        assert 360 < len(good) < 440  # four fifths
        assert not any(row["label"] for row in labelled if row not in good)
        assert all((polarity(str(row["completion"])) > 0) == bool(row["label"]) for row in good)
        texts = [pair["chosen"] + pair["rejected"] for pair in pairs] + [str(row["completion"]) for row in labelled]
        assert not {word.strip(".,") for text in texts for word in text.split()} & set(absent)
