"""The lookup world: people, whom they are related to, what is known of each, and episodes that ask about it.

A question takes one fact or two ("job of the parent of Ada Stone": her parent, then the parent's job). Facts are drawn
afresh for every world, and every row has a world of its own, so that none can be memorised: an answer is looked up, or
it is a guess that is right once in sixteen times.

The pre-training text holds whole episodes with what the search answered. Its writers mostly guess at once, and those
who search make mistakes, so that greedy decoding never searches and training has something to find.
"""

import hashlib
import random
from dataclasses import dataclass

from tinyrl.starter import check_split, split_of
from tinyrl.starter.reviews import words

NAMES = words(
    "Ada Amy Ann Ben Bob Cal Cleo Dan Dora Dov Earl Elsa Emil Eva Finn Flo Fred Gail Gene Greta Gus Hal Hana Hugo Ida "
    "Igor Ines Iris Ivan Jack Jane Joan Jon Joy Karl Kate Kurt Lars Lena Leo Lily Lou Luca Mara Max Mia Milo Nina Noah "
    "Nora Olaf Olga Otto Paul Pia Ray Rosa Ruth Sam Tess Tim Uma Vera Zoe"
)
FAMILIES = words(
    "Adler Berg Blum Byrne Chan Costa Cruz Diaz Dunn Frost Gallo Hahn Hart Horn Ito Jung Khan Klein Lam Lund Marsh "
    "Moss Nash Okafor Park Reyes Roth Sato Silva Stone Vogt Wood"
)
RELATIONS = words("parent child twin cousin")
ATTRIBUTES = {
    "city": words("Bern Cairo Delhi Dublin Hanoi Kyoto Lagos Lima Lyon Oslo Paris Quito Riga Rome Seoul Tunis"),
    "job": words("actor baker clerk cook diver judge miner nurse painter pilot poet sailor singer smith tailor vet"),
    "pet": words("ant cat cow crab dog duck frog goat goose hen horse mouse owl pig rabbit toad"),
}

GUESS_SHARE = 0.55  # of the episodes answer at once
HALFWAY_SHARE = 0.3  # of the others guess after the first of two facts
WRONG_QUERY_SHARE = 0.06  # of the queries: another name, family or key, or a word left out
WRONG_COPY_SHARE = 0.04  # of the facts that were found are copied wrongly


@dataclass(frozen=True)
class Question:
    """Whose attribute is asked for: a person's (name, family) own, where relation is None, or that of a relative."""

    person: tuple[str, str]
    relation: str | None
    attribute: str

    @property
    def prompt(self) -> str:
        """'question: job of the parent of Ada Stone ?'."""
        via = f"the {self.relation} of " if self.relation else ""
        return f"question: {self.attribute} of {via}{' '.join(self.person)} ?"

    @property
    def keys(self) -> list[str]:
        return [self.relation, self.attribute] if self.relation else [self.attribute]


def fact(world: str, name: str, family: str, key: str) -> str | None:
    """What a world says of a person: a relative's name and family, or an attribute; None where nothing is known."""
    if name not in NAMES or family not in FAMILIES:
        return None
    point = int.from_bytes(hashlib.sha256(f"{world} {name} {family} {key}".encode()).digest()[:8])
    if key in RELATIONS:
        return f"{NAMES[(NAMES.index(name) + 1 + point % (len(NAMES) - 1)) % len(NAMES)]} {family}"
    return ATTRIBUTES[key][point % len(ATTRIBUTES[key])] if key in ATTRIBUTES else None


def draw_question(rng: random.Random) -> Question:
    """Any person and attribute; half of the questions take two facts."""
    relation = rng.choice(RELATIONS) if rng.random() < 0.5 else None
    return Question((rng.choice(NAMES), rng.choice(FAMILIES)), relation, rng.choice(list(ATTRIBUTES)))


def right_answer(world: str, question: Question) -> str:
    found = " ".join(question.person)
    for key in question.keys:
        known = fact(world, *_person(found), key)
        assert known is not None
        found = known
    return found


def lookup_rows(split: str, *, num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Different questions of one split, each in a world of its own: rows {"prompt", "answer", "world"}."""
    check_split(split)
    rng = random.Random(f"lookup {split} {seed}")
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < num_rows:
        question, world = draw_question(rng), f"{split} {seed} {len(rows)}"
        if split_of(question.prompt) == split and question.prompt not in rows:
            answer = right_answer(world, question)
            rows[question.prompt] = {"prompt": question.prompt, "answer": answer, "world": world}
    return list(rows.values())


def search_text(query: str) -> str:
    """How a query is written: ' search Ada Stone job ;'."""
    return f" search {query} ;"


def found_text(known: str | None) -> str:
    """How a search answers: ' found baker ;', or ' found nothing ;'."""
    return f" found {known or 'nothing'} ;"


def answer_text(value: str) -> str:
    """How an answer is written: ' answer baker .'."""
    return f" answer {value} ."


def written_episode(world: str, question: Question, rng: random.Random) -> str:
    """What follows a question in the pre-training text, observations in place; mostly a guess."""
    guess = rng.choice(ATTRIBUTES[question.attribute])
    if rng.random() < GUESS_SHARE:
        return answer_text(guess)
    text, found = "", " ".join(question.person)
    for key in question.keys:
        if key == question.attribute and text and rng.random() < HALFWAY_SHARE:
            return text + answer_text(guess)
        known = None
        while known is None:  # who found nothing asks again
            query = _written_query([*_person(found), key], rng)
            known = fact(world, *query) if len(query) == 3 else None
            text += search_text(" ".join(query)) + found_text(known)
        found = _copied(known, key, rng)
    return text + answer_text(found)


def _person(text: str) -> tuple[str, str]:
    name, family = text.split()
    return name, family


def _written_query(right: list[str], rng: random.Random) -> list[str]:
    query, key = list(right), right[-1]
    if rng.random() < WRONG_QUERY_SHARE:
        at = rng.randrange(3)
        if rng.random() < 1 / 3:
            del query[at]
        else:
            keys = RELATIONS if key in RELATIONS else tuple(ATTRIBUTES)
            query[at] = rng.choice((NAMES, FAMILIES, keys)[at])
    return query


def _copied(known: str, key: str, rng: random.Random) -> str:
    if rng.random() >= WRONG_COPY_SHARE:
        return known
    return f"{rng.choice(NAMES)} {known.split()[1]}" if key in RELATIONS else rng.choice(ATTRIBUTES[key])


def vocabulary() -> list[str]:
    """Every word of prompts and episodes, as it stands in a text: all but the first behind a space."""
    kinds = (NAMES, FAMILIES, RELATIONS, ATTRIBUTES, *ATTRIBUTES.values())
    plain = words("of the ? search found nothing answer ; .")
    return ["question:", *(f" {word}" for kind in (plain, *kinds) for word in kind)]
