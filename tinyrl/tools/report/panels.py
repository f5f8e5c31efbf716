"""The charts of one run or of several, as plain data: every panel with at least one finite number, in reading order.

Of several runs a line is a run, named by a letter and by its colour; runs that differ in nothing but their seed are one
line, their mean, with the range of their values.
"""

import json
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from string import ascii_uppercase
from typing import Any, NamedTuple

from tinyrl.runs.metrics import TABLE, Metric, meaning_of
from tinyrl.runs.records import Points, RunRecords, evenly, number
from tinyrl.text import one_line
from tinyrl.tools.report.outcome import held_out_key, outcome, phase_seconds, reward_is_pass, show

COLUMNS = 3
MOST_RUNS = 8  # more colours cannot be told apart
MOST_FUNCTIONS = 5
MOST_POINTS = 500
MOST_MARKS = 100  # points that are drawn one by one
FEWEST_TO_SMOOTH = 20
WIDEST_CAPTION = 48  # letters over a chart of one column
Intervals = dict[int, tuple[float, float]]


# ---- curves: long series are thinned, noisy ones smoothed, gaps stay ----


@dataclass(frozen=True)
class Curve:
    """`raw` as measured, `bold` smoothed (the same object where that is not needed)."""

    steps: list[int]
    raw: list[float]
    bold: list[float]

    @property
    def end(self) -> float:
        """Return the last finite value of the bold curve, which its label shows."""
        return next(value for value in reversed(self.bold) if math.isfinite(value))


def curve_of(points: Points, *, smooth: bool) -> Curve:
    points = thinned(points)
    steps, values = [step for step, _ in points], [value for _, value in points]
    return Curve(steps, values, smoothed(values) if smooth and len(points) >= FEWEST_TO_SMOOTH else values)


def smoothed(values: list[float]) -> list[float]:
    """Replace each value by a weighted least-squares line through its neighbours, a seventh of the points, whose
    weights fall to zero at the end. A line and not a mean, so that the ends of a rising curve are not pulled back. It
    never leaves the range of the neighbours. Values that are not finite are ignored and stay gaps.
    """
    half, result = max(2, len(values) // 15), []
    for i, value in enumerate(values):
        near = [
            (half + 1 - abs(j - i), j - i, values[j]) for j in range(max(0, i - half), min(len(values), i + half + 1))
        ]
        near = [each for each in near if math.isfinite(each[2])]
        if not math.isfinite(value):
            result.append(math.nan)
            continue
        total = sum(weight for weight, *_ in near)
        x = sum(weight * offset for weight, offset, _ in near) / total
        y = sum(weight * other for weight, _, other in near) / total
        spread = sum(weight * (offset - x) ** 2 for weight, offset, _ in near)
        slope = sum(weight * (offset - x) * other for weight, offset, other in near)
        fitted, others = y - x * slope / spread if spread else y, [other for *_, other in near]
        result.append(min(max(fitted, min(others)), max(others)))
    return result


def thinned(points: Points) -> Points:
    """Return at most MOST_POINTS points, means of neighbours: a million steps must not make a page of 100 MB."""
    size, result = math.ceil(len(points) / MOST_POINTS), []
    for start in range(0, len(points), size) if size > 1 else ():
        bucket = points[start : start + size]
        finite = [value for _, value in bucket if math.isfinite(value)]
        result.append((bucket[-1][0], sum(finite) / len(finite) if finite else math.nan))
    return result if size > 1 else points


def picked(points: Points) -> Points:
    """Return at most MOST_MARKS measurements: each stands for itself, so they are left out evenly, not averaged."""
    few = len(points) <= MOST_MARKS
    return points if few else evenly([point for point in points if math.isfinite(point[1])], MOST_MARKS)


# ---- lines, panels, and their places ----


@dataclass(frozen=True)
class Line:
    """One series. `role` names its colour: train, held, greedy, or 1, 2, ... where the series are of equal rank.
    intervals: of held-out points; of every step of a training series, the range of several seeds.
    """

    label: str
    role: str
    points: Points
    intervals: Intervals = field(default_factory=dict)
    measured: bool = False

    @property
    def marked(self) -> bool:
        """Return whether points are drawn one by one: held-out ones are few and have intervals."""
        return self.measured or self.role in ("held", "greedy")

    @cached_property
    def curve(self) -> Curve:
        return curve_of(self.points, smooth=not self.marked)

    @cached_property
    def band(self) -> list[list[float]]:
        """Return the lower and the upper edge of the intervals, at the steps of the curve."""
        gap = (math.nan, math.nan)
        ends = [[(step, self.intervals.get(step, gap)[i]) for step, _ in self.points] for i in (0, 1)]
        return [curve_of(points, smooth=not self.marked).bold for points in ends]


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
        """Return one line on what the chart means and what is healthy; empty for a metric of unknown meaning."""
        return meaning_of(self.key)

    def alt(self) -> str:
        """Describe the chart in words, for people who cannot see it."""
        lines = []
        for line in self.lines:
            values = [(step, value) for step, value in line.points if math.isfinite(value)]
            (first, start), (last, end) = values[0], values[-1]
            since = f"from {show(start, share=self.share)} at step {first} to " if first != last else ""
            lines.append(f"{line.label} {since}{show(end, share=self.share)} at step {last}")
        return f"{self.title}: " + "; ".join(lines) + "."


class Cell(NamedTuple):
    row: int
    column: int
    height: int = 1
    width: int = 1


def cells(count: int) -> list[Cell]:
    """Return the places of `count` panels: the first is 2 x 2, and the last takes what its row has left."""
    if count < 3:
        return [[], [Cell(0, 0, 2, COLUMNS)], [Cell(0, 0, 2, 2), Cell(0, 2, 2)]][count]
    places = [Cell(0, 0, 2, 2), Cell(0, 2), Cell(1, 2)]
    places += [Cell(2 + i // COLUMNS, i % COLUMNS) for i in range(count - 3)]
    places[-1] = places[-1]._replace(width=COLUMNS - places[-1].column)
    return places


# ---- one run ----

CHARTS = [metric for metric in TABLE if metric.title]
_BOTH_SIDES = {"rewards/chosen", "rewards/rejected"}  # in a panel of their own
_REWARD_NAMES = {"reward/mean", "reward/std", "reward/zero_spread_groups", "reward/dropped"}


def panels_of(run: RunRecords) -> list[Panel]:
    """Return the panels of a run; the first is its headline, the last the time by phase."""
    panels = [panel for kind in CHARTS if (panel := _run_panel(run, kind))]
    panels = [panel for panel in panels if not (panel.title == "pass@1" and reward_is_pass(run))]
    panels += _reward_functions(run)
    quarters = [Line(name, str(i), run.points(f"teacher/kl_{i}"))
                for i, name in enumerate(("first", "second", "third", "last"), start=1)]  # fmt: skip
    if quarters := [line for line in quarters if line.points]:
        panels.append(Panel("teacher/quarters", "KL to the teacher by quarter", "nats per token", quarters))
    extra = [panel for kind in other_kinds(run) if (panel := _run_panel(run, kind))]
    for key, title, unit in (  # the difference is what is learnt, and both sides may fall while it grows
        ("rewards/{}", "Rewards of both sides", "training"),
        ("policy/{}_logprobs", "Log-probabilities", "training, nats an answer"),
    ):
        sides = [Line(name, role, run.points(key.format(name))) for name, role in (("chosen", "1"), ("rejected", "2"))]
        extra += [Panel(key.format("sides"), title, unit, sides)] if all(line.points for line in sides) else []
    if run.finite("reward/mean") or run.finite("eval/reward_mean"):
        panels += extra
    else:  # sft, reward, dpo: their loss and accuracy are the headline
        panels = sorted(extra, key=lambda panel: panel.key != "rewards/accuracy") + panels
    # Evaluation is left to the table of totals: as a bar at every 25th step it would dwarf the other phases.
    phases = phase_seconds(run)
    steps = sorted({step for name, phase in phases.items() if name != "evaluation" for step in phase})
    times = [Line(name, "other" if name == "other" else str(i), [(step, phase.get(step, 0.0)) for step in steps])
             for i, (name, phase) in enumerate(phases.items(), start=1) if name != "evaluation"]  # fmt: skip
    unit = "seconds a step" if len(times) == len(phases) else "seconds a step, evaluation aside"
    panels += [Panel("time", "Time by phase", unit, times, from_zero=True, stacked=True)] if times else []
    span = (min(0, *run.steps), max(1, run.last_step))
    return [replace(panel, span=span) for panel in panels]


def other_kinds(run: RunRecords) -> list[Metric]:
    """Return losses and other figures of the methods that learn from examples, under whatever names the run has."""
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


def _run_panel(run: RunRecords, kind: Metric) -> Panel | None:
    train, held = kind.keys
    greedy = held.replace("eval/", "eval/greedy/", 1) if kind.greedy else ""
    lines = [Line("training", "train", run.points(train))]
    for label, role, key in (("held-out", "held", held), ("greedy", "greedy", greedy)):
        points = picked(run.points(key))
        lines.append(Line(label, role, points, intervals_of(run, key, points)))
    return _panel(kind, kind.key, [line for line in lines if line.points], kind.unit)


def _panel(kind: Metric, key: str, lines: list[Line], unit: str) -> Panel | None:
    """Return a panel of a known metric; None where its lines have no finite number, or say nothing."""
    values = [value for line in lines for _, value in line.points if math.isfinite(value)]
    if not values or (kind.skip_zero and not any(values)):
        return None
    share = kind.share and min(values) >= 0 and max(values) <= 1
    unit = unit if share == kind.share else unit.replace("share of ", "")
    unit += f" (cut at {show(kind.floor)})" if min(values) < kind.floor else ""
    return Panel(key, kind.title, unit, lines, share, kind.from_zero, kind.floor, kind.any_scale)


def intervals_of(run: RunRecords, held: str, points: Points) -> Intervals:
    if not held.endswith("reward_mean"):
        return {}
    key = held.removesuffix("reward_mean") + "reward_ci"
    return {step: pair for step, _ in points if (pair := run.interval(key, step))}


def _reward_functions(run: RunRecords) -> list[Panel]:
    """Return each reward function in training and held out, in the same colours; held out beside the verifier."""
    keys = [key for key in run.metric_names() if key not in _REWARD_NAMES]
    train = {key.removeprefix("reward/"): key for key in keys if key.startswith("reward/")}
    held = {key.removeprefix("eval/reward/"): key for key in keys if key.startswith("eval/reward/")}
    names = sorted(train.keys() | held.keys())
    of = f", the first {MOST_FUNCTIONS}" if len(names) > MOST_FUNCTIONS else ""
    roles = [(name, one_line(name, 16), str(i)) for i, name in enumerate(names[:MOST_FUNCTIONS], start=1)]
    lines = [Line(label, role, run.points(train[name])) for name, label, role in roles if name in train]
    measured = [Line(label, role, picked(run.points(held[name])), measured=True)
                for name, label, role in roles if name in held]  # fmt: skip
    if run.points("eval/verifier_mean") != run.points("eval/reward_mean") and measured:
        measured.append(Line("verifier", "other", picked(run.points("eval/verifier_mean")), measured=True))
    measured = [line for line in measured if line.points]
    panels = [Panel("eval/functions", "Held-out reward by function", f"before weights{of}", measured),
              Panel("reward/functions", "Reward by function", f"training, before weights{of}", lines)]  # fmt: skip
    return [panel for panel in panels if len(panel.lines) > 1]


# ---- several runs ----


@dataclass(frozen=True)
class Named:
    """A run of the report, or several seeds of one setting, and the letter and the colour (1, 2, ...) for it."""

    letter: str
    colour: str
    seeds: tuple[RunRecords, ...]

    @cached_property
    def run(self) -> RunRecords:
        """Return the run; of several seeds the first one with the mean of their metrics, at steps that all have."""
        first, *others = self.seeds
        if not others:
            return first
        means: dict[int, dict[str, Any]] = {}
        for step in [step for step in first.steps if all(step in run.steps for run in others)]:
            lines = [run.steps[step] for run in self.seeds]
            each = {key: [number(line.get(key)) for line in lines] for key in lines[0]}
            means[step] = {k: math.fsum(v) / len(v) for k, v in each.items() if not any(map(math.isnan, v))}
        return replace(first, steps=means)

    @property
    def name(self) -> str:
        more = len(self.seeds) - 1
        return self.run.name + (f" and {more} more seed{'s' * (more > 1)}" if more else "")

    @property
    def outcome(self) -> str:
        text, ends = outcome(self.run), self.ends("eval/reward_mean", self.run.last_step)
        if len(self.seeds) == 1 or ends is None:
            return text
        return f"Mean of {len(self.seeds)} seeds: {text} At the end they lie from {show(ends[0])} to {show(ends[1])}."

    def ends(self, key: str, step: int) -> tuple[float, float] | None:
        """Return the lowest and the highest value among the seeds."""
        values = [number(run.steps.get(step, {}).get(key)) for run in self.seeds]
        return (min(values), max(values)) if not any(map(math.isnan, values)) else None

    def line(self, key: str, *, measured: bool) -> Line:
        """Return its line of a metric, with the interval of its mean held-out reward or the range of its seeds."""
        points = picked(self.run.points(key)) if measured else self.run.points(key)
        ranges = {step: ends for step, _ in points if (ends := self.ends(key, step))}
        intervals = intervals_of(self.run, key, points) if len(self.seeds) == 1 else ranges
        return Line(self.letter, self.colour, points, intervals, measured)


def named(runs: list[RunRecords]) -> list[Named]:
    """Give letters by place, one to all seeds of a setting. Raises ValueError for more than there are colours, and for
    a run that is named twice.
    """
    places = [run.path.resolve() for run in runs]
    settings: list[tuple[str, dict[Any, RunRecords]]] = []
    for i, run in enumerate(runs):
        if places[i] in places[:i]:
            raise ValueError(f"{run.path} is named twice; name each run once.")
        section, seed = run.config.get("run"), run.setting("run.seed")
        shared = {**run.config, "run": {**(section if isinstance(section, dict) else {}), "seed": None}}
        text = json.dumps(shared, sort_keys=True, default=str)
        group = next((seeds for other, seeds in settings if other == text and seed not in seeds), None)
        if group is None or seed is None:
            settings.append((text, group := {}))
        group[seed] = run
    if len(settings) > MOST_RUNS:
        raise ValueError(f"{len(settings)} runs are too many for one report: at most {MOST_RUNS} can be told apart.")
    return [Named(ascii_uppercase[i], str(i + 1), tuple(of.values())) for i, (_, of) in enumerate(settings)]


def overlaid(runs: list[Named]) -> list[Panel]:
    """Return a panel for every metric that at least one run has: rewards, held-out first; without any, losses."""
    others = {kind.key: kind for one in runs for kind in other_kinds(one.run)}
    known, extra = _of_kinds(runs, CHARTS), _of_kinds(runs, [*others.values()])
    rewarded = any(panel.key in ("reward/mean", "eval/reward_mean") for panel in known)
    panels = known + extra if rewarded else sorted(extra, key=lambda panel: "accuracy" not in panel.key) + known
    each = [[key for key in one.run.metric_names() if key.startswith("eval/reward/")] for one in runs]
    keys = sorted({key for keys in each for key in keys}) if any(len(keys) > 1 for keys in each) else []
    for key in islice(keys, MOST_FUNCTIONS):
        lines, title = _lines(runs, key, measured=True), one_line(key.removeprefix("eval/reward/"), 24)
        panels += [Panel("eval/functions", title, "held-out reward", lines)] if lines else []
    steps = [step for one in runs for step in one.run.steps]
    return [replace(panel, span=(min(0, *steps), max(1, *steps))) for panel in panels]


def _of_kinds(runs: list[Named], kinds: list[Metric]) -> list[Panel]:
    """Return the training panel of each; before it the held-out one where runs are compared by it, or have only it."""
    found = []
    for kind in kinds:
        train, held = kind.keys
        missing = any(bool(one.run.points(train)) < bool(one.run.points(held)) for one in runs)
        both = held and (kind.greedy or not train or kind not in CHARTS or missing)
        about = kind.unit.removeprefix("held-out, ")
        for key, where in (*(((held, "held-out"),) if both else ()), (train, "training")):
            unit = where + (f", {about}" if about else "")
            panel = _panel(kind, key, _lines(runs, key, measured=where == "held-out"), unit)
            if panel is not None and len(panel.title) + len(panel.unit) > WIDEST_CAPTION:
                panel = replace(panel, unit=panel.unit.partition(",")[0])
            found += [panel] if panel is not None else []
    return found


def _lines(runs: list[Named], key: str, *, measured: bool) -> list[Line]:
    return [line for one in runs if (line := one.line(key, measured=measured)).points]
