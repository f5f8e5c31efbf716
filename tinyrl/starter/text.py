"""The text of the embedded language models: letters to sort, questions to look up, reviews (sentiment.py).

Mistakes are put into the pre-training text on purpose, so that training has something to repair. Row i of a corpus is a
function of (seed, i) alone, so a longer one begins with the shorter one.
"""

import functools
import hashlib
import random
import string
from typing import NamedTuple

from tinyrl.starter import check_split, split_of
from tinyrl.starter.sentiment import openings, words, write_review

SORT_SHARE = 0.5  # of the language model's rows


def language_rows(num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Pre-training text, sorting and reviews mixed: rows {"prompt", "completion"}; prompt + completion is the text."""
    pretraining_openings, rows = openings("pretrain"), []
    for rng in (random.Random(f"language {seed} {i}") for i in range(num_rows)):
        if rng.random() >= SORT_SHARE:
            rows.append({"prompt": rng.choice(pretraining_openings), "completion": write_review(rng).text})
            continue
        letters = _draw_letters(rng)
        while split_of(sort_prompt(letters)) != "pretrain":
            letters = _draw_letters(rng)
        answer = written_answer("".join(sorted(letters)), rng)
        rows.append({"prompt": sort_prompt(letters), "completion": sort_completion(answer)})
    return rows


def episode_rows(num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Pre-training text of the lookup model, each row in a world of its own: rows {"prompt", "completion"}."""
    rows = []
    for i in range(num_rows):
        rng = random.Random(f"episodes {seed} {i}")
        question = draw_question(rng)
        while split_of(question.prompt) != "pretrain":
            question = draw_question(rng)
        rows.append({"prompt": question.prompt, "completion": written_episode(f"pretrain {seed} {i}", question, rng)})
    return rows


# ---- sorting: eight different letters and their alphabetical order ----
# A *habit* hits greedy decoding too: when both letters of a confused pair occur (m and n, say) they mostly come out in
# the wrong order. A *slip* only costs probability: two neighbours swapped, a letter left out or written twice,
# anywhere. Neither can ever be the right answer, since the letters of a prompt are all different.

NUM_LETTERS = 8
CONFUSED_PAIRS = ("bc", "gh", "ij", "kl", "mn", "pq", "uv", "xy")
HABIT_SHARE = 0.8  # how often a confused pair comes out in the wrong order
SLIP_SHARE = 0.15  # how often an answer also has a slip


def sort_prompt(letters: str) -> str:
    return f"letters: {' '.join(letters)} sorted:"


def sort_completion(letters: str) -> str:
    return "".join(f" {letter}" for letter in letters)


def sort_rows(split: str, *, num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Different prompts of one split with their right answers: rows {"prompt", "answer"}."""
    return [{"prompt": prompt, "answer": answer} for prompt, answer in _drawn(split, num_rows, seed)]


@functools.cache
def _drawn(split: str, num_rows: int, seed: int) -> tuple[tuple[str, str], ...]:
    check_split(split)
    rng = random.Random(f"sort {split} {seed}")
    answers: dict[str, str] = {}
    while len(answers) < num_rows:
        letters = _draw_letters(rng)
        if split_of(sort_prompt(letters)) == split:
            answers[sort_prompt(letters)] = "".join(sorted(letters))
    return tuple(answers.items())


def _draw_letters(rng: random.Random) -> str:
    return "".join(rng.sample(string.ascii_lowercase, NUM_LETTERS))


def habitual_answer(answer: str, rng: random.Random) -> str:
    """The answer with each confused pair it holds swapped in HABIT_SHARE of the cases."""
    for pair in CONFUSED_PAIRS:
        if pair in answer and rng.random() < HABIT_SHARE:
            answer = answer.replace(pair, pair[::-1])
    return answer


def slip(answer: str, rng: random.Random) -> str:
    """The answer with one slip: two neighbours swapped, a letter left out, or a letter written twice."""
    kind = rng.randrange(3)
    if kind == 0:
        at = rng.randrange(len(answer) - 1)
        return answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :]
    at = rng.randrange(len(answer))
    return answer[:at] + answer[at + 1 :] if kind == 1 else answer[: at + 1] + answer[at:]


def written_answer(answer: str, rng: random.Random) -> str:
    """The answer as the pre-training text has it: habits always at work, and a slip in SLIP_SHARE of the rows."""
    if rng.random() < SLIP_SHARE:
        answer = slip(answer, rng)  # comes first: after a habit it could swap the letters back and undo it
    return habitual_answer(answer, rng)


# ---- looking up: people, whom they are related to, what is known of each, and episodes that ask about it ----
# A question takes one fact or two ("job of the parent of Ada Stone": her parent, then the parent's job). Facts are
# drawn afresh for every world, and every row has a world of its own, so that none can be memorised: an answer is looked
# up, or it is a guess that is right once in sixteen times. The pre-training text holds whole episodes with what the
# search answered. Its writers mostly guess at once, and those who search make mistakes, so that greedy decoding never
# searches and training has something to find.

NAMES = words(
    "Ada Amy Ann Ben Bob Cal Cleo Dan Dora Dov Earl Elsa Emil Eva Finn Flo Fred Gail Gene Greta Gus Hal Hana Hugo Ida "
    "Igor Ines Iris Ivan Jack Jane Joan Jon Joy Karl Kate Kurt Lars Lena Leo Lily Lou Luca Mara Max Mia Milo Nina Noah "
    "Nora Olaf Olga Otto Paul Pia Ray Rosa Ruth Sam Tess Tim Uma Vera Zoe"
)
FAMILIES = words(
    "Adler Berg Blum Byrne Chan Costa Cruz Diaz Dunn Frost Gallo Hahn Hart Horn Ito Jung Khan Klein Lam Lund Marsh "
    "Moss Nash Okafor Park Reyes Roth Sato Silva Stone Vogt Wood"
)
RELATIONS = ["parent", "child", "twin", "cousin"]
ATTRIBUTES = {
    "city": words("Bern Cairo Delhi Dublin Hanoi Kyoto Lagos Lima Lyon Oslo Paris Quito Riga Rome Seoul Tunis"),
    "job": words("actor baker clerk cook diver judge miner nurse painter pilot poet sailor singer smith tailor vet"),
    "pet": words("ant cat cow crab dog duck frog goat goose hen horse mouse owl pig rabbit toad"),
}
GUESS_SHARE = 0.55  # of the episodes answer at once
HALFWAY_SHARE = 0.3  # of the others guess after the first of two facts
WRONG_QUERY_SHARE = 0.06  # of the queries: another name, family or key, or a word left out
WRONG_COPY_SHARE = 0.04  # of the facts that were found are copied wrongly


class Question(NamedTuple):
    """Whose attribute is asked for: a person's own ("Ada Stone"), where relation is None, or that of a relative."""

    person: str
    relation: str | None
    attribute: str

    @property
    def prompt(self) -> str:
        """'question: job of the parent of Ada Stone ?'."""
        via = f"the {self.relation} of " if self.relation else ""
        return f"question: {self.attribute} of {via}{self.person} ?"

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
    return Question(f"{rng.choice(NAMES)} {rng.choice(FAMILIES)}", relation, rng.choice(list(ATTRIBUTES)))


def right_answer(world: str, question: Question) -> str:
    found = question.person
    for key in question.keys:
        name, family = found.split()
        found = fact(world, name, family, key)
        assert found is not None
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
    return f" search {query} ;"


def found_text(known: str | None) -> str:
    return f" found {known or 'nothing'} ;"


def answer_text(value: str) -> str:
    return f" answer {value} ."


def written_episode(world: str, question: Question, rng: random.Random) -> str:
    """What follows a question in the pre-training text, observations in place; mostly a guess."""
    guess = rng.choice(ATTRIBUTES[question.attribute])
    if rng.random() < GUESS_SHARE:
        return answer_text(guess)
    text, found = "", question.person
    for key in question.keys:
        if key == question.attribute and text and rng.random() < HALFWAY_SHARE:
            return text + answer_text(guess)
        known = None
        while known is None:  # who found nothing asks again
            query = _written_query([*found.split(), key], rng)
            known = fact(world, *query) if len(query) == 3 else None
            text += search_text(" ".join(query)) + found_text(known)
        found = known
        if rng.random() < WRONG_COPY_SHARE:
            wrong_name = key in RELATIONS
            found = f"{rng.choice(NAMES)} {known.split()[1]}" if wrong_name else rng.choice(ATTRIBUTES[key])
    return text + answer_text(found)


def _written_query(query: list[str], rng: random.Random) -> list[str]:
    if rng.random() < WRONG_QUERY_SHARE:
        at = rng.randrange(3)
        if rng.random() < 1 / 3:
            del query[at]
        else:
            query[at] = rng.choice((NAMES, FAMILIES, RELATIONS if query[2] in RELATIONS else list(ATTRIBUTES))[at])
    return query


def vocabulary() -> list[str]:
    """Every word of prompts and episodes, as it stands in a text: all but the first behind a space."""
    plain = words("of the ? search found nothing answer ; .")
    kinds = (plain, NAMES, FAMILIES, RELATIONS, ATTRIBUTES, *ATTRIBUTES.values())
    return ["question:", *(f" {word}" for kind in kinds for word in kind)]
