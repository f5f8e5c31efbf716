"""The report page of one run: the outcome first, then charts, samples, tokens, time, numbers, settings, commands."""

import shlex
from html import escape

from tinyrl import __version__
from tinyrl.report.curves import picked
from tinyrl.report.document import charts_html, document
from tinyrl.report.outcome import Tile, outcome, phases, show, show_seconds, subtitle, tiles
from tinyrl.report.panels import Panel
from tinyrl.report.reliability import reliability_html
from tinyrl.report.samples import samples_html
from tinyrl.report.settings import settings_html
from tinyrl.report.tokens import tokens_html
from tinyrl.runs.lines import number, read_last_tokens
from tinyrl.runs.records import Run
from tinyrl.text import one_line

_FILES = {
    "config.yaml": "every setting of the run, resolved; a recipe that repeats it",
    "env.json": "versions, device, threads, seed, command",
    "metrics.jsonl": "one line a step: every number in these charts",
    "samples.jsonl": "prompts and completions with rewards and advantages",
    "tokens.jsonl": "some completions token by token",
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
    token_notes: list[str] = []
    tokens = read_last_tokens(run.path / "tokens.jsonl", token_notes)
    notes = "".join(f"<li>{escape(note)}</li>" for note in (*run.notes, *token_notes))
    return document(
        run.name,
        f"""<header>
<h1>{escape(run.name)}</h1>
<p class="subtitle">{escape(subtitle(run))}</p>
<p class="outcome">{escape(outcome(run))}</p>
{f'<ul class="notes">{notes}</ul>' if notes else ""}
</header>
<main>
<dl class="tiles">{"".join(_tile(tile) for tile in tiles(run))}</dl>
{charts_html(panels, svgs, key=_key(panels))}
{samples_html(run.held_out)}
{tokens_html(tokens)}
{reliability_html(run)}
{_time(run)}
{_held_out_table(run)}
{settings_html("Settings", run.config)}
{settings_html("Environment", run.env)}
{_files(run)}
{_commands(run)}
</main>
<footer>Written by tinyrl {escape(__version__)} from the files in this folder.</footer>""",
    )


def _tile(tile: Tile) -> str:
    before = f'<span class="was">{escape(tile.before)} → </span>' if tile.before else ""
    unit = f'<dd class="unit">{escape(tile.unit)}</dd>' if tile.unit else ""
    return f"<div><dt>{escape(tile.label)}</dt><dd>{before}{escape(tile.value)}</dd>{unit}</div>\n"


def _key(panels: list[Panel]) -> str:
    """What the colours and marks mean, as far as the panels use them."""
    roles = {line.role for panel in panels for line in panel.lines}
    names = {
        "train": "training, every step (bold: smoothed)",
        "held": "held-out, sampled" if "greedy" in roles else "held-out",
        "greedy": "held-out, greedy",
    }
    marks = {"train": "━", "held": "●", "greedy": "◆"}
    return "".join(
        f'<span><b class="{role}">{marks[role]}</b> {name}</span>' for role, name in names.items() if role in roles
    )


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
    if run.held_out.by_step:
        lines.append(f"tinyrl samples {folder}   # what was written at the last step, and what it scored")
    lines.append(f"tinyrl report {folder}   # writes this page again")
    return f"<h2>Next</h2>\n<pre>{escape(chr(10).join(lines))}</pre>"
