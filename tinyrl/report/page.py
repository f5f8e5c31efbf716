"""The report page: one HTML file that loads nothing, runs nothing, and shows the outcome first.

Everything a run wrote (texts, names, settings) passes through text_html(), or one_line() and escape(). The content
security policy is a second defence: under it a browser runs no script and loads no address, even if one got through.
"""

import reprlib
import shlex
from collections.abc import Iterator
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from tinyrl import __version__
from tinyrl.report.curves import picked
from tinyrl.report.markup import text_html
from tinyrl.report.outcome import Tile, outcome, phases, show, show_seconds, subtitle, tiles
from tinyrl.report.panels import Panel, cells
from tinyrl.report.reliability import reliability_html
from tinyrl.runs.records import Run, Sample, number
from tinyrl.text import Excerpt, excerpt, one_line

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
MOST_SAMPLES = 8
MOST_SETTINGS = 1000
_CUT = {"length": " · cut at the length limit", "turns": " · had no more turns"}
_FILES = {
    "config.yaml": "every setting of the run, resolved; a recipe that repeats it",
    "env.json": "versions, device, threads, seed, command",
    "metrics.jsonl": "one line a step: every number in these charts",
    "samples.jsonl": "prompts and completions with rewards and advantages",
    "report.png": "these charts as one picture",
}
_MEASURED = {
    "reward_mean": "Reward",
    "greedy/reward_mean": "Greedy",
    "pass@1": "pass@1",
    "kl": "KL",
    "entropy": "Entropy",
    "mean_length": "Length",
    "truncated": "Cut",
    "environment/turns": "Turns",
    "environment/invalid_calls": "Invalid calls",
}


def page_html(run: Run, panels: list[Panel], svgs: list[list[str]]) -> str:
    """The whole page as text. `svgs` belongs to `panels`: the inline SVG of each, wide and narrow for the first."""
    title = escape(run.name)
    style = Path(__file__).with_name("page.css").read_text("utf-8")
    notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}: tinyrl report</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p class="subtitle">{escape(subtitle(run))}</p>
<p class="outcome">{escape(outcome(run))}</p>
{f'<ul class="notes">{notes}</ul>' if notes else ""}
</header>
<main>
<dl class="tiles">{"".join(_tile(tile) for tile in tiles(run))}</dl>
{_charts(panels, svgs)}
{_samples(run)}
{reliability_html(run)}
{_time(run)}
{_held_out_table(run)}
{_details("Settings", run.config)}
{_details("Environment", run.env)}
{_files(run)}
{_commands(run)}
</main>
<footer>Written by tinyrl {escape(__version__)} from the files in this folder.</footer>
</body>
</html>
"""


def _tile(tile: Tile) -> str:
    before = f'<span class="was">{escape(tile.before)} → </span>' if tile.before else ""
    unit = f'<dd class="unit">{escape(tile.unit)}</dd>' if tile.unit else ""
    return f"<div><dt>{escape(tile.label)}</dt><dd>{before}{escape(tile.value)}</dd>{unit}</div>\n"


def _charts(panels: list[Panel], svgs: list[list[str]]) -> str:
    if not panels:
        return ""
    roles = {line.role for panel in panels for line in panel.lines}
    names = {
        "train": "training, every step (bold: smoothed)",
        "held": "held-out, sampled" if "greedy" in roles else "held-out",
        "greedy": "held-out, greedy",
    }
    marks = {"train": "━", "held": "●", "greedy": "◆"}
    key = "".join(
        f'<span><b class="{role}">{marks[role]}</b> {name}</span>' for role, name in names.items() if role in roles
    )
    figures = []
    for panel, variants, cell in zip(panels, svgs, cells(len(panels)), strict=True):
        if len(variants) == 2:
            wide, narrow = (svg.removeprefix("<svg") for svg in variants)
            variants = [f'<svg class="wide"{wide}', f'<svg class="narrow"{narrow}']
        caption = f"<figcaption><b>{escape(panel.title)}</b> <span>{escape(panel.unit)}</span></figcaption>"
        figures.append(f'<figure class="span{cell.width}">{caption}\n{"".join(variants)}</figure>\n')
    return f'<h2>How it went</h2>\n<p class="key">{key}</p>\n<div class="charts">\n{"".join(figures)}</div>'


def _samples(run: Run) -> str:
    if run.sample_steps is None:
        return ""
    first, last = run.sample_steps
    single = first == last
    indices = sorted(run.after if single else run.before.keys() & run.after.keys())[:MOST_SAMPLES]
    if not indices:
        return ""
    heading = f"Held-out prompts at step {last}" if single else "The same prompts, before and after"
    columns = [f"Completion at step {last}"] if single else [f"Before: step {first}", f"After: step {last}"]
    rows = []
    for index in indices:
        samples = [run.after[index]] if single else [run.before[index], run.after[index]]
        cells = "".join(_completion(sample, name) for sample, name in zip(samples, columns, strict=True))
        prompt = f'<td data-label="Prompt"><div class="text" dir="auto">{text_html(samples[-1].prompt)}</div></td>'
        rows.append(f"<tr>{prompt}{cells}</tr>\n")
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    counted = f"The first {len(indices)} held-out prompts" if len(indices) > 1 else "The first held-out prompt"
    return f"""<h2>{heading}</h2>
<p class="muted">{counted}, in order and not picked, with the first completion sampled for each.</p>
<table class="samples"><thead><tr><th scope="col" class="one">Prompt</th>{head}</tr></thead>
<tbody>
{"".join(rows)}</tbody></table>"""


def _completion(sample: Sample, label: str) -> str:
    cut = _CUT.get(sample.finish_reason, "")
    score = f'<span class="score">reward <b>{show(sample.reward)}</b>{cut}</span>'
    said = [_message(who, text, alone=len(sample.messages) == 1) for who, text in sample.messages]
    if sample.omitted:
        said.insert(len(said) // 2, f'<div><span class="cut">… {sample.omitted:,} messages left out …</span></div>')
    return f'<td data-label="{escape(label)}">{score}{"".join(said)}</td>'


def _message(who: str, text: Excerpt, *, alone: bool) -> str:
    """What one side said: with its name where there are two, and grey where the policy only read it."""
    shown = text_html(text) or '<span class="cut">empty</span>'
    name = "" if alone else f'<span class="who">{who}</span>'
    return f'{name}<div class="text{"" if who == "policy" else " read"}" dir="auto">{shown}</div>'


def _time(run: Run) -> str:
    found = phases(run)
    if not found:
        return ""
    roles = [f"var(--{'other' if phase.name == 'other' else f'p{i + 1}'})" for i, phase in enumerate(found)]
    bar = "".join(
        f'<i style="width:{phase.share:.2%};background:{role}"></i>' for phase, role in zip(found, roles, strict=True)
    )
    rows = "".join(
        f'<tr><td><span class="swatch" style="background:{role}"></span>{escape(phase.name)}</td>'
        f'<td class="n">{show_seconds(phase.seconds)}</td><td class="n">{phase.share:.0%}</td></tr>\n'
        for phase, role in zip(found, roles, strict=True)
    )
    return f"""<h2>Where the time went</h2>
<div class="bar" aria-hidden="true">{bar}</div>
<table class="phases"><thead><tr><th scope="col">Phase</th><th scope="col" class="n">Time</th>
<th scope="col" class="n">Share</th></tr></thead><tbody>
{rows}</tbody></table>"""


def _held_out_table(run: Run) -> str:
    each = [key.removeprefix("eval/") for key in run.metric_names() if key.startswith("eval/reward/")]
    rewards = {key: escape(one_line(key.removeprefix("reward/"), 24)) for key in each} if len(each) > 1 else {}
    names = {key: name for key, name in (_MEASURED | rewards).items() if run.finite(f"eval/{key}")}
    steps = sorted({step for key in names for step, _ in run.finite(f"eval/{key}")})
    if not steps:
        return ""
    rows = []
    for step, _ in picked([(step, 0.0) for step in steps]):
        cells = [f'<td class="n">{step}</td>']
        for key in names:
            pair = run.interval("eval/reward_ci", step) if key == "reward_mean" else None
            around = f' <span class="muted">({show(pair[0])} to {show(pair[1])})</span>' if pair else ""
            value = show(number(run.steps[step].get(f"eval/{key}")), share=key == "truncated")
            cells.append(f'<td class="n">{value}{around}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    head = "".join(f'<th scope="col" class="n">{name}</th>' for name in ("Step", *names.values()))
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{"".join(rows)}</tbody></table></div>'
    of = f": {len(rows)} of {len(steps)}, the others are in metrics.jsonl" if len(rows) < len(steps) else ""
    return f"<details><summary>Held-out measurements in numbers{of}</summary><div>{table}</div></details>"


def _flat(value: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Nested settings as ("section.key", value) pairs."""
    if isinstance(value, dict) and value and depth < 6:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    elif prefix:
        plain = {None: "null", True: "true", False: "false"}
        shown = plain[value] if value is None or isinstance(value, bool) else value
        yield prefix, shown if isinstance(shown, str) else _literal(shown)


def _literal(value: Any) -> str:
    short = reprlib.Repr()  # bounded, also for a list that holds itself
    short.maxlist = short.maxdict = 40
    short.maxstring = short.maxother = 400
    return short.repr(value)


def _details(title: str, values: dict[str, Any]) -> str:
    pairs = list(islice(_flat(values), MOST_SETTINGS))
    if not pairs:
        return ""
    rows = "".join(
        f"<tr><td>{escape(one_line(key, 80))}</td><td>{text_html(excerpt(value, 400, lines=8))}</td></tr>\n"
        for key, value in pairs
    )
    table = f'<table class="settings"><tbody>\n{rows}</tbody></table>'
    return f"<details><summary>{title}</summary><div>{table}</div></details>"


def _files(run: Run) -> str:
    found = [(name, said) for name, said in _FILES.items() if name == "report.png" or (run.path / name).is_file()]
    if run.checkpoints:
        whole = run.setting("lora.enabled") is False
        said = (
            "the model's weights, and all that a resume needs"
            if whole
            else "a plain PEFT adapter, and all that a resume needs"
        )
        found.append((f"checkpoints/{run.checkpoints[-1]}/", said))
    rows = "".join(f"<tr><td><code>{escape(name)}</code></td><td>{said}</td></tr>\n" for name, said in found)
    return f'<h2>Files</h2>\n<table class="settings"><tbody>\n{rows}</tbody></table>'


def _commands(run: Run) -> str:
    folder = shlex.quote(one_line(str(run.path), 300))
    lines = []
    if run.setting("method") in ("grpo", "ppo") and run.checkpoints:
        lines.append(f"tinyrl eval {folder} --vs start   # paired with where it started, with an interval")
    planned = run.setting("run.num_steps")
    if run.checkpoints and isinstance(planned, int) and run.last_step < planned:
        lines.append(f"tinyrl train --resume {folder}   # goes on from {run.checkpoints[-1]}")
    if run.sample_steps is not None:
        lines.append(f"tinyrl samples {folder}   # what was written at the last step, and what it scored")
    lines.append(f"tinyrl report {folder}   # writes this page again")
    return f"<h2>Next</h2>\n<pre>{escape(chr(10).join(lines))}</pre>"
