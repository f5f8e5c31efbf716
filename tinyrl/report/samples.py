"""Held-out completions on the page: the same prompts at every step, and the extremes of the last one.

The step is chosen with radio buttons, which a style sheet alone can follow: arrow keys go from step to step.
"""

import math

from tinyrl.report.markup import text_html
from tinyrl.report.outcome import show
from tinyrl.runs.records import HeldOut, Sample
from tinyrl.text import Excerpt

MOST_SAMPLES = 8
MOST_STEPS = 16  # that can be chosen
MOST_PICKED = 3
_CUT = {"length": " · cut at the length limit", "turns": " · had no more turns"}


def samples_html(held_out: HeldOut) -> str:
    """Both sections; empty where there are no samples."""
    return browser_html(held_out) + picked_html(held_out) if held_out.by_step else ""


def browser_html(held_out: HeldOut) -> str:
    """The first prompts that both the first and the last step have, before and at a step that the reader chooses."""
    first, last = held_out.first_step, held_out.last_step
    before, after = held_out.by_step[first], held_out.by_step[last]
    indices = sorted(before.keys() & after.keys())[:MOST_SAMPLES]
    if not indices:
        return ""
    steps = shown_steps([step for step in held_out.by_step if step > first]) or [first]
    rows = []
    for index in indices:
        then = "" if last == first else f'<td data-label="Before: step {first}">{completion_html(before[index])}</td>'
        later = "".join(_at_step(i, step, held_out.by_step[step].get(index)) for i, step in enumerate(steps))
        prompt = f'<td data-label="Prompt"><div class="text" dir="auto">{text_html(after[index].prompt)}</div></td>'
        rows.append(f"<tr>{prompt}{then}<td>{later}</td></tr>\n")
    counted = f"The first {len(indices)} held-out prompts" if len(indices) > 1 else "The first held-out prompt"
    head = "".join(f'<th scope="col" class="at at{i}">{_heading(step, first)}</th>' for i, step in enumerate(steps))
    then = "" if last == first else f'<th scope="col">Before: step {first}</th>'
    heading = f"Held-out prompts at step {last}" if last == first else "The same prompts, before and after"
    return f"""<h2>{heading}</h2>
<p class="muted">{counted}, in order and not picked, with the first completion sampled for each.</p>
<div class="browser">
{_choice(steps)}<table class="samples"><thead><tr><th scope="col" class="one">Prompt</th>{then}{head}</tr></thead>
<tbody>
{"".join(rows)}</tbody></table>
</div>
"""


def shown_steps(steps: list[int]) -> list[int]:
    """At most MOST_STEPS of them: the first, the last, and those nearest to an even spacing."""
    if len(steps) <= MOST_STEPS:
        return steps
    first, last = steps[0], steps[-1]
    wanted = [first + (last - first) * i / (MOST_STEPS - 1) for i in range(MOST_STEPS)]
    return sorted({min(steps, key=lambda step: abs(step - target)) for target in wanted})


def _heading(step: int, first: int) -> str:
    return f"Completion at step {step}" if step == first else f"After: step {step}"


def _choice(steps: list[int]) -> str:
    """Radio buttons, the last one chosen, and the rules by which the chosen step is shown."""
    if len(steps) == 1:
        return "<style>.at0 { display: revert; }</style>\n"
    buttons = "".join(
        f'<input type="radio" name="at" id="at{i}"{" checked" if i == len(steps) - 1 else ""}>'
        f'<label for="at{i}">{step:,}</label>\n'
        for i, step in enumerate(steps)
    )
    rules = ",\n".join(f"#at{i}:checked ~ table .at{i}" for i in range(len(steps)))
    return f'<style>{rules} {{ display: revert; }}</style>\n<span class="muted">After step</span>\n{buttons}'


def _at_step(number: int, step: int, sample: Sample | None) -> str:
    shown = completion_html(sample) if sample else '<span class="cut">not sampled</span>'
    return f'<div class="at at{number}" data-label="Step {step}">{shown}</div>'


def completion_html(sample: Sample) -> str:
    """What was written, its reward, and why it ended if that was not its own end."""
    cut = _CUT.get(sample.finish_reason, "")
    score = f'<span class="score">reward <b>{show(sample.reward)}</b>{cut}</span>'
    said = [_message(who, text, alone=len(sample.messages) == 1) for who, text in sample.messages]
    if sample.omitted:
        said.insert(len(said) // 2, f'<div><span class="cut">… {sample.omitted:,} messages left out …</span></div>')
    return f"{score}{''.join(said)}"


def _message(who: str, text: Excerpt, *, alone: bool) -> str:
    """What one side said: with its name where there are two, and grey where the policy only read it."""
    shown = text_html(text) or '<span class="cut">empty</span>'
    name = "" if alone else f'<span class="who">{who}</span>'
    return f'{name}<div class="text{"" if who == "policy" else " read"}" dir="auto">{shown}</div>'


def picked_html(held_out: HeldOut) -> str:
    """The extremes of the last step, each kind folded away."""
    kinds = [(name, picked) for name, picked in extremes(held_out).items() if picked]
    if not kinds:
        return ""
    folds = "".join(
        f"<details><summary>{name}</summary><div>{_table(samples, held_out)}</div></details>\n"
        for name, samples in kinds
    )
    counted = f"{len(held_out.last):,} completion{'s' * (len(held_out.last) != 1)}"
    return f"""<h2>Extremes at step {held_out.last_step}</h2>
<p class="muted">Of {counted}, picked by what the heading says: they show what can happen, not what is usual.</p>
{folds}"""


def extremes(held_out: HeldOut) -> dict[str, list[Sample]]:
    """Worst, best, longest and most changed of the last step; the same completion may be in several of them.

    Most changed: the first sample of prompts whose reward differs most from that of the first step.
    """
    scored = [sample for sample in held_out.last if math.isfinite(sample.reward)]
    before = held_out.by_step[held_out.first_step] if held_out.first_step != held_out.last_step else {}
    changed = {
        index: abs(sample.reward - before[index].reward)
        for index, sample in held_out.by_step[held_out.last_step].items()
        if index in before and before[index].written != sample.written
    }
    by_change = sorted((index for index in changed if changed[index] > 0), key=lambda index: (-changed[index], index))
    after = held_out.by_step[held_out.last_step]
    return {
        "Worst": sorted(scored, key=lambda sample: sample.reward)[:MOST_PICKED],
        "Best": sorted(scored, key=lambda sample: -sample.reward)[:MOST_PICKED],
        "Longest": sorted(held_out.last, key=lambda sample: -sample.length)[:MOST_PICKED],
        "Most changed": [after[index] for index in by_change[:MOST_PICKED]],
    }


def _table(samples: list[Sample], held_out: HeldOut) -> str:
    """Prompt, what the first sample of that prompt was before, and the sample."""
    first, last = held_out.first_step, held_out.last_step
    before = held_out.by_step[first] if first != last else {}
    names = [f"Before: step {first}", f"After: step {last}"] if before else [f"Completion at step {last}"]
    rows = []
    for sample in samples:
        then = before.get(sample.prompt_index)
        shown = [completion_html(then) if then else '<span class="cut">not sampled</span>'] if before else []
        shown.append(completion_html(sample))
        prompt = f'<td data-label="Prompt"><div class="text" dir="auto">{text_html(sample.prompt)}</div></td>'
        cells = "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in zip(names, shown, strict=True))
        rows.append(f"<tr>{prompt}{cells}</tr>\n")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return f"""<table class="samples"><thead><tr><th scope="col" class="one">Prompt</th>{head}</tr></thead><tbody>
{"".join(rows)}</tbody></table>"""
