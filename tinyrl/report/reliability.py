"""The reliability of a reward model: what it predicted for held-out rows beside what turned out, by tenths of them."""

from tinyrl.report.outcome import show
from tinyrl.runs.records import Run, reliability_of

MOST_BINS = 20


def reliability_html(run: Run) -> str:
    """A table of the last evaluation that has one; empty where none has."""
    measured = [step for step, line in run.steps.items() if reliability_of(line)]
    if not measured:
        return ""
    step = max(measured)
    error = dict(run.finite("eval/ece")).get(step)
    rows = "".join(
        f'<tr><td class="n">{show(predicted)}</td><td class="n">{show(observed)}</td>'
        f'<td class="n">{show(observed - predicted)}</td><td class="n">{count:,}</td></tr>\n'
        for predicted, observed, count in reliability_of(run.steps[step])[:MOST_BINS]
    )
    head = "".join(f'<th scope="col" class="n">{name}</th>' for name in ("Predicted", "Turned out", "Off by", "Rows"))
    by = f"; on average it is off by {show(error)}" if error is not None else ""
    return f"""<h2>Reliability</h2>
<p class="muted">Held-out rows at step {step}, in order of the prediction{by}. Of pairs: how sure the model is of the
side it prefers, and how often that is the chosen one. Of labels: the probability of the good one. Of ratings: the
rating.</p>
<table><thead><tr>{head}</tr></thead><tbody>
{rows}</tbody></table>"""
