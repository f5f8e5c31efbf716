"""Drawing of one panel on matplotlib axes: lines or a stack, with labels at the ends of lines instead of a legend.

The same three colours mean the same three things in every panel, and people with the common colour blindnesses can
tell them apart (Okabe and Ito's set, a little darker). Text is never in a pale colour: it gets a coloured mark.
"""

import math
from typing import TYPE_CHECKING, Any

from tinyrl.report.outcome import short_power, show
from tinyrl.report.panels import Line, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Every colour stands for one thing only: in SVG its text is replaced by a CSS variable of that name.
COLOURS = {
    "ink": "#1c2733", "muted": "#5d6976", "grid": "#e4e8ec", "paper": "#ffffff",
    "train": "#1f6fb4", "held": "#c9510c", "greedy": "#0a8667",
    "1": "#5aa9dd", "2": "#b5679b", "3": "#d9a514", "4": "#4d8f5c", "5": "#8a6fc0",
    "6": "#c4524e", "7": "#2f7f93", "8": "#7d6b52", "other": "#a9b2bb",
}  # fmt: skip
TEXT_COLOURS = ("train", "held", "greedy")
LETTER = 6.6  # pixels, a letter's mean width at 11 pixels
MOST_BARS = 80


def draw(axes: "Axes", panel: Panel, *, scale: float, named: bool) -> None:
    """Draw a panel. `scale` is the size of a stroke in points; `named` labels lines by name, not only by last value."""
    ends = _draw_stack(axes, panel) if panel.stacked else [_draw_line(axes, line, scale) for line in panel.lines]
    _limits(axes, panel)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_linewidth(1.2 * scale)
    axes.grid(axis="y", color=COLOURS["grid"], linewidth=0.8 * scale)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=5 * scale)
    _ticks(axes, panel)
    if named or panel.stacked:
        axes.annotate("step", (1, 0), xycoords="axes fraction", xytext=(18 * scale, -11 * scale),
                      textcoords="offset points", va="center", color=COLOURS["muted"])  # fmt: skip
    _label_ends(axes, panel, ends, scale=scale, named=named)


def label_width(panel: Panel, *, named: bool) -> float:
    """Pixels that the labels right of a panel need where a letter is 11 pixels high."""
    marked = any(line.role not in TEXT_COLOURS for line in panel.lines)
    return 14 + 10 * marked + LETTER * max(len(label) for label in _labels(panel, named=named))


def _labels(panel: Panel, *, named: bool) -> list[str]:
    named = named or any(line.role not in TEXT_COLOURS for line in panel.lines)
    values = [show(line.curve.end, share=panel.share) for line in panel.lines]
    return [f"{line.label} {value}" if named else value for line, value in zip(panel.lines, values, strict=True)]


def _draw_line(axes: "Axes", line: Line, scale: float) -> float:
    colour, drawn = COLOURS[line.role], line.curve
    if line.marked:
        steps, values = zip(*[point for point in line.points if math.isfinite(point[1])], strict=True)
        for step, (low, high) in line.intervals.items():
            axes.plot([step, step], [low, high], color=colour, linewidth=1.4 * scale, alpha=0.65, solid_capstyle="butt")
        marker, size = ("D", 4.3) if line.role == "greedy" else ("o", 5.5)
        axes.plot(steps, values, color=colour, linewidth=1.4 * scale, marker=marker, markersize=size * scale,
                  markeredgecolor=COLOURS["paper"], markeredgewidth=0.9 * scale, zorder=4)  # fmt: skip
        return drawn.end
    if drawn.bold is not drawn.raw:
        axes.plot(drawn.steps, drawn.raw, color=colour, linewidth=0.9 * scale, alpha=0.4)
    few: dict[str, Any] = {"marker": "o", "markersize": 4.5 * scale} if len(drawn.steps) <= 3 else {}
    axes.plot(drawn.steps, drawn.bold, color=colour, linewidth=2.0 * scale, solid_joinstyle="round", **few)
    return drawn.end


def _draw_stack(axes: "Axes", panel: Panel) -> list[float]:
    """Bars while they can be told apart, areas after that; returns the middle of each layer at the last step."""
    steps = panel.lines[0].curve.steps
    below, middles = [0.0] * len(steps), []
    for line in panel.lines:
        heights = line.curve.raw
        above = [low + height for low, height in zip(below, heights, strict=True)]
        if len(steps) <= MOST_BARS:
            axes.bar(
                steps, heights, bottom=below, width=min(0.82, 0.2 * len(steps)), color=COLOURS[line.role], linewidth=0
            )
        else:
            axes.fill_between(steps, below, above, color=COLOURS[line.role], linewidth=0)
        middles.append((below[-1] + above[-1]) / 2)
        below = above
    return middles


def _limits(axes: "Axes", panel: Panel) -> None:
    first, last = panel.span
    margin = max(0.5, (last - first) * 0.02)
    axes.set_xlim(first - margin, last + margin)
    if panel.stacked:
        return
    ends = [value for line in panel.lines for pair in line.intervals.values() for value in pair]
    drawn = [value for line in panel.lines for value in line.curve.raw if math.isfinite(value)]
    values = [max(value, panel.floor) for value in drawn] + ends
    low, high = min(values), max(values)
    if panel.any_scale and low > 0 and high > 100 * low:
        axes.set_yscale("log")
        return
    zero = panel.from_zero and low >= 0
    low = 0.0 if zero else low
    pad = (high - low) * 0.08 or abs(high) * 0.1 or (0.01 if panel.share else 1.0)
    axes.set_ylim(low if zero else low - pad, high + pad)


def _ticks(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    if panel.span[1] - panel.span[0] <= 1:
        axes.set_xticks(list(range(panel.span[0], panel.span[1] + 1)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    if axes.get_yscale() == "log":
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4, min_n_ticks=3, steps=[1, 2, 2.5, 5, 10]))
        if panel.share:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:g} %"))
        elif max(map(abs, axes.get_ylim())) < 0.01:  # not a factor of 1e-5 over the axis
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_power(f"{value:.3g}")))


def _label_ends(axes: "Axes", panel: Panel, ends: list[float], *, scale: float, named: bool) -> None:
    figure = axes.get_figure(root=True)
    assert figure is not None
    gap = 14 * scale / (axes.get_position().height * figure.get_size_inches()[1] * 72)
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = spread([float(to_axes.transform((1, end))[1]) for end in ends], gap=gap)
    for line, label, height in zip(panel.lines, _labels(panel, named=named), heights, strict=True):
        place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "center"}
        if line.role in TEXT_COLOURS:
            axes.annotate(label, (1, height), xytext=(9 * scale, 0), color=COLOURS[line.role], **place)
        else:
            axes.annotate("■", (1, height), xytext=(8 * scale, 0.5 * scale), color=COLOURS[line.role], **place)
            axes.annotate(label, (1, height), xytext=(20 * scale, 0), color=COLOURS["ink"], **place)


def spread(wanted: list[float], *, gap: float) -> list[float]:
    """Heights near the wanted ones, in the same order, at least `gap` apart, the highest not pushed above 1."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    heights: list[float] = []
    for i in order:
        heights.append(max(wanted[i], heights[-1] + gap) if heights else wanted[i])
    ceiling = max(1.0, *wanted)
    for place in range(len(heights) - 1, -1, -1):
        heights[place] = min(heights[place], ceiling)
        ceiling = heights[place] - gap
    return [heights[order.index(i)] for i in range(len(wanted))]
