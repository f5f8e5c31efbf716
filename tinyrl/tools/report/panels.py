"""The charts of one run or of several, as plain data: every panel with at least one finite number, in reading order.

In a report of several runs a line is a run, named by a letter and by its colour; runs that differ in nothing but their
seed are one line, their mean, with the range of their values.
"""

import json
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from string import ascii_uppercase
from typing import Any, NamedTuple

from tinyrl.formatting import format_seconds, typeset_number
from tinyrl.runs.best import early_end
from tinyrl.runs.metrics import REWARD_STATISTICS, TABLE, Metric, metric_of
from tinyrl.runs.records import SEED, Points, RunRecords, origin_of, reward_change_note, subsample, to_float
from tinyrl.runs.tracking import flat
from tinyrl.text import one_line

COLUMNS = 3
MOST_RUNS = 8  # more colours cannot be told apart
MOST_FUNCTIONS = 5
MOST_CRITERIA = 8  # more colours cannot be told apart
MOST_POINTS = 300
MOST_MARKS = 100
MOST_BARS = 100  # of a curve, of points drawn one by one, of the time by phase
INTERVAL_REACH = 0.5  # how far intervals may stretch an axis beyond the values, in heights of the values
FEWEST_TO_SMOOTH = 20
TIME = metric_of("time")  # drawn last, in layers
CHARTS = [metric for metric in TABLE if metric.title and not metric.series and metric != TIME]


# ---- lines ----


@dataclass(frozen=True)
class Line:
    """One series. `role` names its colour: train, held, greedy, or 1, 2, ... where the series are of equal rank.
    measured: points are drawn one by one, with intervals as bars; else intervals are a band around the curve.
    """

    label: str
    role: str
    points: Points
    intervals: dict[int, tuple[float, float]] = field(default_factory=dict)
    measured: bool = False

    @cached_property
    def curve(self) -> list[float]:
        values = [value for _, value in self.points]
        return values if self.measured else smoothed(values)

    @property
    def end(self) -> float:
        """Return the last finite value of the curve, which its label shows."""
        return next(value for value in reversed(self.curve) if math.isfinite(value))


def line_of(run: RunRecords, key: str, label: str, role: str, *, measured: bool = False) -> Line:
    """Return the line of a metric, with the interval of a mean held-out reward, or the range over seeds."""
    points = picked(run.points(key), MOST_MARKS if measured else MOST_POINTS)
    names = (key.replace("reward_mean", "reward_ci"), f"{key} range")
    intervals = {step: pair for step, _ in points for name in names if (pair := run.interval(name, step))}
    return Line(label, role, points, intervals, measured)


def picked(points: Points, most: int) -> Points:
    """Return at most so many points, evenly: a million steps must not make a page of 100 MB."""
    return points if len(points) <= most else subsample([point for point in points if math.isfinite(point[1])], most)


def smoothed(values: list[float]) -> list[float]:
    """Replace each value by the mean of its neighbours, a seventh of the points, with weights that fall to zero at the
    end. The curve is mirrored at its ends, so that a line stays one. Values that are not finite stay gaps.
    """
    if len(values) < FEWEST_TO_SMOOTH:
        return values
    import numpy as np

    half = max(2, len(values) // 15)
    weights = half + 1.0 - abs(np.arange(-half, half + 1))
    longer = np.pad(values, half, "reflect", reflect_type="odd")
    known = np.isfinite(longer)
    low = np.nanmin(values)
    high = np.nanmax(values)
    sums = np.convolve(np.where(known, longer, 0.0), weights, "valid")
    means = (sums / np.convolve(known, weights, "valid").clip(1)).clip(low, high)
    return np.where(known[half:-half], means, math.nan).tolist()


# ---- panels ----


@dataclass(frozen=True)
class Panel:
    """One small chart. `stacked`: the lines are parts of a whole and add up."""

    metric: Metric
    lines: list[Line]
    stacked: bool = False

    @cached_property
    def value_range(self) -> tuple[float, float]:
        """Return the lowest and the highest value that is drawn."""
        values = [max(value, self.metric.floor) for line in self.lines for _, value in line.points
                  if math.isfinite(value)]  # fmt: skip
        return min(values), max(values)

    @cached_property
    def interval_range(self) -> tuple[float, float]:
        """Return the lowest and the highest edge of an interval; those of the values where there is none."""
        edges = [edge for line in self.lines for pair in line.intervals.values() for edge in pair]
        low, high = self.value_range
        return min([low, *edges]), max([high, *edges])

    @cached_property
    def shown_range(self) -> tuple[float, float]:
        """Return what the axis has to hold: all values, and as much of their intervals as leaves room for the values.

        The interval of four equal rewards of 1 begins at 0.51: shown whole, it would flatten every curve beside it.
        Where no line has more than a point there is no curve to flatten.
        """
        low, high = self.value_range
        bottom, top = self.interval_range
        if all(len(line.points) == 1 for line in self.lines):
            return bottom, top
        reach = INTERVAL_REACH * ((high - low) or self.least_height)
        return max(bottom, low - reach), min(top, high + reach)

    @property
    def cuts_intervals(self) -> bool:
        return self.shown_range != self.interval_range

    @property
    def least_height(self) -> float:
        """Return the height that an axis has beside values that are all equal."""
        return abs(self.value_range[1]) * 0.1 or (0.01 if self.metric.share else 1.0)


def panel_of(metric: Metric, lines: list[Line], *, least: int = 1) -> list[Panel]:
    """Return the panel of a metric, or none where fewer lines have a finite number, or all are zero and say nothing."""
    lines = [line for line in lines if line.points]
    values = [value for line in lines for _, value in line.points if math.isfinite(value)]
    if len(lines) < least or (metric.skip_zero and not any(values)):
        return []
    panel = Panel(metric, lines)
    cut = list[str]()
    if min(values) < metric.floor:
        cut.append(f"cut at {typeset_number(metric.floor)}")
    if panel.cuts_intervals:
        cut.append("intervals cut")
    note = f" ({', '.join(cut)})" if cut else ""
    return [replace(panel, metric=replace(metric, unit=metric.unit + note))]


def bar_spans(steps: list[int]) -> list[tuple[float, float]]:
    """Return where the bar of each step begins and ends: half-way to its neighbours, less a gap, the same everywhere.

    The first and the last bar reach as far to their open side as to the other. One to four bars are narrower, so that
    a single step is a bar and not a wall.
    """
    between = [(left + right) / 2 for left, right in pairwise(steps)]
    start = 2 * steps[0] - between[0] if between else steps[0] - 0.5
    end = 2 * steps[-1] - between[-1] if between else steps[0] + 0.5
    edges = [start, *between, end]
    narrowest = min(right - left for left, right in pairwise(edges))
    gap = narrowest * (1 - min(0.82, 0.2 * len(steps)))
    return [(left + gap / 2, right - gap / 2) for left, right in pairwise(edges)]


def cells(count: int) -> list[tuple[int, int, int, int]]:
    """Return row, column, height and width of each panel: the first is 2 x 2, the last takes what its row has left."""
    places = [(0, 0, 2, 2), (0, 2, 1, 1), (1, 2, 1, 1)]
    places = [*places, *((2 + i // COLUMNS, i % COLUMNS, 1, 1) for i in range(count - 3))][:count]
    if count == 2:
        return [places[0], (0, 2, 2, 1)]
    return [*places[:-1], *((row, column, rows, COLUMNS - column) for row, column, rows, _ in places[-1:])]


def metrics_of(runs: list[RunRecords]) -> list[Metric]:
    """Return the metrics with a chart, the headline first: the reward or, without one, what is learnt from examples."""
    examples = [metric for metric in CHARTS if metric.examples and any(run.points(metric.key) for run in runs)]
    others = [metric for metric in CHARTS if not metric.examples]
    rewarded = any(run.finite("reward/mean") or run.finite("eval/reward_mean") for run in runs)
    return [*others, *examples] if rewarded else [*examples, *others]


def functions_of(run: RunRecords) -> list[str]:
    """Return the names of the first reward functions of a run."""
    return [name for name in reward_names(run) if "/" not in name][:MOST_FUNCTIONS]


def criteria_of(run: RunRecords) -> list[str]:
    """Return the names of the first criteria of a run's judges: judge/NAME."""
    return [name for name in reward_names(run) if "/" in name][:MOST_CRITERIA]


def reward_names(run: RunRecords) -> list[str]:
    """Return the names of a run's rewards, and of what they are made of."""
    keys = [key.removeprefix("eval/") for key in run.metric_names() if key not in REWARD_STATISTICS]
    return sorted({key.removeprefix("reward/") for key in keys if key.startswith("reward/")})


def series_of(metric: Metric, run: RunRecords) -> list[Line]:
    """Return the lines of a chart of several keys, numbered by colour."""
    keys: dict[str, str] = {}
    for name, key in metric.series.items():
        match name:
            case "*":
                keys |= {function: key.replace("*", function) for function in functions_of(run)}
            case "*/*":
                criteria = criteria_of(run)
                of_one = len({criterion.partition("/")[0] for criterion in criteria}) == 1
                labels = [criterion.partition("/")[2] if of_one else criterion for criterion in criteria]
                keys |= {label: key.replace("*", one) for label, one in zip(labels, criteria, strict=True)}
            case _:
                keys[name] = key
    if run.points("eval/verifier_mean") == run.points("eval/reward_mean"):
        keys.pop("verifier", None)
    lines = []
    for number, (name, key) in enumerate(keys.items(), start=1):
        role = "other" if name == "verifier" else str(number)
        lines.append(line_of(run, key, one_line(name, 16), role, measured=key.startswith("eval/")))
    return lines


# ---- one run ----


def panels_of(run: RunRecords) -> list[Panel]:
    """Return the panels of a run; the first is its headline, the last the time by phase."""
    panels = list[Panel]()
    for metric in metrics_of([run]):
        if metric.title == "pass@1" and reward_is_pass(run):
            continue
        train, held = metric.keys
        greedy = held.replace("eval/", "eval/greedy/", 1) if metric.greedy else ""
        lines = [line_of(run, train, "training", "train"), line_of(run, held, "held-out", "held", measured=True)]
        panels += panel_of(metric, [*lines, line_of(run, greedy, "greedy", "greedy", measured=True)])
    for metric in TABLE:
        if metric.series:
            panels += panel_of(metric, series_of(metric, run), least=2)
    # Evaluation is left to the table of totals: as a bar at every 25th step it would dwarf the other phases.
    phases = phase_seconds(run)
    steps = sorted({step for name, phase in phases.items() if name != "evaluation" for step in phase})
    times = [
        Line(name, str(i), picked([(step, phase.get(step, 0.0)) for step in steps], MOST_BARS))
        for i, (name, phase) in enumerate(phases.items(), start=1)
        if name != "evaluation"
    ]
    if times:
        panels.append(Panel(TIME, times, stacked=True))
    return panels


# ---- several runs ----


class RunGroup(NamedTuple):
    """A run of the report, or several seeds of one setting (`run` is their mean), with a letter and a colour."""

    letter: str
    colour: str
    name: str
    run: RunRecords
    seeds: list[RunRecords]


def group_runs(runs: list[RunRecords]) -> list[RunGroup]:
    """Group seeds of one setting and give letters by place. Raises ValueError for more than there are colours."""
    settings: dict[str, list[RunRecords]] = {}
    for run in runs:
        settings.setdefault(json.dumps({**flat(run.config), "run.seed": None}, sort_keys=True), []).append(run)
    if len(settings) > MOST_RUNS:
        raise ValueError(f"{len(settings)} runs are too many for one report: at most {MOST_RUNS} can be told apart.")
    groups = []
    for letter, (first, *others) in zip(ascii_uppercase, settings.values(), strict=False):
        seeds = [first, *others]
        groups.append(RunGroup(letter, str(len(groups) + 1), _name_of(seeds), _mean_run(seeds), seeds))
    return groups


def _name_of(seeds: list[RunRecords]) -> str:
    """Return how a group is called: by its first run or, of a command with --seeds, by the folder of all."""
    first, *others = seeds
    if not others:
        return first.name
    folders = {run.path.resolve().parent for run in seeds}
    if len(folders) == 1 and all(SEED.fullmatch(run.path.resolve().name) for run in seeds):
        return one_line(f"{folders.pop().name}, {len(seeds)} seeds", 80)
    return f"{first.name} and {len(others)} more {'seed' if len(others) == 1 else 'seeds'}"


def _mean_run(seeds: list[RunRecords]) -> RunRecords:
    """Return the first run with the mean and the range of all metrics, at the steps that all have, and the t interval
    over seeds of held-out ones.
    """
    if len(seeds) == 1:
        return seeds[0]
    from tinyrl.evaluation.statistics import t_interval  # with scipy

    steps = {step: dict[str, Any]() for step in seeds[0].steps if all(step in run.steps for run in seeds)}
    for step, line in steps.items():
        for key in seeds[0].steps[step]:
            values = [to_float(run.steps[step].get(key)) for run in seeds]
            if all(map(math.isfinite, values)):
                line |= {key: math.fsum(values) / len(values), f"{key} range": [min(values), max(values)]}
                if key.startswith("eval/"):
                    line[f"{key} t"] = t_interval(values)
    return replace(seeds[0], steps=steps)


SEED_INTERVAL = "95 % t interval"  # over seeds: mean -+ t s / sqrt(n), Student's t with n - 1 degrees of freedom


@dataclass(frozen=True)
class SeedTable:
    """The key figures of the seeds of one setting at the last step of each, their mean and its interval."""

    name: str
    columns: list[str]
    rows: dict[str, list[str]]


def seed_table(group: RunGroup) -> SeedTable | None:
    """Return the table of a group of several seeds; None of a single run."""
    if len(group.seeds) < 2:
        return None
    from tinyrl.evaluation.statistics import all_equal, t_interval  # with scipy

    rows: dict[str, list[str]] = {"Steps": [*(f"{run.last_step:,}" for run in group.seeds), "", ""]}
    for key, (label, metric) in key_figures(group.seeds).items():
        values = [points[-1][1] for run in group.seeds if (points := run.finite(key))]
        is_repeated = key == "eval/pass@1" and all(map(reward_is_pass, group.seeds))
        if len(values) < len(group.seeds) or is_repeated:
            continue
        low, high = t_interval(values)
        interval = f"{typeset_number(low, share=metric.share)} to {typeset_number(high, share=metric.share)}"
        cells = [typeset_number(value, share=metric.share) for value in [*values, fmean(values)]]
        rows[label] = [*cells, "equal" if all_equal(values) else interval]
    columns = [*(f"seed {run.setting('run.seed')}" for run in group.seeds), "mean", SEED_INTERVAL]
    return SeedTable(name=group.name, columns=columns, rows=rows)


def overlaid(groups: list[RunGroup]) -> list[Panel]:
    """Return a panel for every metric that at least one run has: in training or held out, whichever more runs have;
    both of rewards and of examples.
    """
    runs = [group.run for group in groups]
    panels = list[Panel]()
    each = [{key for key in run.metric_names() if key.startswith("eval/reward/")} for run in runs]
    names = sorted(set[str]().union(*(keys for keys in each if len(keys) > 1)))[:MOST_FUNCTIONS]
    functions = [Metric(key, title=one_line(key.removeprefix("eval/reward/"), 24)) for key in names]
    for metric in metrics_of(runs) + functions:
        places = {"training": metric.keys[0], "held-out": metric.keys[1]}
        most = max(places, key=lambda where: sum(bool(run.points(places[where])) for run in runs))
        for where in ("held-out", "training") if metric.greedy or metric.examples else (most,):
            unit = f"{where}, {metric.unit.removeprefix('held-out, ')}".removesuffix(", ")
            lines = [line_of(one.run, places[where], one.letter, one.colour, measured=where == "held-out")
                     for one in groups]  # fmt: skip
            panels += panel_of(replace(metric, key=places[where], unit=unit), lines)
    return panels


# ---- the outcome ----

MOST_PHASES = 8  # more colours cannot be told apart


def subtitle(run: RunRecords) -> str:
    named = {
        "": run.setting("method"),
        "task ": run.setting("task.name"),
        "model ": run.setting("model.path"),
        "forked from ": run.env.get("forked_from"),
    }
    parts = [word + one_line(str(value), 60) for word, value in named.items() if value]
    patience = run.setting("run.patience")
    early = early_end(run.steps, patience=patience if isinstance(patience, int) else None)
    ended = f", ended early by run.patience={patience}" if early else ""
    return " · ".join([*parts, f"{run.last_step:,} of {run.setting('run.num_steps') or '?'} steps{ended}"])


def outcome(run: RunRecords) -> str:
    """Return one sentence: the score before and after, held out with its interval and the KL paid for it. Before it
    stands another one where the reward changed on the way, so that the two scores do not compare.
    """
    return f"{reward_change_note(run.env)} {_first_to_last_score(run)}".lstrip()


def _first_to_last_score(run: RunRecords) -> str:
    for metric in TABLE:
        held = run.since_start(metric.held)
        points = held or run.since_start(metric.key)
        if not metric.score or not points:
            continue
        name = f"{'Held-out' if held else 'Training'} {metric.score}"
        first, start = points[0]
        last, end = points[-1]
        if len(points) == 1:
            return f"{name} is {typeset_number(end)} at step {last} ({metric.unit}); it was measured once so far."
        around = ""
        caution = "; no held-out comparison"
        paid = ""
        overlap = False
        if held:
            interval = f"{metric.held.removesuffix('_mean')}_ci"
            before = run.interval(interval, first)
            after = run.interval(interval, last)
            over_seeds = f"{SEED_INTERVAL} over seeds"
            kinds = {interval: "95 % interval", f"{metric.held} t": over_seeds, f"{metric.held} range": "seeds from"}
            found = [(kind, pair) for key, kind in kinds.items() if (pair := run.interval(key, last)) is not None]
            if found:
                kind, pair = found[0]
                around = f"{kind} {typeset_number(pair[0])} to {typeset_number(pair[1])}; "
            overlap = bool(before and after and before[0] <= after[1] and after[0] <= before[1])
            caution = ", too little to call because the intervals overlap" if overlap and start != end else ""
            if kl := run.finite("eval/kl") or run.finite("objective/kl"):
                paid = f", at a KL of {typeset_number(kl[-1][1])} nats per response"
        elif (window := min(5, len(points) // 2)) > 1:
            start = fmean(value for _, value in points[:window])
            end = fmean(value for _, value in points[-window:])
            around = f"means of the first and last {window} steps; "
        before_text = typeset_number(start)
        after_text = typeset_number(end)
        verb = "went" if overlap else "rose" if end > start else "fell"
        change = f"{verb} from {before_text} to {after_text}"
        if before_text == after_text:
            change = f"stayed at {after_text}"
        since = "" if origin_of(run.env) is None else f" from step {first} on"
        return f"{name} {change} in {_steps(last - first)}{since} ({around}{metric.unit}){caution}{paid}."
    return f"{_steps(run.last_step)} recorded; no reward, accuracy or loss among the metrics yet."


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


def reward_is_pass(run: RunRecords) -> bool:
    """Return whether pass@1 equals the reward, as with a reward of 0 or 1: then one of them is enough."""
    rewards = dict(run.finite("eval/reward_mean"))
    passes = dict(run.finite("eval/pass@1"))
    return rewards.keys() == passes.keys() and all(abs(rewards[step] - passes[step]) < 1e-9 for step in rewards)


def tiles(run: RunRecords) -> list[tuple[str, str, str, str]]:
    """Return the key figures of the run, most important first: label, value before ("": none), value, unit."""
    found = []
    for key, (label, metric) in key_figures([run]).items():
        if key != "eval/pass@1" or not reward_is_pass(run):
            found.append((label, *first_to_last(run, key, share=metric.share), metric.unit))
    if seconds := [value for _, value in run.finite("time/total") if value > 0]:
        found.append(("Time in steps", "", format_seconds(sum(seconds)), f"{format_seconds(median(seconds))} a step"))
    if rates := [value for _, value in run.finite("tokens_per_second")]:
        found.append(("Speed", "", typeset_number(median(rates)), "tokens per second"))
    if memory := [value for _, value in run.finite("memory/peak_gb")]:
        found.append(("Peak memory", "", typeset_number(max(memory)), "GB"))
    return found


def key_figures(runs: list[RunRecords]) -> dict[str, tuple[str, Metric]]:
    """Return label and metric of the figures that some of the runs have, by key: held out, or else that of training."""
    found: dict[str, tuple[str, Metric]] = {}
    for metric in TABLE:
        training, held_out = metric.keys
        for key, label in ((held_out, metric.label), (training, f"{metric.label}, training")):
            if metric.label and any(run.finite(key) for run in runs):
                found[key] = (label, metric)
                break
    return found


def first_to_last(run: RunRecords, key: str, *, share: bool) -> tuple[str, str]:
    """Return the first and the last value of a key figure; the first is empty where both look the same."""
    points = run.since_start(key) or [(0, math.nan)]
    first = typeset_number(points[0][1], share=share)
    last = typeset_number(points[-1][1], share=share)
    return "" if first == last else first, last


def phase_seconds(run: RunRecords) -> dict[str, dict[int, float]]:
    """Return {phase: {step: seconds}} from time/<phase>, the longest first, at most MOST_PHASES of them."""
    keys = [name for name in run.metric_names() if name.startswith("time/") and name.count("/") == 1]
    found = {one_line(key.removeprefix("time/"), 16): dict(run.finite(key)) for key in keys}
    found.pop("total", None)
    longest = sorted(found.items(), key=lambda phase: -sum(phase[1].values()))[:MOST_PHASES]
    return {name: seconds for name, seconds in longest if any(seconds.values())}
