"""Results of a call, one value per row, and the checks of what a user function returned.

Imported in the worker and in the run: only the standard library.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_SHOWN_CHARS = 100  # of a value that is not a score
MAX_COMMENT_CHARS = 4000  # of the text that comes with a score
MAX_SCORE = 1e12  # scores become float32; there, the squares of a batch of larger ones would be infinite


@dataclass(frozen=True)
class RowFailure:
    """A row that failed, and why."""

    row: int
    reason: str


@dataclass
class RowResults:
    """Results of a call, one value per row.

    values      one per row: a score, a reply, a text. None (of a score in the run: NaN) if there is none or it failed
    failures    rows that failed, with the reason
    comments    a text for each score; empty if the function gave none
    slowest     (seconds, row) of the slowest row, if rows were timed
    parts       scores that the values are made of, by name, one per row: a judge's criteria
    """

    values: list[Any]
    failures: list[RowFailure] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    slowest: tuple[float, int] | None = None
    parts: dict[str, list[float]] = field(default_factory=dict)


def all_failed(num_rows: int, reason: str) -> RowResults:
    """Return the results of a call whose rows failed all for one reason."""
    return RowResults([None] * num_rows, [RowFailure(row, reason) for row in range(num_rows)])


def check_values(returned: Any, num_rows: int, *, check: Callable[[Any], tuple[Any, str]]) -> RowResults:
    """Check what a function returned. `check` of a value returns it in JSON's types and what is wrong with it, or "".

    A list of the wrong length fails every row, as values cannot be matched to rows.
    """
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    is_list = isinstance(values, list | tuple)
    if not is_list or len(values) != num_rows:
        what = f"a list of {len(values)}" if is_list else _describe(values)
        return all_failed(num_rows, f"returned {what}, not a list of {num_rows}")
    results = RowResults([])
    for row, value in enumerate(values):
        checked, problem = check(value)
        results.values.append(checked)
        if problem:
            results.failures.append(RowFailure(row, problem))
    return results


def check_scores(returned: Any, num_rows: int) -> RowResults:
    """Check the scores that a reward function returned: numbers, None, or (score, comment)."""
    results = check_values(returned, num_rows, check=_commented_score)
    pairs = [(None, "") if pair is None else pair for pair in results.values]
    results.values = [score for score, _ in pairs]
    comments = [comment for _, comment in pairs]
    results.comments = comments if any(comments) else []
    return results


def _commented_score(value: Any) -> tuple[tuple[float | None, str], str]:
    """Return (score, comment) of a score, and what is wrong with it."""
    commented = isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], str)
    score, problem = as_score(value[0] if commented else value)
    comment = value[1][:MAX_COMMENT_CHARS] if commented and not problem else ""
    return (score, comment), problem and f"returned {problem}"


def as_score(value: Any) -> tuple[float | None, str]:
    """Return (score, problem): the score as a float, or None and what is wrong with the value.

    None is a valid score: the reward does not apply. A list of one number is that number, True and False are 1 and 0,
    and NumPy and torch values are the numbers they hold.
    """
    number: Any = value.tolist() if hasattr(value, "tolist") else value
    number = number[0] if isinstance(number, list) and len(number) == 1 else number
    if number is None:
        return None, ""
    if not hasattr(type(number), "__float__"):  # text has none
        return None, f"{_describe(number)}, not a number"
    number = float(number)
    if not math.isfinite(number):
        return None, f"{number}".replace("nan", "NaN")
    return (number, "") if abs(number) <= MAX_SCORE else (None, f"a number beyond {MAX_SCORE:g}")


def is_score(value: Any) -> bool:
    """Return whether a value of a worker's reply is a score, or None."""
    return value is None or (isinstance(value, float) and abs(value) <= MAX_SCORE)


def is_text(value: Any) -> bool:
    """Return whether a value of a worker's reply is text, or None."""
    return value is None or isinstance(value, str)


def message_of(error: BaseException) -> str:
    """Return an exception's message; none of one that cannot be turned into text."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 user code may raise anything, in __str__ too
        return ""


def _describe(value: Any) -> str:
    kind = type(value).__name__
    shown = isinstance(value, str | list | tuple | dict)
    return f"a {kind} ({reprlib.repr(value)})"[:MAX_SHOWN_CHARS] if shown else kind
