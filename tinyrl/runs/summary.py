"""The summary that is printed when a run has ended."""

from __future__ import annotations

from tinyrl.runs.checkpoint import list_checkpoints
from tinyrl.runs.records import read_steps
from tinyrl.runs.run_dir import RunDir


def summary(run: RunDir) -> str:
    """Before and after on held-out prompts, where the files are, and what to type next."""
    lines = list(read_steps(run.metrics, []).values())
    evaluated = [line for line in lines if any(key.startswith("eval/") for key in line)]
    text = []
    if len(evaluated) >= 2:
        first, last = evaluated[0], evaluated[-1]
        rows = [
            ("held-out reward, mean", "eval/reward_mean"),
            ("held-out reward, median", "eval/reward_median"),
            ("pass@1, sampled", "eval/pass@1"),
            ("pass@1, greedy", "eval/greedy/pass@1"),
            ("KL to the reference, nats", "eval/kl"),
            ("loss, held-out", "eval/loss"),
            ("accuracy, held-out", "eval/accuracy"),
        ]
        shown = [(label, first[key], last[key]) for label, key in rows if key in first and key in last]
        text += [
            f"{'step ' + str(first['step']) + ' -> ' + str(last['step']):28}",
            *(f"  {label:26} {_number(a)} -> {_number(b)}" for label, a, b in shown),
        ]
    newest = list_checkpoints(run.checkpoints)
    text += ["", f"files    {run.path}/  (report.html, report.png, metrics.jsonl, samples.jsonl)"]
    if newest:
        text += [f"adapter  {newest[-1]}/"]
    if "reward/mean" in lines[-1]:
        text += [f"next     tinyrl eval {run.path} --vs base"]
    return "\n".join(text)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
