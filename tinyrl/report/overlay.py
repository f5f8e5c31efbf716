"""Several runs as one set of charts: a line a run, named by a letter and by its colour."""

import math
from dataclasses import dataclass, replace
from string import ascii_uppercase

from tinyrl.report.curves import picked
from tinyrl.report.outcome import show
from tinyrl.report.panels import KINDS, Kind, Line, Panel, intervals_of, other_kinds
from tinyrl.runs.records import Run
from tinyrl.text import one_line

MOST_RUNS = 8  # more colours cannot be told apart
MOST_FUNCTIONS = 5
WIDEST_CAPTION = 48  # letters over a chart of one column


@dataclass(frozen=True)
class Named:
    """A run of the report, and the letter and the colour (1, 2, ...) that stand for it."""

    letter: str
    colour: str
    run: Run


def named(runs: list[Run]) -> list[Named]:
    """Letters by place. Raises ValueError for more runs than there are colours, and for one that is named twice."""
    if len(runs) > MOST_RUNS:
        raise ValueError(f"{len(runs)} runs are too many for one report: at most {MOST_RUNS} can be told apart.")
    places = [run.path.resolve() for run in runs]
    for i, place in enumerate(places):
        if place in places[:i]:
            raise ValueError(f"{runs[i].path} is named twice; name each run once.")
    return [Named(ascii_uppercase[i], str(i + 1), run) for i, run in enumerate(runs)]


def overlaid(runs: list[Named]) -> list[Panel]:
    """A panel for every metric that at least one run has: rewards, held-out first; where there are none, losses."""
    others = {kind.train: kind for one in runs for kind in other_kinds(one.run)}
    known, extra = _of_kinds(runs, [*KINDS]), _of_kinds(runs, [*others.values()])
    rewarded = any(panel.key in ("reward/mean", "eval/reward_mean") for panel in known)
    panels = known + extra if rewarded else sorted(extra, key=lambda panel: "accuracy" not in panel.key) + known
    panels += _functions(runs)
    steps = [step for one in runs for step in one.run.steps]
    return [replace(panel, span=(min(0, *steps), max(1, *steps))) for panel in panels]


def _of_kinds(runs: list[Named], kinds: list[Kind]) -> list[Panel]:
    """The training panel of everything, and before it the held-out one of what runs are compared by, and of what a run
    has only held out (KL, where the loss has no use for it).
    """
    found = []
    for kind in kinds:
        missing = sum(bool(one.run.points(kind.train)) < bool(one.run.points(kind.held)) for one in runs)
        if kind.held and (kind.greedy or not kind.train or kind not in KINDS or missing):
            found.append(_panel(runs, kind, kind.held, measured=True))
        found.append(_panel(runs, kind, kind.train, measured=False))
    return [panel for panel in found if panel]


def _panel(runs: list[Named], kind: Kind, key: str, *, measured: bool) -> Panel | None:
    lines = _lines(runs, key, measured=measured) if key else []
    values = [value for line in lines for _, value in line.points if math.isfinite(value)]
    if not values or (kind.skip_zero and not any(values)):
        return None
    share = kind.share and min(values) >= 0 and max(values) <= 1
    unit = ", ".join(
        part for part in ("held-out" if measured else "training", kind.unit.removeprefix("held-out, ")) if part
    )
    if min(values) < kind.floor:
        unit += f" (cut at {show(kind.floor)})"
    if len(kind.title) + len(unit) > WIDEST_CAPTION:
        unit = unit.partition(",")[0]
    return Panel(key, kind.title, unit, lines, share, kind.from_zero, kind.floor, kind.any_scale)


def _lines(runs: list[Named], key: str, *, measured: bool) -> list[Line]:
    lines = []
    for one in runs:
        points = one.run.points(key)
        points = picked(points) if measured else points
        if points:
            lines.append(Line(one.letter, one.colour, points, intervals_of(one.run, key, points), measured))
    return lines


def _functions(runs: list[Named]) -> list[Panel]:
    """Held-out reward of each function, where a run has more than one."""
    each = [[key for key in one.run.metric_names() if key.startswith("eval/reward/")] for one in runs]
    keys = sorted({key for keys in each for key in keys}) if any(len(keys) > 1 for keys in each) else []
    return [
        Panel("eval/functions", one_line(key.removeprefix("eval/reward/"), 24), "held-out reward", lines)
        for key in keys[:MOST_FUNCTIONS]
        if (lines := _lines(runs, key, measured=True))
    ]
