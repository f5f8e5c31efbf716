"""The report page, of one run or of several: the values that page.html (jinja2) shows.

It loads nothing and runs nothing. The template escapes every value. The content security policy is a second defence:
under it a browser runs no script and loads no address, even if one got through.
"""

import functools
import html
import json
import shlex
from itertools import groupby, islice
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from tinyrl import __version__
from tinyrl.runs.records import RunRecords, Sample, number, read_last_tokens
from tinyrl.runs.tracking import flat
from tinyrl.text import Excerpt, excerpt, name_unseen, one_line
from tinyrl.tools.report.completions import extremes, same_prompts, token_view
from tinyrl.tools.report.outcome import first_to_last, key_figures, outcome, phases, show, show_seconds, subtitle, tiles
from tinyrl.tools.report.panels import Named, Panel, cells, picked

MOST_PROMPTS = 8
MOST_SETTINGS = 1000
_FILES = {
    "config.yaml": "every setting of the run, resolved; a recipe that repeats it",
    "env.json": "versions, device, threads, seed, command",
    "metrics.jsonl": "one line a step: every number in these charts",
    "samples.jsonl": "prompts and completions with rewards and advantages",
    "tokens.jsonl": "some completions token by token",
    "report.png": "these charts as one picture",
}


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


@functools.cache
def _environment() -> Environment:
    found = Environment(loader=PackageLoader("tinyrl.tools.report", "."), autoescape=True, trim_blocks=True)
    found.filters |= {"text": text_html, "line": one_line, "excerpt": excerpt, "show": show, "seconds": show_seconds}
    found.filters |= {"count": "{:,}".format, "subtitle": subtitle, "outcome": outcome}
    return found


def _page(panels: list[Panel], svgs: list[str], **values: Any) -> str:
    """Return the page as text. `svgs` belongs to `panels`: the inline SVG of each."""
    charts = list(zip(panels, svgs, (cell.width for cell in cells(len(panels))), strict=True))
    return _environment().get_template("page.html").render(charts=charts, version=__version__, **values)


def page_html(run: RunRecords, panels: list[Panel], svgs: list[str]) -> str:
    """Return the page of one run."""
    token_notes: list[str] = []
    tokens = read_last_tokens(run.path / "tokens.jsonl", token_notes)
    roles = {line.role for panel in panels for line in panel.lines}
    held_out = "held-out, sampled" if "greedy" in roles else "held-out"
    signs = [("train", "━", "training, every step (bold: smoothed)"), ("held", "●", held_out),
             ("greedy", "◆", "held-out, greedy")]  # fmt: skip
    files = [(name, about) for name, about in _FILES.items() if name == "report.png" or (run.path / name).is_file()]
    if run.checkpoints:
        weights = "the model's weights" if run.setting("lora.enabled") is False else "a plain PEFT adapter"
        files.append((f"checkpoints/{run.checkpoints[-1]}/", f"{weights}, and all that a resume needs"))
    return _page(
        panels,
        svgs,
        title=run.name,
        run=run,
        notes=[*run.notes, *token_notes],
        tiles=tiles(run),
        key=[sign for sign in signs if sign[0] in roles],
        **same_prompts(run.held_out),
        extremes=extremes(run.held_out),
        **token_view(tokens),
        phases=[(p, "other" if p.name == "other" else f"p{i}") for i, p in enumerate(phases(run), start=1)],
        measured=_measured(run),
        config=_settings(run.config),
        env=_settings(run.env),
        files=files,
        commands=_commands(run),
    )


def _measured(run: RunRecords) -> dict[str, Any] | None:
    """Return the table of held-out measurements by step; None where there are none."""
    each = [key for key in run.metric_names() if key.startswith("eval/reward/")]
    names = {key: name for key, (name, _) in key_figures([run]).items() if key.startswith("eval/")}
    names |= {key: one_line(key.removeprefix("eval/reward/"), 24) for key in each} if len(each) > 1 else {}
    steps = sorted({step for key in names for step, _ in run.finite(key)})
    rows = []
    for step, _ in picked([(step, 0.0) for step in steps]):
        values = [show(number(run.steps[step].get(key)), share=key == "eval/truncated") for key in names]
        intervals = [run.interval("eval/reward_ci", step) if key == "eval/reward_mean" else None for key in names]
        rows.append((step, list(zip(values, intervals, strict=True))))
    return {"names": ["Step", *names.values()], "rows": rows, "steps": len(steps)} if rows else None


def _commands(run: RunRecords) -> list[str]:
    folder, lines, planned = _quoted(run), [], run.setting("run.num_steps")
    if run.setting("method") in ("grpo", "ppo") and run.checkpoints:
        lines.append(f"tinyrl eval {folder} --vs start   # paired with where it started, with an interval")
    if run.checkpoints and isinstance(planned, int) and run.last_step < planned:
        lines.append(f"tinyrl train --resume {folder}   # goes on from {run.checkpoints[-1]}")
    if run.held_out.by_step:
        lines.append(f"tinyrl show {folder} --samples   # what was written at the last step, and what it scored")
    return [*lines, f"tinyrl report {folder}   # writes this page again"]


def _quoted(run: RunRecords) -> str:
    return shlex.quote(one_line(str(run.path), 300))


def overlay_html(runs: list[Named], panels: list[Panel], svgs: list[str]) -> str:
    """Return the page of several runs."""
    columns = key_figures([one.run for one in runs])
    figures = []
    for one in runs:
        seconds = sum(value for _, value in one.run.finite("time/total"))
        values = [first_to_last(one.run, key, share=metric.share) for key, (_, metric) in columns.items()]
        figures.append((one, values, show_seconds(seconds) if seconds else "–"))
    differences = differing([one.run.config for one in runs])
    every = [_quoted(run) for one in runs for run in one.seeds]
    first, *others = [_quoted(one.run) for one in runs]
    commands = [f"tinyrl report {' '.join(every)}   # writes this page again"]
    trained = all(one.run.setting("method") in ("grpo", "ppo") and one.run.checkpoints for one in runs)
    if trained and others and len({str(one.run.setting("task.name")) for one in runs}) == 1:
        commands.insert(0, f"tinyrl eval {' '.join(others)} --vs {first}   # judged alike, with win rates")
    return _page(
        panels,
        svgs,
        title=f"{sum(len(one.seeds) for one in runs)} runs",
        runs=runs,
        notes=[f"{one.letter}: {note}" for one in runs for run in one.seeds for note in run.notes],
        columns=["Steps", *(name for name, _ in columns.values()), "Time"],
        figures=figures,
        common={key: values for key, values in differences.items() if None not in values},
        others={key: values for key, values in differences.items() if None in values},
        prompts=_prompts(runs),
        commands=commands,
    )


def _prompts(runs: list[Named]) -> list[list[Sample]]:
    """Return the first prompts that all runs were held to, with the completion of each at its last evaluation. They are
    the same by place and text: runs on other data have other prompts at the same place.
    """
    last = [one.run.held_out.by_step[one.run.held_out.last_step] if one.run.held_out.by_step else {} for one in runs]
    each = [{(i, one.prompt.head, one.prompt.tail): one for i, one in sorted(samples.items())} for samples in last]
    shared = [prompt for prompt in each[0] if all(prompt in known for known in each)]
    return [[known[prompt] for known in each] for prompt in shared[:MOST_PROMPTS]]


def _settings(values: dict[str, Any]) -> dict[str, str]:
    """Return nested settings by section.key, as they are shown."""
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat(values).items()}
    return dict(islice(shown.items(), MOST_SETTINGS))


def differing(configs: list[dict[str, Any]]) -> dict[str, list[str | None]]:
    """Return the settings that are not the same in all, with the value in each; None where one has no such setting."""
    each = [_settings(config) for config in configs]
    found = {key: [known.get(key) for known in each] for known in each for key in known}
    return {key: values for key, values in found.items() if len(set(values)) > 1}
