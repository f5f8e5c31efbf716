"""The report page of several runs: one table of outcomes, their charts on top of each other, what their settings differ
in, and the prompts that all of them were held to.
"""

import shlex
from html import escape

from tinyrl import __version__
from tinyrl.report.document import charts_html, document
from tinyrl.report.markup import text_html
from tinyrl.report.outcome import outcome, show, show_seconds, subtitle
from tinyrl.report.overlay import Named
from tinyrl.report.panels import Panel
from tinyrl.report.samples import completion_html
from tinyrl.report.settings import differing
from tinyrl.runs.records import Sample
from tinyrl.text import excerpt, one_line

MOST_PROMPTS = 8
_COLUMNS = {
    "eval/reward_mean": "Reward",
    "eval/greedy/reward_mean": "Greedy",
    "eval/pass@1": "pass@1",
    "reward/mean": "Reward, training",
    "rewards/accuracy": "Accuracy",
    "eval/kl": "KL",
    "eval/entropy": "Entropy",
    "eval/mean_length": "Length",
}


def overlay_html(runs: list[Named], panels: list[Panel], svgs: list[list[str]]) -> str:
    """The whole page as text; `svgs` belongs to `panels`."""
    notes = "".join(f"<li>{one.letter}: {escape(note)}</li>" for one in runs for note in one.run.notes)
    return document(
        title_of(runs),
        f"""<header>
<h1>{escape(title_of(runs))}</h1>
<ul class="runs">
{"".join(_run(one) for one in runs)}</ul>
{f'<ul class="notes">{notes}</ul>' if notes else ""}
</header>
<main>
{_figures(runs)}
{charts_html(panels, svgs, key="".join(_mark(one, named=True) for one in runs))}
{_differences(runs)}
{_prompts(runs)}
{_next(runs)}
</main>
<footer>Written by tinyrl {escape(__version__)} from the files in these folders.</footer>""",
    )


def title_of(runs: list[Named]) -> str:
    """How many runs there are."""
    return f"{len(runs)} runs"


def outcomes_of(runs: list[Named]) -> str:
    """A line a run: its letter, its name and its outcome."""
    return "\n".join(f"{one.letter}  {one_line(one.run.name, 40)}: {outcome(one.run)}" for one in runs)


def _mark(one: Named, *, named: bool = False) -> str:
    name = f" {escape(one_line(one.run.name, 40))}" if named else ""
    return f'<span><b class="letter" style="color:var(--p{one.colour})">■</b> {one.letter}{name}</span>'


def _run(one: Named) -> str:
    about = f'<span class="muted">{escape(subtitle(one.run))}</span>'
    return f"<li>{_mark(one, named=True)} {about}<br>{escape(outcome(one.run))}</li>\n"


def _figures(runs: list[Named]) -> str:
    """First and last value of the key figures of each run."""
    columns = {key: name for key, name in _COLUMNS.items() if any(one.run.finite(key) for one in runs)}
    if "eval/reward_mean" in columns:
        columns.pop("reward/mean", None)
    rows = []
    for one in runs:
        cells = "".join(f'<td class="n">{_first_to_last(one, key)}</td>' for key in columns)
        seconds = sum(value for _, value in one.run.finite("time/total"))
        rows.append(
            f'<tr><td>{_mark(one)}</td><td class="n">{one.run.last_step:,}</td>{cells}'
            f'<td class="n">{show_seconds(seconds) if seconds else "–"}</td></tr>\n'
        )
    head = "".join(f'<th scope="col" class="n">{name}</th>' for name in ("Steps", *columns.values(), "Time"))
    return f"""<h2>What came out</h2>
<div class="scroll"><table><thead><tr><th scope="col">Run</th>{head}</tr></thead><tbody>
{"".join(rows)}</tbody></table></div>"""


def _first_to_last(one: Named, key: str) -> str:
    points = one.run.finite(key)
    if not points:
        return "–"
    share = key.endswith(("pass@1", "accuracy")) and all(0 <= value <= 1 for _, value in points)
    first, last = show(points[0][1], share=share), show(points[-1][1], share=share)
    return last if first == last else f'<span class="muted">{first} → </span>{last}'


def _differences(runs: list[Named]) -> str:
    """Every setting that is not the same in all runs; folded away, those that only some have, as of another method."""
    found = differing([one.run.config for one in runs])
    if not found:
        return '<h2>What differs</h2>\n<p class="muted">No setting: the runs have the same config.yaml.</p>'
    common = {key: values for key, values in found.items() if None not in values}
    others = {key: values for key, values in found.items() if None in values}
    table = _settings(runs, common) if common else '<p class="muted">No setting that all runs have.</p>'
    title = f"{len(others)} setting{'s' * (len(others) != 1)} that only some runs have"
    folded = f"<details><summary>{title}</summary><div>{_settings(runs, others)}</div></details>" if others else ""
    return f"<h2>What differs</h2>\n{table}{folded}"


def _settings(runs: list[Named], values: dict[str, list[str | None]]) -> str:
    head = "".join(f'<th scope="col">{_mark(one)}</th>' for one in runs)
    rows = "".join(
        f"<tr><td>{escape(one_line(key, 80))}</td>"
        + "".join(f"<td>{'–' if value is None else text_html(excerpt(value, 200, lines=4))}</td>" for value in each)
        + "</tr>\n"
        for key, each in values.items()
    )
    return f"""<div class="scroll"><table class="differing"><thead><tr><th scope="col">Setting</th>{head}</tr></thead>
<tbody>
{rows}</tbody></table></div>"""


def _prompts(runs: list[Named]) -> str:
    """The first prompts that all runs were held to, with what each wrote at its last evaluation."""
    last = [one.run.held_out.by_step[one.run.held_out.last_step] if one.run.held_out.by_step else {} for one in runs]
    same = set.intersection(*(set(_by_prompt(samples)) for samples in last))
    order = [prompt for prompt in _by_prompt(last[0]) if prompt in same][:MOST_PROMPTS]
    if not order:
        return ""
    head = "".join(f'<th scope="col">{_mark(one)}, step {one.run.held_out.last_step}</th>' for one in runs)
    rows = []
    for prompt in order:
        cells = "".join(
            f'<td data-label="{one.letter}">{completion_html(_by_prompt(samples)[prompt])}</td>'
            for one, samples in zip(runs, last, strict=True)
        )
        text = text_html(_by_prompt(last[0])[prompt].prompt)
        rows.append(f'<tr><td data-label="Prompt"><div class="text" dir="auto">{text}</div></td>{cells}</tr>\n')
    return f"""<h2>The same prompts</h2>
<p class="muted">The first held-out prompts that all runs have, in order and not picked.</p>
<div class="scroll"><table class="samples many"><thead><tr><th scope="col">Prompt</th>{head}</tr></thead>
<tbody>
{"".join(rows)}</tbody></table></div>"""


def _by_prompt(samples: dict[int, Sample]) -> dict[tuple[int, str, str], Sample]:
    """By place and text: runs on other data have other prompts at the same place."""
    return {(i, one.prompt.head, one.prompt.tail): one for i, one in sorted(samples.items())}


def _next(runs: list[Named]) -> str:
    names = " ".join(shlex.quote(one_line(str(one.run.path), 300)) for one in runs)
    lines = [f"tinyrl report {names}   # writes this page again"]
    trained = all(one.run.setting("method") in ("grpo", "ppo") and one.run.checkpoints for one in runs)
    if trained and len({str(one.run.setting("task.name")) for one in runs}) == 1:
        first, *others = (shlex.quote(one_line(str(one.run.path), 300)) for one in runs)
        lines.insert(0, f"tinyrl compare {' '.join(others)} --vs {first}   # judged alike, with win rates")
    return f"<h2>Next</h2>\n<pre>{escape(chr(10).join(lines))}</pre>"
