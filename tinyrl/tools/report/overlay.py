"""Several runs as one set of charts: a line a run, named by a letter and by its colour."""

from dataclasses import dataclass, replace
from string import ascii_uppercase

from tinyrl.runs.records import Run
from tinyrl.text import one_line
from tinyrl.tools.report.panels import (
    KINDS,
    MOST_FUNCTIONS,
    Kind,
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
    """The training panel of everything; before it the held-out one of what runs are compared by or only have so."""
    found = []
    for kind in kinds:
        missing = sum(bool(one.run.points(kind.train)) < bool(one.run.points(kind.held)) for one in runs)
        if kind.held and (kind.greedy or not kind.train or kind not in KINDS or missing):
            found.append(_panel(runs, kind, kind.held, measured=True))
        found.append(_panel(runs, kind, kind.train, measured=False))
    return [panel for panel in found if panel]


def _panel(runs: list[Named], kind: Kind, key: str, *, measured: bool) -> Panel | None:
    about = kind.unit.removeprefix("held-out, ")
    unit = ("held-out" if measured else "training") + (f", {about}" if about else "")
    panel = panel_of(kind, key, _lines(runs, key, measured=measured), unit)
    if panel is not None and len(panel.title) + len(panel.unit) > WIDEST_CAPTION:
        return replace(panel, unit=panel.unit.partition(",")[0])
    return panel


def _lines(runs: list[Named], key: str, *, measured: bool) -> list[Line]:
    each = [(one, picked(one.run.points(key)) if measured else one.run.points(key)) for one in runs]
    return [
        Line(one.letter, one.colour, points, intervals_of(one.run, key, points), measured)
        for one, points in each
        if points
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
