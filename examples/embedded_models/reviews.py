"""Film reviews by the grammar of the task `reviews`: `python -m examples.embedded_models.reviews OUT`.

A review is a neutral opening, then two to four clauses, each with a mood of its own. It draws how positive its writer
is, and each clause draws its mood from that share, so clauses of one review may contradict each other. Some nouns and
clause templates are held out: the reward model never trains on them and is evaluated on reviews made only of them.

OUT holds, each with a held-out twin (`NAME.eval.jsonl`) of other openings, and where reviews are judged of other nouns
and templates too:

    reviews.jsonl    prompt, completion            what a policy imitates
    labelled.jsonl   prompt, completion, label     what a reward model learns from: 1 praises, 0 does not or is broken
    pairs.jsonl      prompt, chosen, rejected      what DPO learns from

Row i is a function of (seed, i) alone, so a longer corpus begins with the shorter one.
"""

import random
from pathlib import Path
from typing import NamedTuple

from tinyrl.data.writers import write_command, write_rows
from tinyrl.starter.reviews import (
    ADJECTIVE_CLAUSES,
    ADJECTIVES,
    ADVERBS,
    ENDINGS,
    NOUNS,
    VERB_CLAUSES,
    VERB_PHRASES,
    clause_moods,
    openings,
)

FILES = (("", "train", 6400), (".eval", "eval", 512))  # of each kind: end of its name, split, rows
POSITIVE_SHARES = (0.3, 0.5, 0.7)  # what a review's share of positive clauses is drawn from
NEUTRAL_SHARE = 0.1  # of the clauses
VERB_SHARE = 0.3  # of the clauses with a mood
ENDING_SHARE = 0.5  # of the reviews close with an ending
JOIN_SHARE = 0.5  # of the neighbouring clauses share a sentence
BROKEN_SHARE = 0.2  # of the pairs reject the chosen review's own broken text, and of the labelled reviews are broken


class Lexicon(NamedTuple):
    nouns: tuple[str, ...]
    adjective_templates: tuple[str, ...]
    verb_templates: tuple[str, ...]


FULL = Lexicon(NOUNS, ADJECTIVE_CLAUSES, VERB_CLAUSES)
TRAINING = Lexicon(NOUNS[:22], ADJECTIVE_CLAUSES[:4], VERB_CLAUSES[:1])
HELD_OUT = Lexicon(NOUNS[22:], ADJECTIVE_CLAUSES[4:], VERB_CLAUSES[1:])


class Review(NamedTuple):
    """What follows an opening, and the moods of its clauses in order (1, 0 or -1)."""

    text: str
    moods: tuple[int, ...]

    @property
    def polarity(self) -> int:
        return sum(self.moods)

    @property
    def contradicts_itself(self) -> bool:
        return 1 in self.moods and -1 in self.moods


def write_review(rng: random.Random, lexicon: Lexicon = FULL) -> Review:
    """Two to four clauses about different nouns, joined into sentences; starts with the space after the opening."""
    positive_share = rng.choice(POSITIVE_SHARES)
    num_clauses = rng.randint(2, 4)
    moods = tuple(
        0 if rng.random() < NEUTRAL_SHARE else 1 if rng.random() < positive_share else -1 for _ in range(num_clauses)
    )
    closes = moods[-1] != 0 and rng.random() < ENDING_SHARE
    nouns = rng.sample(lexicon.nouns, num_clauses)
    clauses = [_write_clause(rng, lexicon, noun, mood) for noun, mood in zip(nouns, moods, strict=True)]
    if closes:
        clauses[-1] = rng.choice(ENDINGS[moods[-1]])
    text = " " + clauses[0]
    for at in range(1, num_clauses):
        stands_alone = (closes and at == num_clauses - 1) or text.rpartition(".")[2].count(",") > 0
        if stands_alone or rng.random() >= JOIN_SHARE:
            text += ". " + clauses[at]
        else:
            text += (", but " if moods[at] * moods[at - 1] < 0 else ", and ") + clauses[at]
    return Review(text + ".", moods)


def _write_clause(rng: random.Random, lexicon: Lexicon, noun: str, mood: int) -> str:
    if mood != 0 and rng.random() < VERB_SHARE:
        return rng.choice(lexicon.verb_templates).format(noun=noun, verb_phrase=rng.choice(VERB_PHRASES[mood]))
    template = rng.choice(lexicon.adjective_templates)
    return template.format(noun=noun, adjective=rng.choice(ADJECTIVES[mood]), adverb=rng.choice(ADVERBS))


def unparsable_share(text: str) -> float:
    """The share of clauses that the grammar cannot have written; 1 for an empty text."""
    moods = clause_moods(text)
    return moods.count(None) / len(moods) if moods else 1.0


# ---- rows ----


def reward_pairs(split: str, *, num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Preference pairs {"prompt", "chosen", "rejected", "kind"}: the review with more positive clauses is chosen.

    split "train" writes with the training nouns and templates, "eval" with the held-out ones only. `kind` says what
    the pair is about: "clear" (neither review contradicts itself), "contradicting", or "broken" (the rejected text
    is the chosen one shuffled, looped, cut off or with words missing).
    """
    lexicon, prompts = _writer(split)
    return [_reward_pair(random.Random(f"reward {split} {seed} {i}"), lexicon, prompts) for i in range(num_rows)]


def review_rows(split: str, *, num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Reviews of every mood to imitate: rows {"prompt", "completion"}; the splits differ in their openings only."""
    _, prompts = _writer(split)
    draws = (random.Random(f"review {split} {seed} {i}") for i in range(num_rows))
    return [{"prompt": rng.choice(prompts), "completion": write_review(rng).text} for rng in draws]


def labelled_reviews(split: str, *, num_rows: int, seed: int = 0) -> list[dict[str, str | int]]:
    """Reviews with a verdict: rows {"prompt", "completion", "label"}, splits as `reward_pairs` has them.

    label 1: more positive than negative clauses; 0: more negative ones, or broken text of any mood.
    """
    lexicon, prompts = _writer(split)
    return [_labelled_review(random.Random(f"label {split} {seed} {i}"), lexicon, prompts) for i in range(num_rows)]


def label_pairs(split: str, *, num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """The same text as pairs {"prompt", "chosen", "rejected"}: a review of label 1 against one of label 0."""
    lexicon, prompts = _writer(split)
    pairs = []
    for i in range(num_rows):
        rng = random.Random(f"pair {split} {seed} {i}")
        sides: dict[int, str] = {}
        while len(sides) < 2:
            row = _labelled_review(rng, lexicon, prompts)
            sides[int(row["label"])] = str(row["completion"])
        pairs.append({"prompt": rng.choice(prompts), "chosen": sides[1], "rejected": sides[0]})
    return pairs


def _writer(split: str) -> tuple[Lexicon, list[str]]:
    """What the judged reviews of a split are written with: nouns and templates, and openings."""
    if split not in ("train", "eval"):
        raise ValueError(f"split {split!r} has no judged reviews; there are train and eval")
    return (TRAINING, openings("pretrain")) if split == "train" else (HELD_OUT, openings("eval"))


def _labelled_review(rng: random.Random, lexicon: Lexicon, prompts: list[str]) -> dict[str, str | int]:
    prompt, review = rng.choice(prompts), write_review(rng, lexicon)
    while review.polarity == 0:
        review = write_review(rng, lexicon)
    if rng.random() < BROKEN_SHARE:
        return {"prompt": prompt, "completion": broken(review, rng), "label": 0}
    return {"prompt": prompt, "completion": review.text, "label": int(review.polarity > 0)}


def _reward_pair(rng: random.Random, lexicon: Lexicon, prompts: list[str]) -> dict[str, str]:
    prompt = rng.choice(prompts)
    if rng.random() < BROKEN_SHARE:
        review = write_review(rng, lexicon)
        return {"prompt": prompt, "chosen": review.text, "rejected": broken(review, rng), "kind": "broken"}
    one, other = write_review(rng, lexicon), write_review(rng, lexicon)
    while one.polarity == other.polarity:
        other = write_review(rng, lexicon)
    chosen, rejected = (one, other) if one.polarity > other.polarity else (other, one)
    kind = "contradicting" if one.contradicts_itself or other.contradicts_itself else "clear"
    return {"prompt": prompt, "chosen": chosen.text, "rejected": rejected.text, "kind": kind}


def broken(review: Review, rng: random.Random) -> str:
    """A review damaged the way a policy that chases a reward damages it: shuffled, looped, cut off, words missing."""
    while True:
        words = review.text.split()
        kind = rng.randrange(4)
        if kind == 0:
            rng.shuffle(words)
        elif kind == 1:
            sentence = rng.choice([part for part in review.text.split(".") if part]) + "."
            words = (sentence * rng.randint(2, 4)).split()
        elif kind == 2:
            words = words[: rng.randrange(1, len(words) - 1)]
        else:
            for _ in range(max(2, len(words) // 5)):
                del words[rng.randrange(len(words))]
        text = " " + " ".join(words)
        if unparsable_share(text) > 0:  # a cut may fall after a full stop
            return text


def write(out: Path) -> list[Path]:
    kinds = (("reviews", review_rows), ("labelled", labelled_reviews), ("pairs", label_pairs))
    return [
        write_rows(out / f"{name}{end}.jsonl", rows_of(split, num_rows=count))
        for name, rows_of in kinds
        for end, split, count in FILES
    ]


if __name__ == "__main__":
    write_command("examples.embedded_models.reviews", write)
