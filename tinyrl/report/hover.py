"""Values on hovering over a chart, without JavaScript: an invisible bar at each step whose <title> says them."""

import math
from html import escape
from itertools import pairwise

from tinyrl.report.outcome import show
from tinyrl.report.panels import Panel
from tinyrl.text import one_line

MOST_BARS = 60  # narrower ones cannot be pointed at


def hover_svg(panel: Panel, *, x: float, y: float, width: float, height: float, span: tuple[float, float]) -> str:
    """Bars over the plotting area. x, y, width, height: that area in the chart's units, y from the top; span: the steps
    at its left and right edge.
    """
    told = values_by_step(panel)
    if not told:
        return ""
    steps = list(told)
    places = [x + (step - span[0]) / (span[1] - span[0]) * width for step in steps]
    edges = [x, *((a + b) / 2 for a, b in pairwise(places)), x + width]
    bars = [
        f'<rect x="{left:.1f}" y="{y:.0f}" width="{right - left:.1f}" height="{height:.0f}">'
        f"<title>{escape(told[step])}</title></rect>\n"
        for step, left, right in [(step, *pair) for step, pair in zip(steps, pairwise(edges), strict=True)]
    ]
    return f'<g class="hover">\n{"".join(bars)}</g>\n'


def values_by_step(panel: Panel) -> dict[int, str]:
    """What every line of the panel is at some steps, in words: held-out measurements first, then evenly."""
    values = [{step: value for step, value in line.points if math.isfinite(value)} for line in panel.lines]
    marked = {step for line, known in zip(panel.lines, values, strict=True) if line.marked for step in known}
    others = {step for known in values for step in known} - marked
    steps = _evenly(sorted(marked), MOST_BARS)
    steps = sorted([*steps, *_evenly(sorted(others), MOST_BARS - len(steps))])
    return {step: _told(panel, step, values) for step in steps}


def _told(panel: Panel, step: int, values: list[dict[int, float]]) -> str:
    said = [f"step {step:,}"]
    for line, known in zip(panel.lines, values, strict=True):
        if step in known:
            pair = line.intervals.get(step)
            around = f" ({show(pair[0])} to {show(pair[1])})" if pair else ""
            said.append(f"{one_line(line.label, 40)} {show(known[step], share=panel.share)}{around}")
    return "\n".join(said)


def _evenly(steps: list[int], most: int) -> list[int]:
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)] if most > 1 else []
