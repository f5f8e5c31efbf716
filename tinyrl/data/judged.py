"""Rows that judge answers, as a reward model learns from them: pairs, labels of two kinds, ratings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tinyrl.config.sections import LARGEST
from tinyrl.data.messages import Prompt
from tinyrl.data.readers import Row
from tinyrl.data.shapes import Side, labelled, preference
from tinyrl.text import listed, number

Objective = Literal["pairs", "labels", "ratings"]
Asked = Literal["auto", "pairs", "labels", "ratings"]
OBJECTIVE_OF: dict[str, Objective] = {"chosen": "pairs", "rejected": "pairs", "label": "labels", "score": "ratings"}
MOST_SHOWN = 5  # labels that a sentence lists
WORDS = {"true": 1.0, "false": 0.0}  # as a .csv has them


@dataclass(frozen=True)
class Scored:
    """A prompt (None: the answer is a text alone) and what is said of its answers: of the chosen and the rejected one
    the margin that is asked for, of a single one its label or rating.
    """

    prompt: Prompt | None
    answers: tuple[Side, ...]
    value: float

    @property
    def unusable(self) -> str | None:
        """Why nothing can be learnt from it; None where something can."""
        if any(_is_empty(answer) for answer in self.answers):
            return "an empty answer"
        return "two equal answers" if len(self.answers) > 1 and self.answers[0] == self.answers[1] else None


def objective_of(row: Row, asked: Asked) -> Objective:
    """What rows are taken for: `asked`, or what the columns of the first say. Raises ValueError where they say nothing.

    `chosen` and `rejected` are pairs, `label` one of two labels, `score` a rating.
    """
    if asked != "auto":
        return asked
    for column, objective in OBJECTIVE_OF.items():
        if row.get(column) is not None:
            return objective
    raise ValueError(
        "a reward model learns from pairs (`chosen`, `rejected`), from labels (`label`) or from ratings (`score`); "
        f"this row has {listed(row)}. Rename columns with task.columns.NEW=OLD"
    )


def judged(row: Row, objective: Objective) -> Scored:
    """What a row says of its answers. Raises ValueError, naming the columns, where it does not."""
    if objective == "pairs":
        pair = preference(row)
        return Scored(pair.prompt, (pair.chosen, pair.rejected), _value(pair.margin or 0.0, "margin"))
    row = read_as(row, objective)
    one = labelled(row)
    return Scored(one.prompt, (one.answer,), _value(one.label, "score" if row.get("label") is None else "label"))


def read_as(row: Row, objective: Objective) -> Row:
    """A row without its `label` where it is its `score` that is learnt."""
    rated = objective == "ratings" and row.get("score") is not None
    return {name: value for name, value in row.items() if name != "label"} if rated else row


def two_labels(values: Iterable[float]) -> tuple[float, float]:
    """(the lower, the higher) label of some rows: the higher one is the good one. Raises ValueError unless there are
    two: one score says how good an answer is, not which of several kinds it is.
    """
    there = sorted(set(values))
    if len(there) == 2:
        return there[0], there[1]
    shown = ", ".join(f"{value:g}" for value in there[:MOST_SHOWN]) + (", ..." if len(there) > MOST_SHOWN else "")
    if len(there) < 2:
        raise ValueError(f"every row to train on has the label {shown}: there is nothing to tell apart")
    raise ValueError(
        f"the rows have {len(there)} different labels ({shown}), and a reward model gives one score, which tells two "
        "apart. Where a larger number is a better answer, they are ratings: reward_model.objective=ratings"
    )


def mean_and_deviation(ratings: list[float]) -> tuple[float, float]:
    """Of the ratings to train on. Raises ValueError where all are equal."""
    mean = math.fsum(ratings) / len(ratings)
    deviation = math.sqrt(math.fsum((rating - mean) ** 2 for rating in ratings) / len(ratings))
    if min(ratings) == max(ratings) or not math.isfinite(deviation):
        raise ValueError(f"every row to train on has the rating {number(mean)}: there is nothing to learn")
    return mean, deviation


def _value(label: bool | float | str, column: str) -> float:
    """A label, rating or margin as a number; a .csv has them as text."""
    try:
        known = WORDS.get(label.strip().lower()) if isinstance(label, str) else None
        value = float(label) if known is None else known
    except (ValueError, OverflowError):
        value = math.nan
    if math.isfinite(value) and abs(value) <= LARGEST:
        return value
    hint = " A name does not say which is the better one" if isinstance(label, str) else ""
    what = "true, false or a number" if column == "label" else "a number"
    better = "" if column == "margin" else ", the larger the better"
    raise ValueError(f"'{column}' must be {what} of at most {LARGEST:,}{better}, not {label!r:.60}.{hint}")


def _is_empty(answer: Side) -> bool:
    """Whether there is nothing to read; of messages the last is the answer, which may hold more than text."""
    if isinstance(answer, str):
        return not answer.strip()
    return {*answer[-1]} <= {"role", "content"} and not answer[-1]["content"].strip()
