"""The reviews task: continue a neutral opening into a short film review.

The embedded default of `tinyrl train ppo`, where a learned reward model scores the reviews. The verifier here is
the independent judge: the grammar's own count of positive and negative clauses, which no model was trained on.
"""

import itertools
import random
import re
from collections.abc import Iterable

from tinyrl.data.readers import Row
from tinyrl.starter import SPLITS, split_of, words
from tinyrl.tasks import Task
from tinyrl.tasks.grading import by_row

NOUNS = words(
    "plot story script ending cast acting dialogue humor music pacing editing lighting scenery hero villain romance "
    "mystery direction camera sound finale setting soundtrack narration chase twist sequel subplot chemistry prologue"
)
ADJECTIVE_CLAUSES = (
    "the {noun} was {adjective}", "the {noun} was {adverb} {adjective}", "i found the {noun} {adjective}",
    "the {noun} seemed {adjective}", "the {noun} turned out {adjective}", "for me the {noun} felt {adverb} {adjective}",
)  # fmt: skip
VERB_CLAUSES = ("the {noun} {verb_phrase}", "somehow the {noun} {verb_phrase}")
ADJECTIVES = {
    1: words(
        "brilliant superb gripping charming delightful clever moving funny fresh warm sharp lovely wonderful thrilling "
        "excellent stunning vivid smart tender rich bold graceful touching amazing great perfect lively witty elegant "
        "inspired"
    ),
    -1: words(
        "dull boring clumsy awful weak tired bland silly cold flat messy terrible dreadful lazy painful tedious "
        "shallow cheap stale hollow forced ugly lifeless noisy dreary confusing wooden poor ridiculous sloppy"
    ),
    0: words("long short simple quiet loud modern old familiar unusual serious light strange plain typical calm"),
}
VERB_PHRASES = {
    1: (
        "kept me hooked", "made me smile", "won me over", "stayed with me", "drew me in", "lifted my mood",
        "took my breath away", "exceeded my hopes", "touched my heart", "worked beautifully",
    ),
    -1: (
        "put me to sleep", "let me down", "wore me out", "made me cringe", "fell apart", "wasted my time",
        "tested my patience", "went nowhere", "missed the mark", "gave me a headache",
    ),
}  # fmt: skip
ENDINGS = {
    1: (
        "i loved it", "i would watch it again", "highly recommended", "i left happy", "worth every minute",
        "a real treat", "go and see it", "i want more",
    ),
    -1: (
        "i hated it", "i would not watch it again", "not recommended", "i left early", "not worth the time",
        "a real mess", "stay away", "i want my money back",
    ),
}  # fmt: skip
ADVERBS = ("very", "really", "quite", "so", "rather")

_OPENING_PARTS = (
    ("i saw", "i watched", "we saw", "we watched", "my friend and i saw", "my friend and i watched"),
    ("this film", "this movie", "the film", "the movie", "it"),
    ("last night", "on sunday", "on friday", "last week", "this morning", "on a plane", "at home", "in town",
     "by the sea"),
    ("after work", "before dinner", "after lunch", "with my sister", "with my uncle", "during a storm", "by chance",
     "for a class", "for the first time"),
)  # fmt: skip


def openings(split: str) -> list[str]:
    """Return the neutral openings of one split, in a shuffled but fixed order: prompts that reviews continue."""
    assert split in SPLITS, split
    every = [" ".join(parts) + "." for parts in itertools.product(*_OPENING_PARTS)]
    random.Random("openings").shuffle(every)
    return [opening for opening in every if split_of(opening) == split]


_MOODS = {word: mood for table in (ADJECTIVES, VERB_PHRASES, ENDINGS) for mood, some in table.items() for word in some}


def _one_of(name: str, some: Iterable[str]) -> str:
    return f"(?P<{name}>{'|'.join(map(re.escape, some))})"


_SLOTS = {
    "noun": _one_of("noun", NOUNS),
    "adverb": _one_of("adverb", ADVERBS),
    "adjective": _one_of("mood", itertools.chain(*ADJECTIVES.values())),
    "verb_phrase": _one_of("mood", itertools.chain(*VERB_PHRASES.values())),
}
_CLAUSES = [clause.format(**_SLOTS) for clause in ADJECTIVE_CLAUSES + VERB_CLAUSES]
_PATTERNS = [re.compile(clause) for clause in [*_CLAUSES, _one_of("mood", itertools.chain(*ENDINGS.values()))]]


def clause_moods(text: str) -> list[int | None]:
    """Return the mood (1, 0, -1) of every clause of a review, without its opening.

    None: a clause outside the grammar, one that repeats an earlier one, a last sentence without its full stop.
    """
    *sentences, rest = text.strip().split(".")
    moods: list[int | None] = []
    seen: set[str] = set()
    for sentence in sentences:
        for clause in re.split(r", (?:and|but) ", sentence.strip()):
            found = next((match for pattern in _PATTERNS if (match := pattern.fullmatch(clause))), None)
            moods.append(None if found is None or clause in seen else _MOODS[found["mood"]])
            seen.add(clause)
    return [*moods, None] if rest.strip() else moods


def score(text: str, row: Row) -> float:
    """Return the mean mood of a review's clauses, from -1 to 1; a clause the grammar cannot parse counts 0."""
    moods = clause_moods(text)
    return sum(mood or 0 for mood in moods) / len(moods) if moods else 0.0


TASK = Task(
    name="reviews",
    summary="continue a neutral opening into a film review (scored by a reward model; judged by the grammar)",
    rows=lambda split: [{"prompt": opening} for opening in openings(split)[: 512 if split == "eval" else None]],
    verify=by_row(score),
    gold=lambda row: " the plot was brilliant, and the cast kept me hooked. i loved it.",
    columns=("prompt",),
)
