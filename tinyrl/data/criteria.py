"""Criteria of a judge that are a row's own: lists of {text, weight}, also as those of HealthBench and RaR.

{"prompt": "...", "rubrics": [{"criterion": "Names the dose.", "points": 5}, {"criterion": "...", "points": -2}]}
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tinyrl.data.readers import Row
from tinyrl.text import join_truncated

TEXTS = ("text", "criterion", "description")  # keys: ours, of HealthBench, of Rubrics as Rewards (RaR)
WEIGHTS = ("weight", "points")


@dataclass(frozen=True)
class RowCriterion:
    """A criterion of a row. weight: of meeting it; below 0 where an answer should not."""

    text: str
    weight: float


def criteria_in(row: Row, column: str) -> list[RowCriterion]:
    """Return the criteria of a row. Raises ValueError where it has none that make a reward."""
    value = row.get(column)
    if not isinstance(value, list) or not value:
        there = f"columns: {join_truncated(row)}" if column not in row else f"it is {value!r:.60}"
        raise ValueError(f"column '{column}' must be a list of criteria, {{text, weight}}; {there}")
    found = [_criterion(entry, f"'{column}', entry {number}") for number, entry in enumerate(value, start=1)]
    if not any(one.weight > 0 for one in found):
        raise ValueError(f"'{column}': at least one criterion must have a weight above 0")
    return found


def _criterion(entry: Any, place: str) -> RowCriterion:
    if not isinstance(entry, dict):
        raise ValueError(f"{place} must be an object with a text and a weight, not {entry!r:.60}")
    text = next((entry[key] for key in TEXTS if entry.get(key) is not None), None)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{place}: no text, which is one of {', '.join(TEXTS)}; it has {join_truncated(entry)}")
    weight = next((entry[key] for key in WEIGHTS if entry.get(key) is not None), 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"{place}: {' or '.join(WEIGHTS)} must be a number, not {weight!r:.60}")
    return RowCriterion(text.strip(), float(weight))
