"""The charts of a run as plain data: every panel with at least one finite number, in reading order."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from tinyrl.runs.metrics import TABLE, Metric, meaning_of
from tinyrl.runs.records import Points, Run, evenly
from tinyrl.text import one_line
from tinyrl.tools.report.outcome import held_out_key, phase_seconds, reward_is_pass, show

COLUMNS = 3
MOST_FUNCTIONS = 5
MOST_POINTS = 500
MOST_MARKS = 100  # points that are drawn one by one
FEWEST_TO_SMOOTH = 20


# ---- curves: long series are thinned, noisy ones smoothed, gaps stay ----


@dataclass(frozen=True)
class Curve:
    """`raw` as measured, `bold` smoothed (the same object where that is not needed)."""

    steps: list[int]
    raw: list[float]
    bold: list[float]

    @property
    def end(self) -> float:
        """The last finite value of the bold curve: what its label shows."""
        return next(value for value in reversed(self.bold) if math.isfinite(value))


def curve_of(points: Points, *, smooth: bool) -> Curve:
    points = thinned(points)
    steps, values = [step for step, _ in points], [value for _, value in points]
    return Curve(steps, values, smoothed(values) if smooth and len(points) >= FEWEST_TO_SMOOTH else values)


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
    weighted = [(reach - abs(offset), offset, value) for offset, value in points]
    total = sum(weight for weight, *_ in weighted)
    x = sum(weight * offset for weight, offset, _ in weighted) / total
    y = sum(weight * value for weight, _, value in weighted) / total
    spread = sum(weight * (offset - x) ** 2 for weight, offset, _ in weighted)
    slope = sum(weight * (offset - x) * value for weight, offset, value in weighted)
    fitted, values = y - x * slope / spread if spread else y, [value for *_, value in weighted]
    return min(max(fitted, min(values)), max(values))


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
    """At most MOST_MARKS measurements: each stands for itself, so they are left out evenly and not averaged."""
    if len(points) <= MOST_MARKS:
        return points
    return evenly([point for point in points if math.isfinite(point[1])], MOST_MARKS)


# ---- lines, panels, and their places ----


@dataclass(frozen=True)
class Line:
    """One series. `role` names its colour: train, held, greedy, or 1, 2, ... where the series are of equal rank.
    intervals: of held-out points; of every step of a training series, the range of several seeds.
    """

    label: str
    role: str
    points: Points
    intervals: dict[int, tuple[float, float]] = field(default_factory=dict)
    measured: bool = False

    @property
    def marked(self) -> bool:
        """Whether points are drawn one by one: held-out ones are few and have intervals."""
        return self.measured or self.role in ("held", "greedy")

    @cached_property
    def curve(self) -> Curve:
        return curve_of(self.points, smooth=not self.marked)

    @cached_property
    def band(self) -> tuple[list[float], list[float]]:
        """The lower and the upper edge of the intervals, at the steps of the curve."""
        gap = (math.nan, math.nan)
        ends = [[(step, self.intervals.get(step, gap)[i]) for step, _ in self.points] for i in (0, 1)]
        low, high = (curve_of(points, smooth=not self.marked).bold for points in ends)
        return low, high


@dataclass(frozen=True)
class Panel:
    """One small chart. `stacked`: the lines are parts of a whole and add up."""

    key: str
    title: str
    unit: str
    lines: list[Line]
    share: bool = False
    from_zero: bool = False
    floor: float = -math.inf
    any_scale: bool = False  # a logarithmic axis is fine where values differ a hundredfold
    stacked: bool = False
    span: tuple[int, int] = (0, 1)  # first and last step, the same in every panel

    @property
    def meaning(self) -> str:
        """One line: what the chart means and what is healthy; empty for a metric of unknown meaning."""
        return meaning_of(self.key)

    def alt(self) -> str:
        """What the chart shows, in words, for people who cannot see it."""
        said = []
        for line in self.lines:
            values = [(step, value) for step, value in line.points if math.isfinite(value)]
            (first, start), (last, end) = values[0], values[-1]
            since = f"from {show(start, share=self.share)} at step {first} to " if first != last else ""
            said.append(f"{line.label} {since}{show(end, share=self.share)} at step {last}")
        return f"{self.title}: " + "; ".join(said) + "."


class Cell(NamedTuple):
    row: int
    column: int
    height: int = 1
    width: int = 1


def cells(count: int) -> list[Cell]:
    """The places of `count` panels: the first is 2 x 2, and the last takes what its row has left."""
    if count < 3:
        return [[], [Cell(0, 0, 2, COLUMNS)], [Cell(0, 0, 2, 2), Cell(0, 2, 2)]][count]
    places = [Cell(0, 0, 2, 2), Cell(0, 2), Cell(1, 2)]
    places += [Cell(2 + i // COLUMNS, i % COLUMNS) for i in range(count - 3)]
    places[-1] = places[-1]._replace(width=COLUMNS - places[-1].column)
    return places


# ---- which metrics have a panel ----

CHARTS = [metric for metric in TABLE if metric.title]
_BOTH_SIDES = {"rewards/chosen", "rewards/rejected"}  # in a panel of their own
_REWARD_NAMES = {"reward/mean", "reward/std", "reward/zero_spread_groups", "reward/dropped"}


def panels_of(run: Run) -> list[Panel]:
    """The panels of a run; the first is its headline, the last the time by phase."""
    panels = [panel for kind in CHARTS if (panel := _panel(run, kind))]
    panels = [panel for panel in panels if not (panel.title == "pass@1" and reward_is_pass(run))]
    panels += _reward_functions(run) + _quarters(run)
    extra = [panel for kind in other_kinds(run) if (panel := _panel(run, kind))] + _sides(run)
    if run.finite("reward/mean") or run.finite("eval/reward_mean"):
        panels += extra
    else:  # sft, reward, dpo: their loss and accuracy are the headline
        panels = sorted(extra, key=lambda panel: panel.key != "rewards/accuracy") + panels
    span = (min(0, *run.steps), max(1, run.last_step))
    return [replace(panel, span=span) for panel in panels + _time(run)]


def other_kinds(run: Run) -> list[Metric]:
    """Losses and other figures of the methods that learn from examples, under whatever names the run has them."""
    known = {name for kind in CHARTS for name in kind.keys} | _BOTH_SIDES
    found = []
    for key in run.metric_names():
        group, _, name = key.partition("/")
        if key in known or not key.startswith(("loss", "rewards/", "preference/")):
            continue
        title = one_line(name or key, 24).replace("_", " ").capitalize()
        title = title if group in ("rewards", "preference") or not name else f"Loss: {title.lower()}"
        is_loss, share = group == "loss" or key == "preference/loss", key == "rewards/accuracy"
        better = "higher is better" if share else "lower is better" if is_loss else ""
        found.append(Metric(key, title=title, unit=better, held=held_out_key(run, key), share=share, any_scale=is_loss))
    return found


def _sides(run: Run) -> list[Panel]:
    """Both sides of the pairs in one panel: the difference is what is learnt, and both may fall while it grows."""
    panels = []
    for key, title, unit in (
        ("rewards/{}", "Rewards of both sides", "training"),
        ("policy/{}_logprobs", "Log-probabilities", "training, nats an answer"),
    ):
        points = {side: run.points(key.format(side)) for side in ("chosen", "rejected")}
        if all(points.values()):
            lines = [Line(side, role, points[side]) for side, role in zip(points, "12", strict=True)]
            panels.append(Panel(key.format("sides"), title, unit, lines))
    return panels


def _quarters(run: Run) -> list[Panel]:
    """The distance to a teacher by where a token stands in its response."""
    names = ("first", "second", "third", "last")
    lines = [Line(name, str(i), run.points(f"teacher/kl_{i}")) for i, name in enumerate(names, start=1)]
    lines = [line for line in lines if line.points]
    return [Panel("teacher/quarters", "KL to the teacher by quarter", "nats per token", lines)] if lines else []


def _panel(run: Run, kind: Metric) -> Panel | None:
    train, held = kind.keys
    greedy = held.replace("eval/", "eval/greedy/", 1) if kind.greedy else ""
    lines = [Line("training", "train", run.points(train))]
    for label, role, key in (("held-out", "held", held), ("greedy", "greedy", greedy)):
        points = picked(run.points(key))
        lines.append(Line(label, role, points, intervals_of(run, key, points)))
    return panel_of(kind, kind.key, [line for line in lines if line.points], kind.unit)


def panel_of(kind: Metric, key: str, lines: list[Line], unit: str) -> Panel | None:
    """A panel of a known metric; None where its lines have no finite number, or say nothing."""
    values = [value for line in lines for _, value in line.points if math.isfinite(value)]
    if not values or (kind.skip_zero and not any(values)):
        return None
    share = kind.share and min(values) >= 0 and max(values) <= 1
    unit = unit if share == kind.share else unit.replace("share of ", "")
    if min(values) < kind.floor:
        unit += f" (cut at {show(kind.floor)})"
    return Panel(key, kind.title, unit, lines, share, kind.from_zero, kind.floor, kind.any_scale)


def intervals_of(run: Run, held: str, points: Points) -> dict[int, tuple[float, float]]:
    if not held.endswith("reward_mean"):
        return {}
    key = held.removesuffix("reward_mean") + "reward_ci"
    return {step: pair for step, _ in points if (pair := run.interval(key, step))}


def _reward_functions(run: Run) -> list[Panel]:
    """Each reward function in training and held out, in the same colours; held out beside the task's verifier."""
    keys = [key for key in run.metric_names() if key not in _REWARD_NAMES]
    train = {key.removeprefix("reward/"): key for key in keys if key.startswith("reward/")}
    held = {key.removeprefix("eval/reward/"): key for key in keys if key.startswith("eval/reward/")}
    names = sorted(train.keys() | held.keys())
    of = f", the first {MOST_FUNCTIONS}" if len(names) > MOST_FUNCTIONS else ""
    lines, measured = list[Line](), list[Line]()
    for i, name in enumerate(islice(names, MOST_FUNCTIONS), start=1):
        if name in train:
            lines.append(Line(one_line(name, 16), str(i), run.points(train[name])))
        if name in held:
            measured.append(Line(one_line(name, 16), str(i), picked(run.points(held[name])), measured=True))
    if run.points("eval/verifier_mean") != run.points("eval/reward_mean") and measured:
        measured.append(Line("verifier", "other", picked(run.points("eval/verifier_mean")), measured=True))
    measured = [line for line in measured if line.points]
    panels = [Panel("eval/functions", "Held-out reward by function", f"before weights{of}", measured)]
    panels.append(Panel("reward/functions", "Reward by function", f"training, before weights{of}", lines))
    return [panel for panel in panels if len(panel.lines) > 1]


def _time(run: Run) -> list[Panel]:
    """Evaluation is left to the table of totals: as a bar at every 25th step it would dwarf the other phases."""
    phases = phase_seconds(run)
    steps = sorted({step for name, phase in phases.items() if name != "evaluation" for step in phase})
    lines = [
        Line(name, "other" if name == "other" else str(i), [(step, phase.get(step, 0.0)) for step in steps])
        for i, (name, phase) in enumerate(phases.items(), start=1)
        if name != "evaluation"
    ]
    unit = "seconds a step" if len(lines) == len(phases) else "seconds a step, evaluation aside"
    return [Panel("time", "Time by phase", unit, lines, from_zero=True, stacked=True)] if lines else []
