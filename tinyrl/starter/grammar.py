"""A parser of reviews: what the grammar itself says of a text, independent of any trained model.

A clause counts when some template of the grammar, the held-out ones included, could have written it and the text
has not said the same before; so a policy that repeats itself gains nothing here.
"""

import re

from tinyrl.starter.reviews import ADJECTIVES, ADVERBS, ENDINGS, FULL, VERB_PHRASES


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
