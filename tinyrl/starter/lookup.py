"""The lookup task: a question about people whose facts only a search knows; full marks for exactly the right answer.

    question: job of the parent of Ada Stone ? search Ada Stone parent ; found Eva Stone ; search Eva Stone job ; ...

A question takes one fact or two (her parent, then the parent's job). Facts are drawn afresh for every world, and every
row has a world of its own, so that none can be memorised: an answer is looked up, or it is a guess that is right once
in sixteen times. The embedded lookup model's own task: its pre-training text mostly guesses at once, so greedy decoding
never searches before training, and the reward of the answer alone teaches it to (as in Search-R1).
"""

import hashlib
import random
from typing import Any, NamedTuple

from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.environments import Reply, Transcript, last_turn
from tinyrl.starter import SPLITS, split_of, words
from tinyrl.tasks import Task
from tinyrl.tasks.grading import by_row

NUM_ROWS = {"train": 4096, "eval": 512}
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


class Question(NamedTuple):
    """An attribute of a person ("Ada Stone"), or of a relative."""

    person: str
    relation: str | None
    attribute: str

    @property
    def prompt(self) -> str:
        via = f"the {self.relation} of " if self.relation else ""
        return f"question: {self.attribute} of {via}{self.person} ?"

    @property
    def keys(self) -> list[str]:
        return [self.relation, self.attribute] if self.relation else [self.attribute]


def fact(world: str, name: str, family: str, key: str) -> str | None:
    """Return a fact about a person in a world: a relative's name and family, or an attribute; None if unknown."""
    if name not in NAMES or family not in FAMILIES:
        return None
    point = int.from_bytes(hashlib.sha256(f"{world} {name} {family} {key}".encode()).digest()[:8])
    if key in RELATIONS:
        return f"{NAMES[(NAMES.index(name) + 1 + point % (len(NAMES) - 1)) % len(NAMES)]} {family}"
    return ATTRIBUTES[key][point % len(ATTRIBUTES[key])] if key in ATTRIBUTES else None


def draw_question(rng: random.Random) -> Question:
    """Draw any person and attribute; half of the questions take two facts."""
    relation = rng.choice(RELATIONS) if rng.random() < 0.5 else None
    return Question(f"{rng.choice(NAMES)} {rng.choice(FAMILIES)}", relation, rng.choice(list(ATTRIBUTES)))


def right_answer(world: str, question: Question) -> str:
    """Return the value that the keys of a question lead to, one fact after another."""
    found = question.person
    for key in question.keys:
        name, family = found.split()
        found = str(fact(world, name, family, key))
    return found


def lookup_rows(split: str, *, num_rows: int, seed: int = 0) -> list[Row]:
    """Draw different questions of one split: rows {"prompt", "answer", "world"}; facts follow from the `world`."""
    assert split in SPLITS, split
    rng = random.Random(f"lookup {split} {seed}")
    rows: dict[str, Row] = {}
    while len(rows) < num_rows:
        question = draw_question(rng)
        world = f"{split} {seed} {len(rows)}"
        if split_of(question.prompt) == split and question.prompt not in rows:
            answer = right_answer(world, question)
            rows[question.prompt] = {"prompt": question.prompt, "answer": answer, "world": world}
    return list(rows.values())


def found_text(known: str | None) -> str:
    return f" found {known or 'nothing'} ;"


def answer_text(value: str) -> str:
    return f" answer {value} ."


def respond(
    prompts: list[Prompt], transcripts: list[Transcript], *, world: list[str], **columns: Any
) -> list[Reply | str | None]:
    """Search in each row's world. A turn that answers, or does not end with ';', ends the episode."""
    replies: list[Reply | str | None] = []
    for turns, key in zip(transcripts, world, strict=True):
        words = last_turn(turns).split()
        if "answer" in words or words[-1:] != [";"]:
            replies.append(None)
            continue
        query = words[1:-1] if words[0] == "search" else []
        known = fact(key, *query) if len(query) == 3 else None
        replies.append(Reply(found_text(known), invalid=known is None))
    return replies


def given_answer(text: str) -> str | None:
    """Return the word after the first `answer` in a text (' answer baker .' -> 'baker'); None if it is not one word."""
    words = text.split()
    given = words[words.index("answer") + 1 :] if "answer" in words else []
    return given[0] if given[1:] in ([], ["."]) and given and given[0].isalpha() else None


def score(text: str, row: Row) -> float:
    """Return 1.0 if the policy's own text answers with the right word, else 0.0; observations do not count."""
    return float(given_answer(text) == row["answer"])


def asking_turn(row: Row) -> str:
    """Return the first search of a question: 'job of the parent of Ada Stone' -> ' search Ada Stone parent ;'."""
    *keys, person = row["prompt"].removeprefix("question: ").removesuffix(" ?").split(" of ")
    return f" search {person} {keys[-1].removeprefix('the ')} ;"


TASK = Task(
    name="lookup",
    summary="answer questions by searching, in several turns (the embedded lookup model's own; right or wrong)",
    rows=lambda split: lookup_rows(split, num_rows=NUM_ROWS[split]),
    verify=by_row(score),
    right_or_wrong=True,
    gold=lambda row: answer_text(row["answer"]),  # without the search that leads to it
    columns=("prompt", "answer", "world"),
    answer=lambda text, row: given_answer(text),
    respond=respond,
    stop=(";", "."),
    asking_turn=asking_turn,
)
