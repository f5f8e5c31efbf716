"""The sums task: two numbers to add, for chat models that are small; right if a completion ends with the sum.

    python -m tinyrl.tasks.sums OUT

writes rows for the methods that learn from text, each with a held-out twin (`NAME.eval.jsonl`):

    answers.jsonl    prompt, completion, answer            a format: the sum as an equation, and nothing else
    pairs.jsonl      prompt, chosen, rejected, answer      the right equation, and one with another sum
    styles.jsonl     prompt, chosen, rejected, answer      the right equation, and the same in words
"""

import random
from fractions import Fraction
from pathlib import Path

from tinyrl.data.readers import Row
from tinyrl.data.writers import write_command, write_rows
from tinyrl.tasks import Task
from tinyrl.tasks.grading import by_row
from tinyrl.tasks.stated import stated_number

NUM_ROWS = {"train": 4096, "eval": 512}
SMALLEST = 2
LARGEST = 999
FARTHEST = 100  # of a wrong sum from the right one


def rows(split: str) -> list[Row]:
    """Draw rows; no two numbers are in both splits, in either order."""
    draw = random.Random(0)
    pairs: dict[tuple[int, ...], list[int]] = {}
    while len(pairs) < sum(NUM_ROWS.values()):
        numbers = [draw.randint(SMALLEST, LARGEST) for _ in range(2)]
        pairs.setdefault(tuple(sorted(numbers)), numbers)
    found = []
    border = NUM_ROWS["train"]
    for first, second in [*pairs.values()][:border] if split == "train" else [*pairs.values()][border:]:
        answer = first + second
        wrong = answer + draw.choice((-1, 1)) * draw.randint(1, min(FARTHEST, answer))
        asked = f"What is {first} + {second}?"
        found.append({"prompt": asked, "answer": answer, "first": first, "second": second, "wrong": wrong})
    return found


def write(out: Path) -> list[Path]:
    written = []
    for split, end in (("train", ""), ("eval", ".eval")):
        files: dict[str, list[Row]] = {"answers": [], "pairs": [], "styles": []}
        for row in rows(split):
            right, wrong = (f"{row['first']} + {row['second']} = {total}" for total in (row["answer"], row["wrong"]))
            words = f"The sum of {row['first']} and {row['second']} is {row['answer']}."
            common = {"prompt": row["prompt"], "answer": row["answer"]}
            files["answers"].append({**common, "completion": right})
            files["pairs"].append({**common, "chosen": right, "rejected": wrong})
            files["styles"].append({**common, "chosen": right, "rejected": words})
        written += [write_rows(out / f"{name}{end}.jsonl", some) for name, some in files.items()]
    return written


def answer(text: str, row: Row) -> Fraction | None:
    """Return the number that a completion ends with."""
    return stated_number(text)


def score(text: str, row: Row) -> float:
    """Return 1.0 if a completion ends with the row's sum, else 0.0."""
    wanted = answer(str(row["answer"]), row)
    return float(wanted is not None and answer(text, row) == wanted)


TASK = Task(
    name="sums",
    summary="sums of two numbers, for small chat models (right or wrong)",
    rows=rows,
    verify=by_row(score),
    right_or_wrong=True,
    gold=lambda row: f"{row['answer']}",
    columns=("prompt", "answer"),
    answer=answer,
)

if __name__ == "__main__":
    write_command("tinyrl.tasks.sums", write)
