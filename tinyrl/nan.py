"""Numbers of which some do not apply, and are NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence


def numbers(values: Sequence[float]) -> list[float]:
    """Return the values that are not NaN."""
    return [value for value in values if not math.isnan(value)]


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN of none."""
    valid = numbers(values)
    return float(sum(valid) / len(valid)) if valid else math.nan
