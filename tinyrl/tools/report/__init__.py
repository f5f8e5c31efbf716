"""The report of a run or of several: report.html (no JavaScript, nothing loaded from elsewhere) and report.png.

It reads run directories and nothing else, so it works on a run in progress, on one from another machine and on one that
stopped half-way. torch is never imported; matplotlib is, when charts are drawn. The template escapes every value. The
content security policy is a second defence: under it a browser runs no script and loads no address.

    panels.py                the one sentence, the key figures, and which charts there are, as plain data
    charts.py                drawing them with matplotlib: inline SVG for the page, one PNG
    thumbnails.py            small pictures of the images in prompts
    page.html and page.css   the page (jinja2)
"""

import html
import json
import math
import shlex
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from tinyrl import __version__
from tinyrl.formatting import format_seconds, typeset_number
from tinyrl.runs import records
from tinyrl.runs.checkpoint import checkpoint_name
from tinyrl.runs.folders import write_atomic
from tinyrl.runs.metrics import meaning_of
from tinyrl.runs.records import HeldOut, RunRecords, origin_of, since_start, subsample, to_float
from tinyrl.runs.tracking import flat
from tinyrl.text import Excerpt, excerpt, name_unseen, one_line
from tinyrl.tools.report import panels as figures
from tinyrl.tools.report.panels import Panel, RunGroup, SeedTable, cells, group_runs, overlaid, panels_of, seed_table
from tinyrl.tools.report.thumbnails import Thumbnails

MOST_PROMPTS = 8
MOST_STEPS = 16  # that can be chosen
MOST_PICKED = 3
PIECE_CHARACTERS = 200
LEVELS = 5  # of a token's colour, to either side of 0


def write_report(run_dir: Path) -> list[Path]:
    """Write report.html and report.png into `run_dir` and return their paths. The same run gives the same bytes.

    Raises ValueError when `run_dir` is not a run or has no metrics yet, and OSError when it cannot be written to.
    """
    run = records.read_run(Path(run_dir))
    about = {"title": run.name, "about": figures.subtitle(run), "outcome": figures.outcome(run)}
    return _write(Path(run_dir), panels_of(run), run_values(run), **about)


def write_overlay(run_dirs: list[Path], folder: Path) -> list[Path]:
    """Write report.html and report.png of several runs into `folder`, and return their paths.

    Raises as write_report does, for each run; and ValueError for too many runs.
    """
    groups = group_runs([records.read_run(Path(run_dir)) for run_dir in run_dirs])
    text = "\n".join(f"{one.letter}  {one_line(one.name, 60)}: {figures.outcome(one.run)}" for one in groups)
    folder.mkdir(parents=True, exist_ok=True)
    return _write(folder, overlaid(groups), overlay_values(groups), title=f"{len(run_dirs)} runs", outcome=text)


def seed_tables(run_dirs: list[Path]) -> list[SeedTable]:
    """Return the table of each setting of which there are several seeds."""
    groups = group_runs([records.read_run(Path(run_dir)) for run_dir in run_dirs])
    return [table for group in groups if (table := seed_table(group)) is not None]


def _write(folder: Path, panels: list[Panel], values: dict[str, Any], **about: str) -> list[Path]:
    """Draw both files and write them."""
    from tinyrl.tools.report.charts import panel_svgs, picture_png  # matplotlib, half a second

    charts = list(zip(panels, panel_svgs(panels), cells(len(panels)), strict=True))
    page = page_html(charts, title=about["title"], **values)
    picture = picture_png(panels, **about)
    write_atomic(folder / "report.html", page)
    write_atomic(folder / "report.png", picture)
    return [folder / "report.html", folder / "report.png"]


# ---- the page ----


def text_html(text: str | Excerpt) -> Markup:
    """Return HTML of a text that a model or a data set wrote: escaped, invisible characters written as U+XXXX."""
    if isinstance(text, Excerpt):
        if not text.omitted:
            return text_html(text.head)
        note = Markup('<span class="cut">… {:,} characters left out …</span>').format(text.omitted)
        return Markup("\n").join((text_html(text.head), note, text_html(text.tail)))
    parts = []
    for name, run in groupby(text.replace("\r\n", "\n"), name_unseen):
        characters = list(run)
        times = f"×{len(characters)}" if len(characters) > 1 else ""
        parts.append(f'<span class="unseen">{name}{times}</span>' if name else html.escape("".join(characters)))
    return Markup("".join(parts))  # noqa: S704 - escaped above


def page_html(charts: list[Any], **values: Any) -> str:
    """Return the page of one run or of several. charts: of each panel itself, its inline SVG and its cell."""
    environment = Environment(loader=PackageLoader("tinyrl.tools.report", "."), autoescape=True, trim_blocks=True)
    environment.filters |= {"text": text_html, "line": one_line, "excerpt": excerpt, "quote": shlex.quote}
    environment.filters |= {"show": typeset_number, "seconds": format_seconds, "count": "{:,}".format}
    environment.filters |= {"subtitle": figures.subtitle, "outcome": figures.outcome, "meaning": meaning_of}
    environment.filters["first_to_last"] = figures.first_to_last
    environment.filters["thumbnails"] = Thumbnails()
    roles = {line.role for panel, *_ in charts for line in panel.lines}
    return environment.get_template("page.html").render(version=__version__, charts=charts, roles=roles, **values)


def run_values(run: RunRecords) -> dict[str, Any]:
    """Return what the page shows of one run."""
    notes = list(run.notes)
    tokens = records.read_last_tokens(run.path / "tokens.jsonl", notes)
    phases = {name: sum(phase.values()) for name, phase in figures.phase_seconds(run).items()}
    values = {"run": run, "notes": notes, "tiles": figures.tiles(run), "phases": phases}
    values |= {"config": _flat(run.config), "env": _flat(run.env), "start": _start_of(run)}
    return values | completions(run.held_out, run.env) | token_view(tokens)


def _start_of(run: RunRecords) -> str:
    """Return how `tinyrl eval --vs` names what a run started with: of a fork its checkpoint, while it has that."""
    origin = origin_of(run.env)
    is_there = origin is not None and checkpoint_name(origin.step) in run.checkpoints
    return f"{run.path}@{origin.step}" if origin is not None and is_there else "start"


def overlay_values(groups: list[RunGroup]) -> dict[str, Any]:
    """Return what the page shows of several runs."""
    return {
        "runs": groups,
        "notes": [f"{group.letter}: {note}" for group in groups for run in group.seeds for note in run.notes],
        "columns": figures.key_figures([group.run for group in groups]),
        "seeds": [table for group in groups if (table := seed_table(group)) is not None],
        "differences": differing([group.run.config for group in groups]),
    }


def _flat(values: dict[str, Any]) -> dict[str, str]:
    """Return nested settings by section.key, as they are shown."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat(values).items()}


def differing(configs: list[dict[str, Any]]) -> dict[str, list[str | None]]:
    """Return the settings that are not the same in all, with the value in each; None where one has no such setting."""
    each = [_flat(config) for config in configs]
    found = {key: [known.get(key) for known in each] for known in each for key in known}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


# ---- completions ----


def completions(held_out: HeldOut, env: dict[str, Any]) -> dict[str, Any]:
    """Return the first prompts of both the first step (of a fork: its start) and the last, with what was written before
    and at each step to choose; and the extremes of the last step, each with what was written before. env: of env.json.
    """
    if not held_out.by_step:
        return {}
    first = since_start([*held_out.by_step], env)[0]
    last = max(held_out.by_step)
    before = held_out.by_step[first]
    after = held_out.by_step[last]
    steps = subsample([step for step in held_out.by_step if step > first], MOST_STEPS) or [first]
    both = sorted(before.keys() & after.keys())
    same = [(before[i], [held_out.by_step[step].get(i) for step in steps]) for i in both[:MOST_PROMPTS]]
    scored = [sample for sample in held_out.last if math.isfinite(sample.reward)]
    changes = {i: change for i in both if (change := abs(after[i].reward - before[i].reward)) > 0}
    extremes = {
        "Worst": sorted(scored, key=lambda sample: sample.reward),
        "Best": sorted(scored, key=lambda sample: -sample.reward),
        "Longest": sorted(held_out.last, key=lambda sample: -sample.length),
        "Most changed": [after[i] for i in sorted(changes, key=lambda i: -changes[i])],
    }
    extremes = {name: [(before.get(one.prompt_index), one) for one in samples[:MOST_PICKED]]
                for name, samples in extremes.items() if samples}  # fmt: skip
    return {"first": first, "last": last, "changes": first != last, "steps": steps, "same": same, "extremes": extremes}


# Quantities by which a token can be coloured, by the letters of page.html's classes.
ADVANTAGE = "a"
CHANGE = "d"  # of the log-probability, by the update
FROM_REFERENCE = "k"
LOGPROB = "s"
TEACHER = "t"
VALUE = "v"
REWARD = "w"
QUANTITIES = (ADVANTAGE, CHANGE, FROM_REFERENCE, LOGPROB, TEACHER, VALUE, REWARD)


def quantities_of(token: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers by which a token can be coloured; none for one that the policy only read."""
    if token.get("chosen") is False:
        return {}
    number = {name: to_float(token.get(name)) for name in records.NUMBERS}
    found = {
        ADVANTAGE: number["advantage"],
        CHANGE: number["new"] - number["old"],
        FROM_REFERENCE: number["old"] - number["ref"],
        LOGPROB: number["old"],
        TEACHER: number["teacher"],
        VALUE: number["value"],
        REWARD: number["reward"],
    }
    return {quantity: value for quantity, value in found.items() if math.isfinite(value) and value}


def classes_of(token: dict[str, Any], scales: dict[str, float]) -> str:
    """Return the classes of page.html that colour a token: a letter, m below 0, and a level up to LEVELS."""
    classes = list[str]()
    for quantity, value in quantities_of(token).items():
        level = round(max(-1.0, min(1.0, value / scales[quantity])) * LEVELS)
        sign = "m" if level < 0 else ""
        if level:
            classes.append(f"{quantity}{sign}{abs(level)}")
    if token.get("chosen") is False:
        classes.append("unchosen")
    return " ".join(classes)


def token_view(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the completions with a class for the colour of each token, and the scale of each quantity: the 95th
    percentile of its sizes has the strongest colour, LEVELS. Nothing where no token was recorded.
    """
    each = [quantities_of(token) for one in samples for token in one["tokens"]]
    sizes = {key: sorted(abs(found[key]) for found in each if key in found) for key in QUANTITIES}
    scales = {key: of[math.ceil(0.95 * len(of)) - 1] for key, of in sizes.items() if of}
    shown = []
    for sample in samples:
        pieces = []
        for token in sample["tokens"]:
            known = {name: value for name in records.NUMBERS if math.isfinite(value := to_float(token.get(name)))}
            numbers = " · ".join(f"{name} {typeset_number(value)}" for name, value in known.items())
            piece = excerpt(str(token.get("piece", "")), PIECE_CHARACTERS)
            pieces.append((piece, classes_of(token, scales), numbers, known.get("reward")))
        prompt = excerpt(str(sample.get("prompt", "")), records.PROMPT_CHARACTERS)
        images = found if isinstance(found := sample.get("images"), list) else []
        about = {"prompt": prompt, "images": images, "reward": to_float(sample.get("reward"))}
        shown.append({**sample, **about, "tokens": pieces})
    return {"tokens": shown, "scales": scales, "levels": LEVELS} if any(each) else {}
