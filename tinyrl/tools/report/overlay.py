"""Several runs as one set of charts: a line a run, named by a letter and by its colour. Runs that differ in nothing but
their seed are one line, their mean, with the range of their values.
"""

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from string import ascii_uppercase
from typing import Any

from tinyrl.runs.metrics import Metric
from tinyrl.runs.records import Points, Run, number
from tinyrl.text import one_line
from tinyrl.tools.report.outcome import outcome, show
from tinyrl.tools.report.panels import (
    CHARTS,
    MOST_FUNCTIONS,
    Line,
    Panel,
    intervals_of,
    other_kinds,
    panel_of,
    picked,
)

MOST_RUNS = 8  # more colours cannot be told apart
WIDEST_CAPTION = 48  # letters over a chart of one column


@dataclass(frozen=True)
class Named:
    """A run of the report, or several seeds of one setting, and the letter and the colour (1, 2, ...) for it."""

    letter: str
    colour: str
    seeds: tuple[Run, ...]

    @cached_property
    def run(self) -> Run:
        """The run; of several seeds the first one with the mean of their metrics, at steps that all have."""
        first, *others = self.seeds
        return replace(first, steps=_mean_steps(self.seeds)) if others else first

    @property
    def name(self) -> str:
        more = len(self.seeds) - 1
        return self.run.name + (f" and {more} more seed{'s' * (more > 1)}" if more else "")

    @property
    def outcome(self) -> str:
        said, ends = outcome(self.run), self.ends("eval/reward_mean", self.run.last_step)
        if len(self.seeds) == 1 or ends is None:
            return said
        return f"Mean of {len(self.seeds)} seeds: {said} At the end they lie from {show(ends[0])} to {show(ends[1])}."

    def ends(self, key: str, step: int) -> tuple[float, float] | None:
        """The lowest and the highest value among the seeds."""
        values = [number(run.steps.get(step, {}).get(key)) for run in self.seeds]
        return (min(values), max(values)) if not any(map(math.isnan, values)) else None

    def intervals(self, key: str, points: Points) -> dict[int, tuple[float, float]]:
        """Of one run that of its mean held-out reward, of several seeds their range."""
        if len(self.seeds) == 1:
            return intervals_of(self.run, key, points)
        return {step: ends for step, _ in points if (ends := self.ends(key, step))}


def _mean_steps(runs: tuple[Run, ...]) -> dict[int, dict[str, Any]]:
    shared = [step for step in runs[0].steps if all(step in run.steps for run in runs)]
    found: dict[int, dict[str, Any]] = {}
    for step in shared:
        lines = [run.steps[step] for run in runs]
        numbers = {key: [number(line.get(key)) for line in lines] for key in lines[0]}
        found[step] = {
            key: math.fsum(each) / len(each) for key, each in numbers.items() if not any(map(math.isnan, each))
        }
    return found


def by_setting(runs: list[Run]) -> list[list[Run]]:
    """Runs that differ in nothing but their seed stand together."""
    found: list[tuple[str, dict[Any, Run]]] = []
    for run in runs:
        written = run.config.get("run")
        section: dict[str, Any] = written if isinstance(written, dict) else {}
        seed = run.setting("run.seed")
        shared = json.dumps({**run.config, "run": {**section, "seed": None}}, sort_keys=True, default=str)
        group = next((seeds for config, seeds in found if config == shared and seed not in seeds), None)
        if group is None or seed is None:
            found.append((shared, group := {}))
        group[seed] = run
    return [list(seeds.values()) for _, seeds in found]


def named(runs: list[Run]) -> list[Named]:
    """Letters by place, one for all seeds of a setting. Raises ValueError for more than there are colours, and for a
    run that is named twice.
    """
    places = [run.path.resolve() for run in runs]
    for i, place in enumerate(places):
        if place in places[:i]:
            raise ValueError(f"{runs[i].path} is named twice; name each run once.")
    settings = by_setting(runs)
    if len(settings) > MOST_RUNS:
        raise ValueError(f"{len(settings)} runs are too many for one report: at most {MOST_RUNS} can be told apart.")
    return [Named(ascii_uppercase[i], str(i + 1), tuple(seeds)) for i, seeds in enumerate(settings)]


def overlaid(runs: list[Named]) -> list[Panel]:
    """A panel for every metric that at least one run has: rewards, held-out first; where there are none, losses."""
    others = {kind.key: kind for one in runs for kind in other_kinds(one.run)}
    known, extra = _of_kinds(runs, CHARTS), _of_kinds(runs, [*others.values()])
    rewarded = any(panel.key in ("reward/mean", "eval/reward_mean") for panel in known)
    panels = known + extra if rewarded else sorted(extra, key=lambda panel: "accuracy" not in panel.key) + known
    panels += _functions(runs)
    steps = [step for one in runs for step in one.run.steps]
    return [replace(panel, span=(min(0, *steps), max(1, *steps))) for panel in panels]


def _of_kinds(runs: list[Named], kinds: list[Metric]) -> list[Panel]:
    """The training panel of everything; before it the held-out one of what runs are compared by or only have so."""
    found = []
    for kind in kinds:
        train, held = kind.keys
        missing = sum(bool(one.run.points(train)) < bool(one.run.points(held)) for one in runs)
        if held and (kind.greedy or not train or kind not in CHARTS or missing):
            found.append(_panel(runs, kind, held, measured=True))
        found.append(_panel(runs, kind, train, measured=False))
    return [panel for panel in found if panel]


def _panel(runs: list[Named], kind: Metric, key: str, *, measured: bool) -> Panel | None:
    about = kind.unit.removeprefix("held-out, ")
    unit = ("held-out" if measured else "training") + (f", {about}" if about else "")
    panel = panel_of(kind, key, _lines(runs, key, measured=measured), unit)
    if panel is not None and len(panel.title) + len(panel.unit) > WIDEST_CAPTION:
        return replace(panel, unit=panel.unit.partition(",")[0])
    return panel


def _lines(runs: list[Named], key: str, *, measured: bool) -> list[Line]:
    each = [(one, picked(one.run.points(key)) if measured else one.run.points(key)) for one in runs]
    return [
        Line(one.letter, one.colour, points, one.intervals(key, points), measured) for one, points in each if points
    ]


def _functions(runs: list[Named]) -> list[Panel]:
    each = [[key for key in one.run.metric_names() if key.startswith("eval/reward/")] for one in runs]
    keys = sorted({key for keys in each for key in keys}) if any(len(keys) > 1 for keys in each) else []
    titles = {key: one_line(key.removeprefix("eval/reward/"), 24) for key in keys[:MOST_FUNCTIONS]}
    return [
        Panel("eval/functions", title, "held-out reward", lines)
        for key, title in titles.items()
        if (lines := _lines(runs, key, measured=True))
    ]
