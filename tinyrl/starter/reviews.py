"""The grammar that writes film reviews: a neutral opening, then two to four clauses, each with a mood of its own.

A review draws how positive its writer is, and each clause draws its own mood from that share, so clauses of one
review may contradict each other. Some nouns and clause templates are held out: the reward model never trains on
them and is evaluated on reviews made only of them.
"""

import itertools
import random
import re
from dataclasses import dataclass

from tinyrl.starter.splits import check_split, split_of

Words = tuple[str, ...]


def words(text: str) -> Words:
    """The words of a text: 'a b' -> ('a', 'b')."""
    return tuple(text.split())


NOUNS: Words = words(
    "plot story script ending cast acting dialogue humor music pacing editing lighting scenery hero villain romance "
    "mystery direction camera sound finale setting"
)
HELD_OUT_NOUNS: Words = words("soundtrack narration chase twist sequel subplot chemistry prologue")

ADJECTIVES: dict[int, Words] = {
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
VERB_PHRASES: dict[int, Words] = {
    1: (
        "kept me hooked", "made me smile", "won me over", "stayed with me", "drew me in", "lifted my mood",
        "took my breath away", "exceeded my hopes", "touched my heart", "worked beautifully",
    ),
    -1: (
        "put me to sleep", "let me down", "wore me out", "made me cringe", "fell apart", "wasted my time",
        "tested my patience", "went nowhere", "missed the mark", "gave me a headache",
    ),
}  # fmt: skip
ENDINGS: dict[int, Words] = {
    1: (
        "i loved it", "i would watch it again", "highly recommended", "i left happy", "worth every minute",
        "a real treat", "go and see it", "i want more",
    ),
    -1: (
        "i hated it", "i would not watch it again", "not recommended", "i left early", "not worth the time",
        "a real mess", "stay away", "i want my money back",
    ),
}  # fmt: skip
ADVERBS: Words = ("very", "really", "quite", "so", "rather")

ADJECTIVE_TEMPLATES: Words = (
    "the {noun} was {adjective}",
    "the {noun} was {adverb} {adjective}",
    "i found the {noun} {adjective}",
    "the {noun} seemed {adjective}",
)
HELD_OUT_ADJECTIVE_TEMPLATES: Words = (
    "the {noun} turned out {adjective}",
    "for me the {noun} felt {adverb} {adjective}",
)
VERB_TEMPLATES: Words = ("the {noun} {verb_phrase}",)
HELD_OUT_VERB_TEMPLATES: Words = ("somehow the {noun} {verb_phrase}",)

_OPENING_PARTS: tuple[Words, ...] = (
    ("i saw", "i watched", "we saw", "we watched", "my friend and i saw", "my friend and i watched"),
    ("this film", "this movie", "the film", "the movie", "it"),
    ("last night", "on sunday", "on friday", "last week", "this morning", "on a plane", "at home", "in town",
     "by the sea"),
    ("after work", "before dinner", "after lunch", "with my sister", "with my uncle", "during a storm", "by chance",
     "for a class", "for the first time"),
)  # fmt: skip

POSITIVE_SHARES = (0.3, 0.5, 0.7)  # what a review's share of positive clauses is drawn from
NEUTRAL_SHARE = 0.1  # of the clauses
VERB_SHARE = 0.3  # of the clauses with a mood
ENDING_SHARE = 0.5  # of the reviews close with an ending
JOIN_SHARE = 0.5  # of the neighbouring clauses share a sentence


@dataclass(frozen=True)
class Lexicon:
    """The part of the grammar that a writer uses."""

    nouns: Words
    adjective_templates: Words
    verb_templates: Words


TRAINING = Lexicon(NOUNS, ADJECTIVE_TEMPLATES, VERB_TEMPLATES)
HELD_OUT = Lexicon(HELD_OUT_NOUNS, HELD_OUT_ADJECTIVE_TEMPLATES, HELD_OUT_VERB_TEMPLATES)
FULL = Lexicon(
    NOUNS + HELD_OUT_NOUNS,
    ADJECTIVE_TEMPLATES + HELD_OUT_ADJECTIVE_TEMPLATES,
    VERB_TEMPLATES + HELD_OUT_VERB_TEMPLATES,
)


@dataclass(frozen=True)
class Review:
    """What follows an opening, and the moods of its clauses in order (1, 0 or -1)."""

    text: str
    moods: tuple[int, ...]

    @property
    def polarity(self) -> int:
        """Positive minus negative clauses."""
        return sum(self.moods)

    @property
    def contradicts_itself(self) -> bool:
        """Whether it holds clauses of both moods."""
        return 1 in self.moods and -1 in self.moods


def openings(split: str) -> list[str]:
    """The neutral openings of one split, in a shuffled but fixed order: prompts that reviews continue."""
    check_split(split)
    every = [" ".join(parts) + "." for parts in itertools.product(*_OPENING_PARTS)]
    random.Random("openings").shuffle(every)
    return [opening for opening in every if split_of(opening) == split]


def write_review(rng: random.Random, lexicon: Lexicon = FULL) -> Review:
    """Two to four clauses about different nouns, joined into sentences; starts with the space after the opening."""
    positive_share = rng.choice(POSITIVE_SHARES)
    num_clauses = rng.randint(2, 4)
    moods = tuple(_draw_mood(rng, positive_share) for _ in range(num_clauses))
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


def _draw_mood(rng: random.Random, positive_share: float) -> int:
    if rng.random() < NEUTRAL_SHARE:
        return 0
    return 1 if rng.random() < positive_share else -1


def _write_clause(rng: random.Random, lexicon: Lexicon, noun: str, mood: int) -> str:
    if mood != 0 and rng.random() < VERB_SHARE:
        return rng.choice(lexicon.verb_templates).format(noun=noun, verb_phrase=rng.choice(VERB_PHRASES[mood]))
    template = rng.choice(lexicon.adjective_templates)
    return template.format(noun=noun, adjective=rng.choice(ADJECTIVES[mood]), adverb=rng.choice(ADVERBS))


# ---- A parser of reviews ----
# A clause counts when some template of the grammar, the held-out ones included, could have written it and the text
# has not said the same before; so a policy that repeats itself gains nothing here.


def _one_of(name: str, words: tuple[str, ...]) -> str:
    return f"(?P<{name}>{'|'.join(map(re.escape, words))})"


def _patterns() -> list[re.Pattern[str]]:
    adjectives = tuple(word for words in ADJECTIVES.values() for word in words)
    verb_phrases = tuple(phrase for phrases in VERB_PHRASES.values() for phrase in phrases)
    slots = {
        "noun": _one_of("noun", FULL.nouns),
        "adverb": _one_of("adverb", ADVERBS),
        "adjective": _one_of("mood", adjectives),
        "verb_phrase": _one_of("mood", verb_phrases),
    }
    templates = FULL.adjective_templates + FULL.verb_templates
    endings = _one_of("mood", tuple(ending for endings in ENDINGS.values() for ending in endings))
    return [re.compile(template.format(**slots)) for template in templates] + [re.compile(endings)]


_PATTERNS = _patterns()
_MOODS = {
    word: mood for table in (ADJECTIVES, VERB_PHRASES, ENDINGS) for mood, words in table.items() for word in words
}


def clause_mood(clause: str) -> int | None:
    """1, 0 or -1 for a clause of the grammar, None for anything else."""
    for pattern in _PATTERNS:
        if match := pattern.fullmatch(clause):
            return _MOODS[match["mood"]]
    return None


def clause_moods(text: str) -> list[int | None]:
    """The mood of every clause of a review (without its opening), None for what the grammar cannot have written.

    A clause that repeats an earlier one and a last sentence without its full stop are None too.
    """
    *sentences, rest = text.strip().split(".")
    moods: list[int | None] = []
    seen: set[str] = set()
    for sentence in sentences:
        for clause in re.split(r", (?:and|but) ", sentence.strip()):
            moods.append(None if clause in seen else clause_mood(clause))
            seen.add(clause)
    return [*moods, None] if rest.strip() else moods


def polarity(text: str) -> int:
    """Positive minus negative clauses of a review (without its opening): 'the plot was dull. i loved it.' is 0."""
    return sum(mood for mood in clause_moods(text) if mood is not None)


def unparsable_share(text: str) -> float:
    """The share of clauses that the grammar cannot have written; 1 for an empty text."""
    moods = clause_moods(text)
    return moods.count(None) / len(moods) if moods else 1.0
