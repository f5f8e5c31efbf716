"""The sort task: eight different letters; full marks for exactly the right order, nothing for anything else.

The embedded default's own task: its language model makes the mistakes of its pre-training text, all wrong here.
"""

import functools
import random
import string

from tinyrl.data.readers import Row
from tinyrl.starter import SPLITS, split_of
from tinyrl.tasks import Task
from tinyrl.tasks.grading import by_row

NUM_ROWS = {"train": 4096, "eval": 512}
NUM_LETTERS = 8


def sort_prompt(letters: str) -> str:
    return f"letters: {' '.join(letters)} sorted:"


def sort_completion(letters: str) -> str:
    return "".join(f" {letter}" for letter in letters)


@functools.cache
def sort_rows(split: str, *, num_rows: int, seed: int = 0) -> list[Row]:
    """Draw different prompts of one split with their right answers: rows {"prompt", "answer"}."""
    assert split in SPLITS, split
    rng = random.Random(f"sort {split} {seed}")
    answers: dict[str, str] = {}
    while len(answers) < num_rows:
        letters = draw_letters(rng)
        if split_of(sort_prompt(letters)) == split:
            answers[sort_prompt(letters)] = "".join(sorted(letters))
    return [{"prompt": prompt, "answer": answer} for prompt, answer in answers.items()]


def draw_letters(rng: random.Random) -> str:
    return "".join(rng.sample(string.ascii_lowercase, NUM_LETTERS))


def listed_letters(text: str) -> str | None:
    """Return the letters that a completion lists ('a b d' -> 'abd'); None if it is anything but single letters."""
    parts = text.split()
    return "".join(parts) if parts and all(len(part) == 1 and part.isalpha() for part in parts) else None


TASK = Task(
    name="sort",
    summary="sort eight letters (the embedded default's own task; right or wrong)",
    rows=lambda split: sort_rows(split, num_rows=NUM_ROWS[split]),
    verify=by_row(lambda text, row: float(listed_letters(text) == "".join(str(row["answer"]).split()))),
    right_or_wrong=True,
    gold=lambda row: sort_completion("".join(str(row["answer"]).split())),
    columns=("prompt", "answer"),
    answer=lambda text, row: listed_letters(text),
)
