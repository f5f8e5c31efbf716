"""The outcome of a run in words and numbers: one sentence, the key numbers, and where the time went. No HTML."""

import math
from statistics import fmean, median
from typing import NamedTuple

from tinyrl.runs.metrics import TABLE, Metric
from tinyrl.runs.records import Points, RunRecords
from tinyrl.text import one_line

ROUNDING_ERROR = 1e-12
MOST_PHASES = 5  # more colours cannot be told apart
TITLES = {"grpo": "GRPO", "ppo": "PPO", "sft": "SFT", "reward": "Reward model", "dpo": "DPO"}


class Tile(NamedTuple):
    """A key number: `before` is empty when there is nothing to compare with."""

    label: str
    value: str
    before: str = ""
    unit: str = ""


class Phase(NamedTuple):
    name: str
    seconds: float
    share: float


def show(value: float, *, share: bool = False) -> str:
    """A number for people: three digits (two below 0.001), a real minus sign, 0 for what rounding errors leave, a dash
    for NaN. `share`: as per cent, one decimal.
    """
    if not math.isfinite(value):
        return "–"
    if share:
        return "< 0.1 %" if 0 < value < 0.0005 else f"{value * 100:.1f}".removesuffix(".0") + " %"
    size = abs(value)
    if size < ROUNDING_ERROR:
        text = "0"
    elif value == int(value) and size < 100_000:
        text = f"{int(value):,}"
    elif size < 0.0001 or size >= 1e9:
        text = short_power(f"{value:.1e}")
    elif size < 0.001:
        text = f"{value:.5f}"
    elif size >= 99.95:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{3 if size < 0.9995 else 2 if size < 9.995 else 1}f}"
    return text.replace("-", "\u2212")


def short_power(text: str) -> str:
    """5.0e-05 as people write it: 5e-5."""
    digits, _, power = text.partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}" if power else text


def show_seconds(seconds: float) -> str:
    """A duration for people: 8.4 s, 1 min 32 s, 2 h 05 min."""
    if seconds < 59.95:
        return f"{show(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def subtitle(run: RunRecords) -> str:
    method = str(run.setting("method") or "")
    parts = [TITLES.get(method, one_line(method, 20))]
    task, model, planned = run.setting("task.name"), run.setting("model.path"), run.setting("run.num_steps")
    parts += [f"task {one_line(str(task), 40)}"] if task else []
    parts += [f"model {one_line(str(model), 60)}"] if model else []
    forked_from = run.setting("run.forked_from")
    parts += [f"forked from {one_line(str(forked_from), 60)}"] if forked_from else []
    if not isinstance(planned, int) or isinstance(planned, bool):
        parts.append(f"{_steps(run.last_step)} so far")
    elif run.last_step >= planned:
        parts.append(f"all {_steps(planned)}" if planned > 1 else "1 step")
    else:
        parts.append(f"{run.last_step:,} of {_steps(planned)} so far")
    return " · ".join(part for part in parts if part)


def outcome(run: RunRecords) -> str:
    """Return one sentence: the held-out score before and after with its interval, and the KL paid for it."""
    if points := run.finite("eval/reward_mean"):
        return _held_out_reward(run, points)
    losses = [key for key in run.metric_names() if key == "loss" or key.startswith("loss/")]
    known = {"reward/mean": "reward", "rewards/accuracy": "preference accuracy"} | dict.fromkeys(losses[:1], "loss")
    for key, label in known.items():
        held, training = run.finite(held_out_key(run, key)), run.finite(key)
        if held or training:
            return _training_metric(held, training, label, "lower is better" if label == "loss" else "higher is better")
    return f"{_steps(run.last_step)} recorded; no reward, accuracy or loss among the metrics yet."


def _held_out_reward(run: RunRecords, points: Points) -> str:
    (first, start), (last, end) = points[0], points[-1]
    before, after = run.interval("eval/reward_ci", first), run.interval("eval/reward_ci", last)
    few = after is None and isinstance(run.steps[last].get("eval/reward_ci"), list)
    interval = "not enough prompts for an interval; " if few else ""
    interval = f"95 % interval {show(after[0])} to {show(after[1])}; " if after else interval
    aside = f"{interval}higher is better"
    if len(points) == 1:
        return f"Held-out reward is {show(end)} at step {last} ({aside}); it was measured once so far."
    overlap = before is not None and after is not None and before[0] <= after[1] and after[0] <= before[1]
    caution = ", too little to call because the intervals overlap" if overlap and start != end else ""
    held_out, training, paid = dict(run.finite("eval/kl")), run.finite("objective/kl"), ""
    if last in held_out:
        paid = f", at a KL of {show(held_out[last])} nats per response"
    elif training:
        paid = f", at a KL of {show(training[-1][1])} nats per response in training"
    change = _change(start, end, since=first, unsure=overlap or few)
    return f"Held-out reward {change} in {_steps(last - first)} ({aside}){caution}{paid}."


def _training_metric(held: Points, points: Points, label: str, better: str) -> str:
    if len(held) > 1:
        (first, start), (last, end) = held[0], held[-1]
        return f"Held-out {label} {_change(start, end, since=first)} in {_steps(last - first)} ({better})."
    if len(points) < 2:
        step, value = (points or held)[0]
        return f"{label.capitalize()} is {show(value)} at step {step} ({better}); it was measured once so far."
    window = min(5, len(points) // 2)
    start, end = fmean(value for _, value in points[:window]), fmean(value for _, value in points[-window:])
    means = f"means of the first and last {window} steps; " if window > 1 else ""
    change = f"Training {label} {_change(start, end)} by step {points[-1][0]:,}"
    return f"{change} ({means}{better}); no held-out comparison."


def _change(start: float, end: float, *, since: int = 0, unsure: bool = False) -> str:
    if start == end:
        return f"stayed at {show(end)}"
    verb = "went" if unsure else "rose" if end > start else "fell"
    return f"{verb} from {show(start)}{f' at step {since:,}' if since else ''} to {show(end)}"


def held_out_key(run: RunRecords, key: str) -> str:
    """Return the held-out counterpart of a training metric: eval/loss/nll or eval/nll for loss/nll."""
    return next((name for name in (f"eval/{key}", f"eval/{key.rpartition('/')[2]}") if run.finite(name)), f"eval/{key}")


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


def tiles(run: RunRecords) -> list[Tile]:
    """The key numbers, most important first; only those that the run measured."""
    found = []
    for key, (name, metric) in key_figures([run]).items():
        if key != "eval/pass@1" or not reward_is_pass(run):
            before, after = first_to_last(run, key, share=metric.share)
            found.append(Tile(name, after, before, metric.unit))
    seconds = [value for _, value in run.finite("time/total") if value > 0]
    if seconds:
        found.append(Tile("Time in steps", show_seconds(sum(seconds)), unit=f"{show_seconds(median(seconds))} a step"))
    if rates := [value for _, value in run.finite("tokens_per_second")]:
        found.append(Tile("Speed", show(median(rates)), unit="tokens a second"))
    if memory := [value for _, value in run.finite("memory/peak_gb")]:
        found.append(Tile("Peak memory", show(max(memory)), unit="GB"))
    return found


def key_figures(runs: list[RunRecords]) -> dict[str, tuple[str, Metric]]:
    """The metrics with a label that some of the runs have, each by one key: held out, or else that of training."""
    found: dict[str, tuple[str, Metric]] = {}
    for metric in TABLE:
        training, held_out = metric.keys
        for key, name in ((held_out, metric.label), (training, f"{metric.label}, training")):
            if metric.label and any(run.finite(key) for run in runs):
                found[key] = (name, metric)
                break
    return found


def first_to_last(run: RunRecords, key: str, *, share: bool) -> tuple[str, str]:
    """First and last value of a key figure; the first is empty where both look the same."""
    points = run.finite(key)
    share = share and all(0 <= value <= 1 for _, value in points)
    first, last = [show(value, share=share) for _, value in (points[0], points[-1])] if points else ("", "–")
    return "" if first == last else first, last


def reward_is_pass(run: RunRecords) -> bool:
    """Whether pass@1 equals the reward, as with a reward of 0 or 1: then one of them is enough."""
    rewards, passes = dict(run.finite("eval/reward_mean")), dict(run.finite("eval/pass@1"))
    return rewards.keys() == passes.keys() and all(abs(rewards[step] - passes[step]) < 1e-9 for step in rewards)


def phases(run: RunRecords) -> list[Phase]:
    totals = {name: sum(points.values()) for name, points in phase_seconds(run).items()}
    whole = sum(totals.values())
    return [Phase(name, seconds, seconds / whole) for name, seconds in totals.items()]


def phase_seconds(run: RunRecords) -> dict[str, dict[int, float]]:
    """{phase: {step: seconds}} from time/<phase>, the longest first, at most MOST_PHASES of them.

    "other" is last: shorter phases, and the part of time/total (which excludes evaluation) that no phase covers.
    """
    keys = [name for name in run.metric_names() if name.startswith("time/") and name.count("/") == 1]
    found = {key.removeprefix("time/"): {step: max(0.0, value) for step, value in run.finite(key)} for key in keys}
    total = found.pop("total", {})
    parts = [phase for name, phase in found.items() if name != "evaluation"]
    other = {step: value - sum(part.get(step, 0.0) for part in parts) for step, value in total.items()}
    other = {step: value for step, value in other.items() if value > 0}
    ordered = sorted(found, key=lambda name: -sum(found[name].values()))
    for name in ordered[MOST_PHASES:]:
        for step, value in found[name].items():
            other[step] = other.get(step, 0.0) + value
    phases = {one_line(name, 16): found[name] for name in ordered[:MOST_PHASES] if sum(found[name].values()) > 0}
    if sum(other.values()) > 0.005 * sum(total.values()):
        phases["other" if phases else "step"] = other
    return phases
