"""The corpora of the embedded default, as rows: what its language models and its reward model are trained on, and what
the sentiment experiment learns from (sentiment.py).

Row i is a function of (seed, i) alone, so a longer corpus begins with the shorter one.
"""

import random
import string

from tinyrl.starter.lookup import draw_question, written_episode
from tinyrl.starter.reviews import HELD_OUT, TRAINING, Lexicon, Review, openings, unparsable_share, write_review
from tinyrl.starter.sorting import NUM_LETTERS, sort_completion, sort_prompt, written_answer
from tinyrl.starter.splits import split_of

SORT_SHARE = 0.5  # of the language model's rows
BROKEN_SHARE = 0.2  # of the reward model's pairs reject the chosen review's own broken text


def language_rows(num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Pre-training text, sorting and reviews mixed: rows {"prompt", "completion"}; prompt + completion is the text."""
    pretraining_openings = openings("pretrain")
    return [_language_row(random.Random(f"language {seed} {i}"), pretraining_openings) for i in range(num_rows)]


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


def episode_rows(num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Pre-training text of the lookup model, each row in a world of its own: rows {"prompt", "completion"}."""
    return [_episode_row(f"pretrain {seed} {i}", random.Random(f"episodes {seed} {i}")) for i in range(num_rows)]


def _writer(split: str) -> tuple[Lexicon, list[str]]:
    """What the judged reviews of a split are written with: nouns and templates, and openings."""
    if split not in ("train", "eval"):
        raise ValueError(f"split {split!r} has no judged reviews; there are train and eval")
    return (TRAINING, openings("pretrain")) if split == "train" else (HELD_OUT, openings("eval"))


def _language_row(rng: random.Random, pretraining_openings: list[str]) -> dict[str, str]:
    if rng.random() >= SORT_SHARE:
        return {"prompt": rng.choice(pretraining_openings), "completion": write_review(rng).text}
    while True:
        letters = "".join(rng.sample(string.ascii_lowercase, NUM_LETTERS))
        prompt = sort_prompt(letters)
        if split_of(prompt) == "pretrain":
            answer = written_answer("".join(sorted(letters)), rng)
            return {"prompt": prompt, "completion": sort_completion(answer)}


def _episode_row(world: str, rng: random.Random) -> dict[str, str]:
    while True:
        question = draw_question(rng)
        if split_of(question.prompt) == "pretrain":
            return {"prompt": question.prompt, "completion": written_episode(world, question, rng)}


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
        text = _damaged(review, rng)
        if unparsable_share(text) > 0:  # a cut may fall after a full stop
            return text


def _damaged(review: Review, rng: random.Random) -> str:
    words = review.text.split()
    kind = rng.randrange(4)
    if kind == 0:
        rng.shuffle(words)
    elif kind == 1:
        sentence = rng.choice([part for part in review.text.split(".") if part]) + "."
        return sentence * rng.randint(2, 4)
    elif kind == 2:
        words = words[: rng.randrange(1, len(words) - 1)]
    else:
        for _ in range(max(2, len(words) // 5)):
            del words[rng.randrange(len(words))]
    return " " + " ".join(words)
