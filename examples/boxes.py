"""A task for agents with a tool: boxes that have to be looked into, and what lies on top in one of them.

The agents beside this file play it (`*_agent.py`). A box holds two things, "key, below it coin"; the answer is the
upper one. One that never looks knows nothing, and one that names either of the two is right half of the time.
"""

import random

from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.tasks import Task
from tinyrl.tasks.grading import by_row

COLOURS = ("red", "blue", "green", "white", "black", "pink")
THINGS = ("apple", "key", "coin", "shell", "stone", "nail", "ring", "leaf")
PEOPLE = {
    "train": ("Ada", "Ben", "Eva", "Ida", "Jon", "Kim", "Leo", "Mia", "Noa", "Pia", "Ron", "Sam"),
    "eval": ("Uma", "Vic", "Zoe"),
}


def rows(split: str) -> list[Row]:
    """Everybody asks once for each colour; whom they ask has boxes of their own."""
    made = list[Row]()
    for person in PEOPLE[split]:
        draw = random.Random(person)
        boxes = {colour: ", below it ".join(draw.sample(THINGS, 2)) for colour in COLOURS}
        made += [{"person": person, "colour": colour, "boxes": boxes} for colour in COLOURS]
    return made


def prompt(row: Row) -> Prompt:
    return f"{row['person']} asks: what is on top in the {row['colour']} box?"


def gold(row: Row) -> str:
    return row["boxes"][row["colour"]].partition(",")[0]


def score(text: str, row: Row) -> float:
    """Return 1.0 where the last word is the thing on top, else 0.0."""
    words = text.replace(".", " ").split()
    return float(bool(words) and words[-1] == gold(row))


TASK = Task(
    name="boxes",
    summary="look into a box, and say what is on top",
    rows=rows,
    prompt=prompt,
    verify=by_row(score),
    right_or_wrong=True,
    gold=gold,
    columns=("person", "colour", "boxes"),
)
