"""Chart curves from series of numbers, in plain Python: gaps stay, long runs are thinned, noisy ones smoothed."""

import math
from dataclasses import dataclass

from tinyrl.runs.records import Points

MOST_POINTS = 500
MOST_MARKS = 100  # points that are drawn one by one
FEWEST_TO_SMOOTH = 20


@dataclass(frozen=True)
class Curve:
    """What is drawn of a line: `raw` as measured, `bold` smoothed (the same as raw where that is not needed)."""

    steps: list[int]
    raw: list[float]
    bold: list[float]

    @property
    def end(self) -> float:
        """The last finite value of the bold curve: what its label shows."""
        return next(value for value in reversed(self.bold) if math.isfinite(value))


def curve_of(points: Points, *, smooth: bool) -> Curve:
    """The curve of a series; smoothed only when asked for and when there are enough points to need it."""
    points = thinned(points)
    steps, values = [step for step, _ in points], [value for _, value in points]
    if not smooth or len(points) < FEWEST_TO_SMOOTH:
        return Curve(steps, values, values)
    return Curve(steps, values, smoothed(values))


def smoothed(values: list[float]) -> list[float]:
    """Each value replaced by a line fitted to its neighbours, a seventh of the points, nearer ones counting more.

    A line and not a mean, so that the ends of a rising curve are not pulled back. It never leaves the range of the
    neighbours. Values that are not finite are ignored and stay gaps.
    """
    half = max(2, len(values) // 15)
    result = []
    for i, value in enumerate(values):
        near = [(j - i, values[j]) for j in range(max(0, i - half), min(len(values), i + half + 1))]
        near = [(offset, other) for offset, other in near if math.isfinite(other)]
        result.append(_fit_at_zero(near, half + 1) if math.isfinite(value) else math.nan)
    return result


def _fit_at_zero(points: list[tuple[int, float]], reach: int) -> float:
    """The weighted least-squares line through (offset, value) at offset 0; weights fall to zero at `reach`."""
    weights = [reach - abs(offset) for offset, _ in points]
    total = sum(weights)
    x = sum(weight * offset for weight, (offset, _) in zip(weights, points, strict=True)) / total
    y = sum(weight * value for weight, (_, value) in zip(weights, points, strict=True)) / total
    spread = sum(weight * (offset - x) ** 2 for weight, (offset, _) in zip(weights, points, strict=True))
    slope = sum(weight * (offset - x) * value for weight, (offset, value) in zip(weights, points, strict=True))
    fitted = y - x * slope / spread if spread else y
    return min(max(fitted, min(value for _, value in points)), max(value for _, value in points))


def thinned(points: Points) -> Points:
    """At most MOST_POINTS points, means of neighbours: a million steps must not make a page of a hundred megabytes."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(len(points) / MOST_POINTS)
    result = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        finite = [value for _, value in bucket if math.isfinite(value)]
        result.append((bucket[-1][0], sum(finite) / len(finite) if finite else math.nan))
    return result


def picked(points: Points) -> Points:
    """At most MOST_MARKS of some measurements, finite where they are too many: the first, the last, and evenly between.

    Each stands for itself, with its interval, so they are left out and not averaged.
    """
    if len(points) <= MOST_MARKS:
        return points
    finite = [point for point in points if math.isfinite(point[1])]
    last = len(finite) - 1
    places = sorted({round(i * last / (MOST_MARKS - 1)) for i in range(MOST_MARKS)}) if last > 0 else [0] * (last + 1)
    return [finite[place] for place in places]
