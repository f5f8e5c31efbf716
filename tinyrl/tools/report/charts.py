"""Charts drawn with matplotlib: inline SVG for the page, with values on hovering, and all of them in one PNG.

Lines have labels at their ends instead of a legend. The same three colours mean the same three things in every panel,
and people with the common colour blindnesses can tell them apart (Okabe and Ito's set, a little darker). In SVG,
colours become CSS variables and text takes the page's font, so the page decides on light or dark. Nothing depends on
the clock or on the user's matplotlibrc: the same run gives the same bytes. All sizes are pixels of the page, 72 an
inch; the PNG is the same drawing, enlarged.
"""

import io
import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import numpy as np

from tinyrl.formatting import short_power, typeset_number
from tinyrl.runs.records import subsample
from tinyrl.text import one_line
from tinyrl.tools.report.panels import FEWEST_TO_SMOOTH, Panel, bar_spans, cells, smoothed

with patch.dict(os.environ, {"MPLBACKEND": "agg", "MATPLOTLIBRC": os.devnull}):  # the user's may name what is not here
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.ticker import MaxNLocator, NullLocator

COLUMN = 344
GUTTER = 24
HEIGHT = 196  # of a panel on the page
HEADLINE = (712, 470)
ZOOM = 1.28
WIDTH = 937.5
MARGIN = 22
PICTURE_COLUMN = 302
ROW = 205  # of the PNG, which is 1,200 pixels wide
LEFT = 40
TOP = 10
BOTTOM = 26  # around the plotting area
LETTER = 6.6  # a letter's mean width
OUTCOME_SIZE = 12.8
TITLE_SIZE = 12.2
UNIT_GAP = 7  # between a title and its unit
# Every colour stands for one thing only: in SVG its text is replaced by a CSS variable of that name.
COLOURS = {
    "ink": "#1c2733", "muted": "#5d6976", "grid": "#e4e8ec", "paper": "#ffffff",
    "train": "#1f6fb4", "held": "#c9510c", "greedy": "#0a8667",
    "1": "#5aa9dd", "2": "#b5679b", "3": "#d9a514", "4": "#4d8f5c", "5": "#8a6fc0",
    "6": "#c4524e", "7": "#2f7f93", "8": "#7d6b52", "other": "#a9b2bb",
}  # fmt: skip
TEXT_COLOURS = {"train", "held", "greedy"}
MOST_HOVERED = 60  # steps with values on hovering; narrower bars cannot be pointed at
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 11, "text.parse_math": False,
    "svg.fonttype": "none", "svg.hashsalt": "tinyrl", "text.color": COLOURS["ink"], "axes.facecolor": "none",
    "figure.facecolor": COLOURS["paper"], "axes.edgecolor": COLOURS["grid"], "axes.labelcolor": COLOURS["muted"],
    "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "y", "grid.color": COLOURS["grid"],
    "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False, "axes.linewidth": 1.2,
    "xtick.color": COLOURS["muted"], "ytick.color": COLOURS["muted"], "xtick.major.size": 0, "ytick.major.size": 0,
    "xtick.major.pad": 5, "ytick.major.pad": 5, "ytick.minor.size": 0,
}  # fmt: skip


@contextmanager
def _new_figure(width: float, height: float) -> Iterator[Figure]:
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the font may lack the script of a run's name
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield Figure(figsize=(width / 72, height / 72))


def panel_svgs(panels: list[Panel]) -> list[str]:
    """Return the inline SVG of every panel."""
    svgs = []
    span = _span(panels)
    for i, (panel, (*_, columns)) in enumerate(zip(panels, cells(len(panels)), strict=True)):
        width, height = HEADLINE if i == 0 else (COLUMN * columns + GUTTER * (columns - 1), HEIGHT)
        with _new_figure(width, height) as figure, io.StringIO() as buffer:
            hover = draw(figure, panel, (0, 0, width, height), span, named=i == 0)
            figure.savefig(buffer, format="svg", transparent=True)
            body = buffer.getvalue().partition("<svg")[2].partition(">")[2]
        # matplotlib's prologue is left out, ids are unique, colours and font the page's
        body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.S)
        body = re.sub(r'\bid="|href="#|url\(#', rf"\g<0>c{i}", body.replace("xlink:href", "href"))
        body = re.sub(r"font: [^;\"]*?([\d.]+px)[^;\"]*", r"font-size: \1", body)
        body = re.sub(r"font-family: [^;\"]*", "font-style: normal", body)
        for role, colour in COLOURS.items():
            body = body.replace(colour, f"var(--{'p' + role if role.isdigit() else role})")
        body = re.sub(r"\n\s*", "\n", body).replace("</svg>", hover + "</svg>")
        ends = ", ".join(f"{line.label} {typeset_number(line.end, share=panel.metric.share)}" for line in panel.lines)
        title = f'<title id="c{i}t">{escape(f"{panel.metric.title}: {ends}")}</title>'
        wide = ' class="wide"' if width > COLUMN else ""
        svgs.append(f'<svg{wide} viewBox="0 0 {width} {height}" role="img" aria-labelledby="c{i}t">{title}{body}')
    return svgs


def picture_png(panels: list[Panel], *, title: str, outcome: str, about: str = "") -> bytes:
    """Draw all panels in one picture with a title, a subtitle and the outcome above them."""
    name = one_line(title, 48)
    span = _span(panels)
    grid = cells(len(panels))
    rows_below = max((row + rows for row, _, rows, _ in grid), default=0)
    with _new_figure(WIDTH, ROW) as figure, io.BytesIO() as buffer:
        room = WIDTH - 2 * MARGIN
        lines = [line for paragraph in outcome.splitlines() for line in wrapped(paragraph, room, size=OUTCOME_SIZE)]
        top = 51 + 17 * len(lines)
        whole = top + rows_below * ROW - 11
        figure.set_size_inches(WIDTH / 72, whole / 72)
        about = fitted(about, room - 31 - text_width(name, size=17, bold=True), size=11)
        figure.text(MARGIN / WIDTH, 1 - 22 / whole, name, size=17, weight="bold", va="center")
        figure.text(1 - MARGIN / WIDTH, 1 - 22 / whole, about, va="center", ha="right", color=COLOURS["muted"])
        for i, line in enumerate(lines):
            figure.text(MARGIN / WIDTH, 1 - (45 + 17 * i) / whole, line, size=OUTCOME_SIZE, va="center")
        for i, (panel, (row, column, rows, columns)) in enumerate(zip(panels, grid, strict=True)):
            x = MARGIN + column * PICTURE_COLUMN
            y = top + row * ROW + 9
            width = columns * PICTURE_COLUMN - 10
            title = fitted(panel.metric.title, width, size=TITLE_SIZE, bold=True)
            title_width = text_width(title, size=TITLE_SIZE, bold=True)
            unit = fitted_unit(panel.metric.unit, width - title_width - UNIT_GAP)
            figure.text(x / WIDTH, 1 - y / whole, title, size=TITLE_SIZE, weight="bold", va="center")
            draw(figure, panel, (x, y + 7, width, rows * ROW - 20), span, named=i == 0)
            unit_x = x + title_width + UNIT_GAP
            figure.text(unit_x / WIDTH, 1 - y / whole, unit, va="center", color=COLOURS["muted"])
        figure.savefig(buffer, format="png", dpi=72 * ZOOM, metadata={"Software": None})
        return buffer.getvalue()


def text_width(text: str, *, size: float, bold: bool = False) -> float:
    """Return how wide a text is drawn in the picture, with its hinting, which widens small letters."""
    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
    renderer = RendererAgg(1, 1, 72 * ZOOM)
    width, _, _ = renderer.get_text_width_height_descent(text, font, ismath=False)
    return width / ZOOM


def fitted(text: str, room: float, *, size: float, bold: bool = False) -> str:
    """Return the text, or as much of its beginning as has room, with an ellipsis; "" where nothing has."""
    if text_width(text, size=size, bold=bold) <= room:
        return text
    for length in range(len(text) - 1, 0, -1):
        shorter = text[:length].rstrip() + "…"
        if text_width(shorter, size=size, bold=bold) <= room:
            return shorter
    return ""


def fitted_unit(unit: str, room: float) -> str:
    """Return the unit of a chart, without its last parts ("held-out, nats per response") where they have no room."""
    while ", " in unit and text_width(unit, size=11) > room:
        unit = unit.rpartition(", ")[0]
    return fitted(unit, room, size=11)


def wrapped(text: str, room: float, *, size: float) -> list[str]:
    """Break a paragraph into lines that have room; a longer word is a line of its own."""
    lines = list[str]()
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size=size) <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _span(panels: list[Panel]) -> tuple[float, float]:
    """Return where the axis of steps begins and ends, the same in every panel."""
    steps = [0, 1, *(step for panel in panels for line in panel.lines for step, _ in line.points)]
    first = min(steps)
    last = max(steps)
    margin = max(0.5, (last - first) * 0.02)
    return first - margin, last + margin


Box = tuple[float, float, float, float]  # x, y from the top, width, height


def draw(figure: Figure, panel: Panel, box: Box, span: tuple[float, float], *, named: bool) -> str:
    """Draw a panel into a box and return the SVG of its values on hovering. `named` labels lines by name, not only by
    last value.
    """
    share = panel.metric.share
    roles = [line.role for line in panel.lines]
    labels = list[str]()
    for line in panel.lines:
        end = typeset_number(line.end, share=share)
        has_name = named or line.role not in TEXT_COLOURS
        labels.append(f"{line.label} {end}" if has_name else end)
    room_for_marks = 0 if {*roles} <= TEXT_COLOURS else 10
    right = 14 + room_for_marks + LETTER * max(map(len, labels))
    x = box[0] + LEFT
    y = box[1] + TOP
    width = box[2] - LEFT - right
    height = box[3] - TOP - BOTTOM
    w, h = (72 * inches for inches in figure.get_size_inches())
    axes = figure.add_axes((x / w, 1 - (y + height) / h, width / w, height / h))
    ends = _draw_stack(axes, panel) if panel.stacked else _draw_lines(axes, panel)
    axes.set_xlim(*span)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if axes.get_yscale() == "log":
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4, min_n_ticks=3, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(
        lambda value, _: f"{value * 100:g} %" if share else short_power(f"{value:g}").replace("-", "\u2212")
    )
    offset: dict[str, Any] = {"textcoords": "offset points", "va": "center", "xycoords": "axes fraction"}
    if named or panel.stacked:
        axes.annotate("step", (1, 0), xytext=(18, -11), color=COLOURS["muted"], **offset)
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = spread([float(to_axes.transform((1, end))[1]) for end in ends], gap=14 / height)
    for role, label, at in zip(roles, labels, heights, strict=True):
        if role in TEXT_COLOURS:
            axes.annotate(label, (1, at), xytext=(9, 0), color=COLOURS[role], **offset)
        else:
            axes.annotate("■", (1, at), xytext=(8, 0.5), color=COLOURS[role], **offset)
            axes.annotate(label, (1, at), xytext=(20, 0), color=COLOURS["ink"], **offset)
    return hover_svg(panel, (x, y, width, height), span)


def _draw_lines(axes: Axes, panel: Panel) -> list[float]:
    """Draw curves and measured points and set the limits; return where each line ends."""
    metric = panel.metric
    interval_alpha = 0.3 if panel.cuts_intervals else 0.65
    for line in panel.lines:
        finite = [(step, value) for step, value in line.points if math.isfinite(value)]
        (steps, values), look = zip(*line.points, strict=True), dict[str, Any](color=COLOURS[line.role])
        if line.measured:
            for step, pair in line.intervals.items():
                axes.plot([step, step], pair, linewidth=1.4, alpha=interval_alpha, solid_capstyle="butt", **look)
            marker, size = ("D", 4.3) if line.role == "greedy" else ("o", 5.5)
            axes.plot(*zip(*finite, strict=True), marker=marker, markersize=size, linewidth=1.4, zorder=4,
                      markeredgecolor=COLOURS["paper"], markeredgewidth=0.9, **look)  # fmt: skip
            continue
        if line.intervals:
            edges = zip(*(line.intervals.get(step, (math.nan, math.nan)) for step in steps), strict=True)
            low, high = (smoothed(list(edge)) for edge in edges)
            axes.fill_between(steps, low, high, alpha=0.18, linewidth=0, **look)
        elif len(steps) >= FEWEST_TO_SMOOTH:
            axes.plot(steps, values, linewidth=0.9, alpha=0.4, **look)
        marker = "o" if len(steps) <= 3 else None
        axes.plot(steps, line.curve, linewidth=2, marker=marker, markersize=4.5, solid_joinstyle="round", **look)
    low, high = panel.shown_range
    if metric.any_scale and low > 0 and high > 100 * low:
        axes.set_yscale("log")
    else:
        zero = metric.from_zero and low >= 0
        low = 0.0 if zero else low
        pad = (high - low) * 0.08 or panel.least_height
        axes.set_ylim(low if zero else low - pad, high + pad)
    return [line.end for line in panel.lines]


def _draw_stack(axes: Axes, panel: Panel) -> list[float]:
    """Draw a bar for each step; return the middle of each layer at the last one."""
    steps = [step for step, _ in panel.lines[0].points]
    seconds = np.array([[value for _, value in line.points] for line in panel.lines])
    tops = seconds.cumsum(0)
    spans = bar_spans(steps)
    left_edges = [left for left, _ in spans]
    widths = [right - left for left, right in spans]
    for line, heights, top in zip(panel.lines, seconds, tops, strict=True):
        axes.bar(left_edges, heights, widths, bottom=top - heights, align="edge", color=COLOURS[line.role])
    axes.set_ylim(0, tops.max() * 1.05 or 1.0)
    return (tops - seconds / 2)[:, -1].tolist()


def spread(wanted: list[float], *, gap: float) -> list[float]:
    """Return heights near the wanted ones, in the same order, at least `gap` apart, none pushed above 1."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    heights = [*accumulate((wanted[i] for i in order), lambda below, height: max(height, below + gap))]
    ceiling = max(1.0, *wanted)
    for place in range(len(heights) - 1, -1, -1):
        heights[place] = min(heights[place], ceiling)
        ceiling = heights[place] - gap
    return [heights[order.index(i)] for i in range(len(wanted))]


def hover_svg(panel: Panel, area: Box, span: tuple[float, float]) -> str:
    """Return an invisible bar for each step whose <title> has the values: no JavaScript. span: the steps at the left
    and the right edge of the area.
    """
    x, y, width, height = area
    values = [{step: value for step, value in line.points if math.isfinite(value)} for line in panel.lines]
    measured = {step for line in panel.lines if line.measured for step, _ in line.points}
    steps = subsample(sorted(set[int]().union(*values)), MOST_HOVERED)
    steps = sorted({*steps, *subsample(sorted(measured), MOST_HOVERED)})
    places = [x + (step - span[0]) / (span[1] - span[0]) * width for step in steps]
    edges = [x, *((a + b) / 2 for a, b in pairwise(places)), x + width]
    bars = ""
    for step, (left, right) in zip(steps, pairwise(edges), strict=True):
        text = f"step {step:,}"
        for line, known in zip(panel.lines, values, strict=True):
            if step in known:
                text += f"\n{one_line(line.label, 40)} {typeset_number(known[step], share=panel.metric.share)}"
            if step in known and step in line.intervals:
                low, high = line.intervals[step]
                text += f" ({typeset_number(low)} to {typeset_number(high)})"
        bars += f'<rect x="{left:.1f}" y="{y:.0f}" width="{right - left:.1f}" height="{height:.0f}">'
        bars += f"<title>{escape(text)}</title></rect>\n"
    return f'<g class="hover">\n{bars}</g>\n'
