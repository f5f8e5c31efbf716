"""Charts drawn with matplotlib: inline SVG for the page, with values on hovering, and all of them in one PNG.

Lines have labels at their ends instead of a legend. The same three colours mean the same three things in every panel,
and people with the common colour blindnesses can tell them apart (Okabe and Ito's set, a little darker). In SVG,
colours become CSS variables and text takes the page's font, so the page decides on light or dark. Nothing depends on
the clock or on the user's matplotlibrc: the same run gives the same bytes.
"""

import io
import math
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from tinyrl.runs.records import evenly
from tinyrl.text import one_line
from tinyrl.tools.report.outcome import short_power, show
from tinyrl.tools.report.panels import COLUMNS, Panel, cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMN, GUTTER, HEIGHT = 344, 24, 196  # pixels of a panel on the page
HEADLINE, HEADLINE_PHONE = (712, 470), (344, 270)
PIXELS, DPI = 1200, 140
# Every colour stands for one thing only: in SVG its text is replaced by a CSS variable of that name.
COLOURS = {
    "ink": "#1c2733", "muted": "#5d6976", "grid": "#e4e8ec", "paper": "#ffffff",
    "train": "#1f6fb4", "held": "#c9510c", "greedy": "#0a8667",
    "1": "#5aa9dd", "2": "#b5679b", "3": "#d9a514", "4": "#4d8f5c", "5": "#8a6fc0",
    "6": "#c4524e", "7": "#2f7f93", "8": "#7d6b52", "other": "#a9b2bb",
}  # fmt: skip
TEXT_COLOURS = ("train", "held", "greedy")
LETTER = 6.6  # pixels, a letter's mean width at 11 pixels
MOST_BARS = 80  # of a stack; areas after that
MOST_HOVERED = 60  # steps with values on hovering; narrower bars cannot be pointed at


# ---- one panel on matplotlib axes ----


def draw(axes: "Axes", panel: Panel, *, scale: float, named: bool) -> None:
    """Draw a panel. `scale` is the size of a stroke in points; `named` labels lines by name, not only by last value."""
    ends = _draw_stack(axes, panel) if panel.stacked else _draw_lines(axes, panel, scale)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_linewidth(1.2 * scale)
    axes.grid(axis="y", color=COLOURS["grid"], linewidth=0.8 * scale)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=5 * scale)
    _ticks(axes, panel)
    offset: dict[str, Any] = {"textcoords": "offset points", "va": "center", "xycoords": "axes fraction"}
    if named or panel.stacked:
        axes.annotate("step", (1, 0), xytext=(18 * scale, -11 * scale), color=COLOURS["muted"], **offset)
    figure = axes.get_figure(root=True)
    assert figure is not None
    gap = 14 * scale / (axes.get_position().height * figure.get_size_inches()[1] * 72)
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = spread([float(to_axes.transform((1, end))[1]) for end in ends], gap=gap)
    for line, label, height in zip(panel.lines, _labels(panel, named=named), heights, strict=True):
        if line.role in TEXT_COLOURS:
            axes.annotate(label, (1, height), xytext=(9 * scale, 0), color=COLOURS[line.role], **offset)
        else:
            axes.annotate("■", (1, height), xytext=(8 * scale, 0.5 * scale), color=COLOURS[line.role], **offset)
            axes.annotate(label, (1, height), xytext=(20 * scale, 0), color=COLOURS["ink"], **offset)


def label_width(panel: Panel, *, named: bool) -> float:
    """Return the pixels that the labels right of a panel need where a letter is 11 pixels high."""
    marked = any(line.role not in TEXT_COLOURS for line in panel.lines)
    return 14 + 10 * marked + LETTER * max(map(len, _labels(panel, named=named)))


def _labels(panel: Panel, *, named: bool) -> list[str]:
    named = named or any(line.role not in TEXT_COLOURS for line in panel.lines)
    return [f"{line.label} " * named + show(line.curve.end, share=panel.share) for line in panel.lines]


def _draw_lines(axes: "Axes", panel: Panel, scale: float) -> list[float]:
    """Draw curves and measured points and set the limits; return where each line ends."""
    for line in panel.lines:
        colour, drawn = COLOURS[line.role], line.curve
        if line.marked:
            steps, values = zip(*[point for point in line.points if math.isfinite(point[1])], strict=True)
            bar: dict[str, Any] = {"linewidth": 1.4 * scale, "alpha": 0.65, "solid_capstyle": "butt"}
            for step, ends in line.intervals.items():
                axes.plot([step, step], ends, color=colour, **bar)
            marker, size = ("D", 4.3) if line.role == "greedy" else ("o", 5.5)
            axes.plot(steps, values, color=colour, linewidth=1.4 * scale, marker=marker, markersize=size * scale,
                      markeredgecolor=COLOURS["paper"], markeredgewidth=0.9 * scale, zorder=4)  # fmt: skip
            continue
        if line.intervals:
            low_edge, high_edge = line.band
            axes.fill_between(drawn.steps, low_edge, high_edge, color=colour, alpha=0.18, linewidth=0)
        elif drawn.bold is not drawn.raw:
            axes.plot(drawn.steps, drawn.raw, color=colour, linewidth=0.9 * scale, alpha=0.4)
        few: dict[str, Any] = {"marker": "o", "markersize": 4.5 * scale} if len(drawn.steps) <= 3 else {}
        axes.plot(drawn.steps, drawn.bold, color=colour, linewidth=2.0 * scale, solid_joinstyle="round", **few)
    _limit_steps(axes, panel)
    ends = [value for line in panel.lines for pair in line.intervals.values() for value in pair]
    finite = [value for line in panel.lines for value in line.curve.raw if math.isfinite(value)]
    values = [max(value, panel.floor) for value in finite] + ends
    low, high = min(values), max(values)
    if panel.any_scale and low > 0 and high > 100 * low:
        axes.set_yscale("log")
    else:
        zero = panel.from_zero and low >= 0
        low = 0.0 if zero else low
        pad = (high - low) * 0.08 or abs(high) * 0.1 or (0.01 if panel.share else 1.0)
        axes.set_ylim(low if zero else low - pad, high + pad)
    return [line.curve.end for line in panel.lines]


def _draw_stack(axes: "Axes", panel: Panel) -> list[float]:
    """Draw bars while they can be told apart, areas after that; return the middle of each layer at the last step."""
    steps = panel.lines[0].curve.steps
    below, middles, width = [0.0] * len(steps), [], min(0.82, 0.2 * len(steps))
    for line in panel.lines:
        heights, colour = line.curve.raw, COLOURS[line.role]
        above = [low + height for low, height in zip(below, heights, strict=True)]
        if len(steps) <= MOST_BARS:
            axes.bar(steps, heights, bottom=below, width=width, color=colour, linewidth=0)
        else:
            axes.fill_between(steps, below, above, color=colour, linewidth=0)
        middles.append((below[-1] + above[-1]) / 2)
        below = above
    _limit_steps(axes, panel)
    return middles


def _limit_steps(axes: "Axes", panel: Panel) -> None:
    first, last = panel.span
    margin = max(0.5, (last - first) * 0.02)
    axes.set_xlim(first - margin, last + margin)


def _ticks(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    first, last = panel.span
    if last - first <= 1:
        axes.set_xticks(list(range(first, last + 1)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    if axes.get_yscale() == "log":
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        return
    axes.yaxis.set_major_locator(MaxNLocator(4, min_n_ticks=3, steps=[1, 2, 2.5, 5, 10]))
    if panel.share:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:g} %"))
    elif max(map(abs, axes.get_ylim())) < 0.01:  # not a factor of 1e-5 over the axis
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_power(f"{value:.3g}")))


def spread(wanted: list[float], *, gap: float) -> list[float]:
    """Return heights near the wanted ones, in the same order, at least `gap` apart, none pushed above 1."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    heights = [*accumulate((wanted[i] for i in order), lambda below, height: max(height, below + gap))]
    ceiling = max(1.0, *wanted)
    for place in range(len(heights) - 1, -1, -1):
        heights[place] = min(heights[place], ceiling)
        ceiling = heights[place] - gap
    return [heights[order.index(i)] for i in range(len(wanted))]


# ---- values on hovering ----


def hover_svg(panel: Panel, *, x: float, y: float, width: float, height: float, span: tuple[float, float]) -> str:
    """Return an invisible bar for each step whose <title> has the values: no JavaScript. x, y, width, height: the
    plotting area in the chart's units, y from the top; span: the steps at its left and right edge.
    """
    values = values_by_step(panel)
    if not values:
        return ""
    places = [x + (step - span[0]) / (span[1] - span[0]) * width for step in values]
    edges = [x, *((a + b) / 2 for a, b in pairwise(places)), x + width]
    bars = [
        f'<rect x="{left:.1f}" y="{y:.0f}" width="{right - left:.1f}" height="{height:.0f}">'
        f"<title>{escape(text)}</title></rect>\n"
        for text, (left, right) in zip(values.values(), pairwise(edges), strict=True)
    ]
    return f'<g class="hover">\n{"".join(bars)}</g>\n'


def values_by_step(panel: Panel) -> dict[int, str]:
    """Return every line of the panel at some steps, in words: held-out measurements first, then evenly."""
    values = [{step: value for step, value in line.points if math.isfinite(value)} for line in panel.lines]
    marked = {step for line, known in zip(panel.lines, values, strict=True) if line.marked for step in known}
    others = {step for known in values for step in known} - marked
    steps = evenly(sorted(marked), MOST_HOVERED)
    found = {step: f"step {step:,}" for step in sorted([*steps, *evenly(sorted(others), MOST_HOVERED - len(steps))])}
    for line, known in zip(panel.lines, values, strict=True):
        for step in found.keys() & known.keys():
            pair = line.intervals.get(step)
            around = f" ({show(pair[0])} to {show(pair[1])})" if pair else ""
            found[step] += f"\n{one_line(line.label, 40)} {show(known[step], share=panel.share)}{around}"
    return found


# ---- SVG and PNG ----


@contextmanager
def _figures(size: float) -> Iterator[Any]:
    """Yield matplotlib's Figure under our settings, imported without the user's MPLBACKEND and matplotlibrc, which may
    name what is not here.
    """
    if "matplotlib" not in sys.modules:
        ours = {"MPLBACKEND": "agg", "MATPLOTLIBRC": os.devnull}
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            import matplotlib
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
    import matplotlib
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": size, "text.parse_math": False,
        "svg.fonttype": "none", "svg.hashsalt": "tinyrl", "text.color": COLOURS["ink"],
        "axes.edgecolor": COLOURS["grid"], "axes.labelcolor": COLOURS["muted"], "xtick.color": COLOURS["muted"],
        "ytick.color": COLOURS["muted"], "figure.facecolor": COLOURS["paper"], "axes.facecolor": "none",
    }  # fmt: skip
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the font may lack the script of a run's name
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        yield Figure


def panel_svgs(panels: list[Panel]) -> list[str]:
    """Return the inline SVG of every panel; of those that span columns one for a wide page and one for a phone."""
    drawn = []
    for i, (panel, cell) in enumerate(zip(panels, cells(len(panels)), strict=True)):
        wide = (COLUMN * cell.width + GUTTER * (cell.width - 1), HEIGHT)
        a, b = (HEADLINE, HEADLINE_PHONE) if i == 0 else (wide, (COLUMN, HEIGHT))
        svg = _svg(panel, f"c{i}a", a, ' class="wide"' if a != b else "", named=i == 0)
        drawn.append(svg + (_svg(panel, f"c{i}b", b, ' class="narrow"', named=i == 0) if a != b else ""))
    return drawn


def _svg(panel: Panel, prefix: str, size: tuple[int, int], classed: str, *, named: bool) -> str:
    """Draw one panel; matplotlib's prologue is left out, ids are unique, colours and font the page's."""
    (width, height), buffer = size, io.StringIO()
    with _figures(11) as Figure:
        figure = Figure(figsize=(width / 72, height / 72))
        right = label_width(panel, named=named)
        axes = figure.add_axes((40 / width, 26 / height, 1 - (40 + right) / width, 1 - 36 / height))
        draw(axes, panel, scale=1.0, named=named)
        figure.savefig(buffer, format="svg", transparent=True)
        hover = hover_svg(panel, x=40, y=10, width=width - 40 - right, height=height - 36, span=axes.get_xlim())
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.S)
    view_box = re.search(r'viewBox="([\d. ]+)"', svg)
    assert view_box is not None
    body = svg[svg.index(">") + 1 :].replace("xlink:href", "href")
    body = re.sub(r'\bid="|href="#|url\(#', lambda match: match[0] + prefix, body)
    body = re.sub(r"font: [^;\"]*?([\d.]+px)[^;\"]*", r"font-size: \1", body)
    body = re.sub(r"font-family: [^;\"]*", "font-style: normal", body)
    for name, colour in COLOURS.items():
        body = body.replace(colour, f"var(--{'p' + name if name.isdigit() else name})")
    body = re.sub(r"\n\s*", "\n", body).replace("</svg>", hover + "</svg>")
    title = f'<title id="{prefix}t">{escape(panel.alt())}</title>'
    return f'<svg{classed} viewBox="{view_box[1]}" role="img" aria-labelledby="{prefix}t">{title}{body}'


def picture_png(panels: list[Panel], *, title: str, about: str, outcome: str) -> bytes:
    """Draw all panels in one picture, 1,200 pixels wide, with a title, a subtitle and the outcome above them."""
    lines = [line for paragraph in outcome.splitlines() for line in textwrap.wrap(paragraph, 126)]
    margin, row_height, gap = 28, 200, 62
    column = (PIXELS - margin - 12) / COLUMNS
    top, grid = 66 + 22 * len(lines), cells(len(panels))
    pixels = top + max((cell.row + cell.height for cell in grid), default=0) * (row_height + gap) - 14
    buffer = io.BytesIO()
    with _figures(7.4) as Figure:
        figure = Figure(figsize=(PIXELS / DPI, pixels / DPI), dpi=DPI)
        name = one_line(title, 48)
        figure.text(margin / PIXELS, 1 - 28 / pixels, name, size=11, weight="bold", va="center")
        about = one_line(about, int((PIXELS - 2 * margin - 40 - 13.5 * len(name)) / 8))
        figure.text(1 - margin / PIXELS, 1 - 28 / pixels, about, va="center", ha="right", color=COLOURS["muted"])
        for i, line in enumerate(lines):
            figure.text(margin / PIXELS, 1 - (58 + 22 * i) / pixels, line, size=8.4, va="center")
        for i, (panel, cell) in enumerate(zip(panels, grid, strict=True)):
            right = label_width(panel, named=i == 0) * 1.28 + 14
            x, y = margin + cell.column * column + 40, top + cell.row * (row_height + gap) + 34
            width, height = cell.width * column - 40 - right, cell.height * row_height + (cell.height - 1) * gap - 10
            axes = figure.add_axes((x / PIXELS, 1 - (y + height) / pixels, width / PIXELS, height / pixels))
            above = {"xytext": (-40 * 72 / DPI, 0), "textcoords": "offset points", "weight": "bold", "size": 8}
            place = {"xycoords": "axes fraction", "va": "center"}
            title_text = axes.annotate(panel.title, (0, 1 + 22 / height), **place, **above)
            axes.annotate(f"  {panel.unit}", (1, 0.5), xycoords=title_text, va="center", color=COLOURS["muted"])
            draw(axes, panel, scale=0.68, named=i == 0)
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()
