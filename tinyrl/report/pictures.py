"""Pictures of the panels: inline SVG for the page, and all of them in one PNG.

In SVG, colours become CSS variables and text takes the page's font, so the page decides on light or dark. Nothing
depends on the clock or on the user's matplotlibrc: the same run gives the same bytes.
"""

import io
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from tinyrl.report.drawing import COLOURS, draw, label_width
from tinyrl.report.hover import hover_svg
from tinyrl.report.panels import COLUMNS, Panel, cells
from tinyrl.text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMN, GUTTER, HEIGHT = 344, 24, 196  # pixels of a panel on the page
HEADLINE, HEADLINE_PHONE = (712, 470), (344, 270)
PIXELS, DPI = 1200, 140


def _figure_class() -> Any:
    """matplotlib's Figure. Its first import reads neither MPLBACKEND nor a matplotlibrc of the user's, which may name
    what is not in this environment: the backend is chosen here.
    """
    if "matplotlib" not in sys.modules:
        ours = {"MPLBACKEND": "agg", "MATPLOTLIBRC": os.devnull}
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            import matplotlib  # noqa: F401
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
    from matplotlib.figure import Figure

    return Figure


@contextmanager
def _settings(size: float) -> Iterator[None]:
    import matplotlib

    defaults: Any = matplotlib.rcParams
    settings = {
        "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": size, "text.parse_math": False,
        "svg.fonttype": "none", "svg.hashsalt": "tinyrl", "text.color": COLOURS["ink"],
        "axes.edgecolor": COLOURS["grid"], "axes.labelcolor": COLOURS["muted"], "xtick.color": COLOURS["muted"],
        "ytick.color": COLOURS["muted"], "figure.facecolor": COLOURS["paper"], "axes.facecolor": "none",
    }  # fmt: skip
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the font may lack the script of a run's name
        matplotlib.rcdefaults()
        defaults.update(settings)
        yield


def panel_svgs(panels: list[Panel]) -> list[list[str]]:
    """The SVG of every panel. Those that span columns have two: for a wide page and for a phone."""
    drawn = []
    for i, (panel, cell) in enumerate(zip(panels, cells(len(panels)), strict=True)):
        sizes = [(COLUMN, HEIGHT)]
        if i == 0:
            sizes = [HEADLINE, HEADLINE_PHONE]
        elif cell.width > 1:
            sizes = [(COLUMN * cell.width + GUTTER * (cell.width - 1), HEIGHT), (COLUMN, HEIGHT)]
        drawn.append([_svg(panel, f"c{i}{'ab'[j]}", size, named=i == 0) for j, size in enumerate(sizes)])
    return drawn


def _svg(panel: Panel, prefix: str, size: tuple[int, int], *, named: bool) -> str:
    Figure, (width, height) = _figure_class(), size
    buffer = io.StringIO()
    with _settings(11):
        figure = Figure(figsize=(width / 72, height / 72))
        right = label_width(panel, named=named)
        axes = figure.add_axes((40 / width, 26 / height, 1 - (40 + right) / width, 1 - 36 / height))
        draw(axes, panel, scale=1.0, named=named)
        figure.savefig(buffer, format="svg", transparent=True)
        hover = hover_svg(panel, x=40, y=10, width=width - 40 - right, height=height - 36, span=axes.get_xlim())
    return _inline(buffer.getvalue(), prefix, panel.alt(), hover)


def _inline(svg: str, prefix: str, alt: str, hover: str) -> str:
    """matplotlib's SVG made ready for inlining: no prologue, unique ids, the page's colours and font, a title, and
    values on hovering.
    """
    svg = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL
    )
    view_box = re.search(r'viewBox="([\d. ]+)"', svg)
    assert view_box is not None
    body = svg[svg.index(">") + 1 :].replace("xlink:href", "href")
    body = re.sub(r'\bid="|href="#|url\(#', lambda match: match[0] + prefix, body)
    body = re.sub(r"font(-family)?: [^;\"]*(?=[;\"])", _own_size, body)
    for name, colour in COLOURS.items():
        body = body.replace(colour, f"var(--{'p' + name if name.isdigit() else name})")
    body = re.sub(r"\n\s*", "\n", body)
    title = f'<title id="{prefix}t">{escape(alt)}</title>'
    body = body.replace("</svg>", hover + "</svg>")
    return f'<svg viewBox="{view_box[1]}" role="img" aria-labelledby="{prefix}t">{title}{body}'


def _own_size(font: re.Match[str]) -> str:
    """Keep the size of `font: 11px 'DejaVu Sans'`; the family is the page's."""
    size = re.search(r"[\d.]+px", font[0])
    return f"font-size: {size[0]}" if size else "font-style: normal"


def picture_png(panels: list[Panel], *, title: str, about: str, outcome: str) -> bytes:
    """All panels in one picture, 1,200 pixels wide, with a title, what it is about and the outcome above them."""
    Figure = _figure_class()
    lines = [line for paragraph in outcome.splitlines() for line in textwrap.wrap(paragraph, 126)]
    margin, row_height, gap = 28, 200, 62
    column = (PIXELS - margin - 12) / COLUMNS
    top = 66 + 22 * len(lines)
    grid = cells(len(panels))
    pixels = top + max((cell.row + cell.height for cell in grid), default=0) * (row_height + gap) - 14
    with _settings(7.4):
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
            _title(axes, panel, height)
            draw(axes, panel, scale=0.68, named=i == 0)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _title(axes: "Axes", panel: Panel, height: float) -> None:
    title = axes.annotate(panel.title, (0, 1 + 22 / height), xycoords="axes fraction", xytext=(-40 * 72 / DPI, 0),
                          textcoords="offset points", weight="bold", va="center", size=8)  # fmt: skip
    axes.annotate(f"  {panel.unit}", (1, 0.5), xycoords=title, va="center", color=COLOURS["muted"])
