"""The report of a run: report.html (one page, no JavaScript, nothing loaded from elsewhere) and report.png.

It reads a run directory and nothing else, so it works on a run in progress, on one from another machine and on one that
stopped half-way. torch is never imported; matplotlib is, inside the functions that draw.

    outcome.py       the one sentence and the key numbers
    panels.py        which charts there are, as plain data, and what each means; overlay.py: those of several runs
    charts.py        drawing them with matplotlib: inline SVG for the page, one PNG
    completions.py   held-out samples, extremes, and completions token by token
    page.py          the page, of one run or of several: page.html (jinja2) with page.css
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tinyrl.runs.records import read_run
from tinyrl.text import one_line
from tinyrl.tools.report.outcome import outcome, subtitle
from tinyrl.tools.report.page import overlay_html, page_html
from tinyrl.tools.report.panels import Panel, named, overlaid, panels_of

__all__ = ["write_overlay", "write_report"]


def write_report(run_dir: Path) -> list[Path]:
    """Write report.html and report.png into `run_dir` and return their paths.

    The same run gives the same bytes. Each file is replaced in one step, so a reader never sees half of one.

    Raises ValueError when `run_dir` is not a run or has no metrics yet, and OSError when it cannot be written to.
    """
    run = read_run(Path(run_dir))
    drawn = partial(page_html, run)
    return _write(Path(run_dir), panels_of(run), drawn, title=run.name, about=subtitle(run), outcome=outcome(run))


def write_overlay(run_dirs: list[Path], folder: Path) -> list[Path]:
    """Write report.html and report.png of several runs into `folder`, which must exist, and return their paths.

    Raises as write_report does, for each run; and ValueError for too many runs, or one twice.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; a report of several runs is written into one that exists.")
    if (folder / "metrics.jsonl").exists():
        raise ValueError(f"{folder} is a run's folder, whose own report would be lost; name another with --output.")
    runs = named([read_run(Path(run_dir)) for run_dir in run_dirs])
    said = "\n".join(f"{one.letter}  {one_line(one.name, 60)}: {one.outcome}" for one in runs)
    drawn = partial(overlay_html, runs)
    return _write(folder, overlaid(runs), drawn, title=f"{len(run_dirs)} runs", about="", outcome=said)


def _write(
    folder: Path, panels: list[Panel], page: Callable[[list[Panel], list[str]], str], **about: str
) -> list[Path]:
    import psutil

    from tinyrl.tools.report.charts import panel_svgs, picture_png  # matplotlib, half a second

    html, picture = page(panels, panel_svgs(panels)), picture_png(panels, **about)
    targets = [folder / "report.html", folder / "report.png"]
    for target, content in zip(targets, (html.encode("utf-8"), picture), strict=True):
        for path in folder.glob(f".{target.name}.*.tmp"):  # of a report that was killed while it wrote
            number = path.name.split(".")[-2]
            if number.isdigit() and not psutil.pid_exists(int(number)):
                path.unlink(missing_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    return targets
