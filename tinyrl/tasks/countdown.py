"""Countdown: reach a target from three or four numbers, each used exactly once, with + - * / and parentheses.

Rows are generated: row i is a function of i alone, and a hash of the puzzle decides its split, so train and eval never
share one. A well-formed wrong answer scores 0 like any other: partial credit for form is the first thing a policy
learns to collect instead of solving.

Own data: `task.data=Jiayi-Pan/Countdown-Tasks-3to4 task.columns.numbers=nums`.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

from tinyrl.data.readers import Row
from tinyrl.tasks import Task
from tinyrl.tasks.grading import by_row, folded, safe_arithmetic, tagged

SIZES = {"train": 8192, "eval": 512}
LARGEST_NUMBER = 50
TARGETS = range(10, 101)
EVAL_SHARE = 8  # one puzzle in this many belongs to eval


@lru_cache(maxsize=1)
def _generated() -> dict[str, list[Row]]:
    splits: dict[str, list[Row]] = {"train": [], "eval": []}
    seen: set[str] = set()
    i = 0
    while any(len(splits[name]) < size for name, size in SIZES.items()):
        row = _puzzle(i)
        i = i + 1
        if row is None:
            continue
        key = f"{sorted(row['numbers'])} {row['target']}"
        split = "eval" if _hash(f"countdown split {key}") % EVAL_SHARE == 0 else "train"
        if key not in seen and len(splits[split]) < SIZES[split]:
            seen.add(key)
            splits[split].append(row)
    return splits


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest())


def _puzzle(i: int) -> Row | None:
    """Join numbers from left to right by random operations; None if that leaves the whole numbers or TARGETS."""
    digits = _hash(f"countdown {i}")

    def pick(count: int) -> int:
        nonlocal digits
        digits, chosen = divmod(digits, count)
        return chosen

    numbers = [1 + pick(LARGEST_NUMBER) for _ in range(3 + pick(2))]
    value = numbers[0]
    text = str(numbers[0])
    for number in numbers[1:]:
        sign = "+-*/"[pick(4)]
        # the side of the next number: "(3 + 4) - 50" and "50 - (3 + 4)" are both reached
        left, right = value, number
        left_text, right_text = text, str(number)
        if not pick(2):
            left, right = right, left
            left_text, right_text = right_text, left_text
        if sign == "/" and left % right:
            return None
        value = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[sign]
        text = f"({left_text} {sign} {right_text})"
        if value < 1:
            return None
    if value not in TARGETS:
        return None
    shown = sorted(numbers, key=lambda number: _hash(f"countdown {i} {number}"))
    return {"numbers": shown, "target": value, "solution": text[1:-1]}


def prompt(row: Row) -> str:
    numbers = row["numbers"]
    target = row["target"]
    if not isinstance(numbers, list) or not numbers or not all(type(n) is int for n in numbers):
        raise ValueError(f"'numbers' must be a list of whole numbers such as [3, 7, 25], not {numbers!r:.60}")
    if type(target) is not int:
        raise ValueError(f"'target' must be a whole number, not {target!r:.60}")
    return (
        f"Using the numbers {', '.join(map(str, numbers))}, each exactly once, write an expression that equals "
        f"{target}. You may use + - * / and parentheses. Reason first, then give the expression alone in "
        "<answer></answer>."
    )


def _expression(text: str) -> str:
    """Return a completion's expression: in <answer>, else its last line; of "(3 + 4) * 5 = 35" the left side."""
    text = folded(text)
    inside = tagged(text, "answer")
    return (text.strip().rpartition("\n")[2] if inside is None else inside).strip().strip("`").partition("=")[0].strip()


def score(text: str, row: Row) -> float:
    """Return 1.0 if the expression equals the target and uses each number exactly once, else 0.0."""
    expression = _expression(text)
    try:
        right = safe_arithmetic(expression) == row["target"]
        return float(right and sorted(map(int, re.findall("[0-9]+", expression))) == sorted(row["numbers"]))
    except ValueError:
        return 0.0  # not an expression: an ordinary wrong answer


TASK = Task(
    name="countdown",
    summary="reach a target number from three or four numbers, each used once (generated)",
    rows=lambda split: _generated()[split],
    prompt=prompt,
    verify=by_row(score),
    right_or_wrong=True,
    gold=lambda row: f"<answer>{row['solution']}</answer>" if row.get("solution") else None,
    columns=("numbers", "target"),
    answer=lambda text, row: "".join(_expression(text).split()) or None,
)
