"""The report of a run: report.html (one page, no JavaScript, nothing loaded from elsewhere) and report.png.

It reads a run directory and nothing else, so it works on a run in progress, on one from another machine and on one that
stopped half-way. torch is never imported; matplotlib is, inside the functions that draw.

    outcome.py       the one sentence and the key numbers
    panels.py        which charts there are, as plain data
    curves.py        numbers to curves: gaps, thinning, smoothing
    drawing.py       one chart with matplotlib
    pictures.py      all of them: inline SVG for the page, one PNG
    reliability.py   predictions of a reward model beside what turned out
    page.py          the HTML around them (page.css is its style sheet)
"""

import os
from pathlib import Path

from tinyrl.report.page import page_html
from tinyrl.report.panels import panels_of
from tinyrl.runs.records import read_run

__all__ = ["write_report"]


def write_report(run_dir: Path) -> list[Path]:
    """Write report.html and report.png into `run_dir` and return their paths.

    The same run gives the same bytes. Each file is replaced in one step, so a reader never sees half of one.

    Raises ValueError when `run_dir` is not a run or has no metrics yet, and OSError when it cannot be written to.
    """
    from tinyrl.report.pictures import panel_svgs, picture_png  # matplotlib, half a second

    run = read_run(Path(run_dir))
    panels = panels_of(run)
    html = page_html(run, panels, panel_svgs(panels)).encode("utf-8")
    picture = picture_png(run, panels)
    targets = [Path(run_dir) / "report.html", Path(run_dir) / "report.png"]
    for target, content in zip(targets, (html, picture), strict=True):
        _delete_leftovers(target)
        _replace(target, content)
    return targets


def _delete_leftovers(target: Path) -> None:
    """What reports left that were killed while they wrote: their process is no longer there."""
    import psutil

    for path in target.parent.glob(f".{target.name}.*.tmp"):
        number = path.name.split(".")[-2]
        if number.isdigit() and not psutil.pid_exists(int(number)):
            path.unlink(missing_ok=True)


def _replace(target: Path, content: bytes) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
