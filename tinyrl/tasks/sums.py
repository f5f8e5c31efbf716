"""The sums task: a story with two numbers to add, for chat models that are small; right where it ends with the sum.

    python -m tinyrl.tasks.sums OUT

writes the stories as rows for the other methods, each with a held-out twin (`NAME.eval.jsonl`):

    answers.jsonl    prompt, completion, answer            a format: the sum as an equation, and nothing else
    pairs.jsonl      prompt, chosen, rejected, answer      the equation, and a talkative answer with the same number
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.tasks.grading import completion_text, last_number, numbers_equal
from tinyrl.tasks.task import Task

NUM_ROWS = {"train": 4096, "eval": 512}
SMALLEST, LARGEST = 2, 99
NAMES = ("Ann", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "shells", "stamps", "tickets")
ENDING = "End your answer with the number."


def rows(split: str) -> list[Row]:
    """Rows {"prompt", "answer", "first", "second"}: no pair of numbers is in both splits, in either order."""
    if split not in NUM_ROWS:
        raise ValueError(f"task sums has no split {split!r}; there are {', '.join(NUM_ROWS)}")
    numbers = range(SMALLEST, LARGEST + 1)
    draw = random.Random(0)
    pairs = [(a, b) for a in numbers for b in numbers if a <= b]
    draw.shuffle(pairs)
    chosen = {"train": pairs[: NUM_ROWS["train"]], "eval": pairs[NUM_ROWS["train"] :][: NUM_ROWS["eval"]]}[split]
    return [_row(draw.sample(pair, 2), draw) for pair in chosen]


def _row(numbers: list[int], draw: random.Random) -> Row:
    first, second = numbers
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    story = f"{name} has {first} {thing} and buys {second} more. How many {thing} does {name} have now? {ENDING}"
    return {"prompt": story, "answer": first + second, "first": first, "second": second}


def prompt(row: Row) -> Prompt:
    """The story and its question."""
    return row["prompt"]


def verify(prompts: list[Prompt], completions: list[Any], *, answer: list[int], **columns: Any) -> list[float | None]:
    """1.0 where a completion's last number is the sum, else 0.0."""
    said = [last_number(completion_text(completion)) for completion in completions]
    return [float(numbers_equal(one, right)) for one, right in zip(said, answer, strict=True)]


def gold(row: Row) -> str:
    """The sum by itself."""
    return f"{row['answer']}"


def equation(row: Row) -> str:
    """'12 + 30 = 42'."""
    return f"{row['first']} + {row['second']} = {row['answer']}"


def talk(row: Row) -> str:
    """The same number after many words."""
    return (
        f"To find the answer, let us think about it step by step. First there were {row['first']}, and then "
        f"{row['second']} more were bought. So we have to add the two numbers together, which gives {row['answer']}"
    )


def answer_rows(split: str) -> list[Row]:
    """Rows of answers.jsonl."""
    return [{"prompt": r["prompt"], "completion": equation(r), "answer": r["answer"]} for r in rows(split)]


def pair_rows(split: str) -> list[Row]:
    """Rows of pairs.jsonl."""
    columns = {"chosen": equation, "rejected": talk}
    return [
        {"prompt": r["prompt"], **{name: text(r) for name, text in columns.items()}, "answer": r["answer"]}
        for r in rows(split)
    ]


def write(out: Path) -> list[Path]:
    """Write the four files; returns them."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, rows_of in {"answers": answer_rows, "pairs": pair_rows}.items():
        for split in NUM_ROWS:
            path = out / f"{name}{'' if split == 'train' else '.eval'}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(split)), encoding="utf-8")
            written.append(path)
    return written


TASK = Task(
    name="sums",
    summary="stories of one sum, for small chat models (right or wrong)",
    rows=rows,
    prompt=prompt,
    verify=verify,
    gold=gold,
    columns=("prompt", "answer"),
    answer=last_number,
)

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tinyrl.tasks.sums OUT")
    for path in write(Path(sys.argv[1])):
        print(path)
