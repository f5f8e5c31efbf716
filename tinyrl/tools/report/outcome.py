"""The outcome of a run in words and numbers: one sentence, the key figures, and where the time went. No HTML."""

import math
from statistics import fmean, median

from tinyrl.runs.metrics import TABLE, Metric
from tinyrl.runs.records import RunRecords
from tinyrl.text import one_line

ROUNDING_ERROR = 1e-12
DECIMALS = ((0.001, 5), (0.9995, 3), (9.995, 2), (99.95, 1), (math.inf, 0))  # of a number below each limit
MOST_PHASES = 7  # more colours cannot be told apart
SCORES = (  # in training, held out, and in words; the first that a run has says how it went
    ("reward/mean", "eval/reward_mean", "reward"),
    ("rewards/accuracy", "eval/accuracy", "preference accuracy"),
    ("loss", "eval/loss", "loss"),
    ("preference/loss", "eval/loss", "loss"),
)
TITLES = {"grpo": "GRPO", "ppo": "PPO", "sft": "SFT", "reward": "Reward model", "dpo": "DPO"}


def show(value: float, *, share: bool = False) -> str:
    """Format a number for people: three digits (two below 0.001), a real minus sign, 0 for a rounding error, a dash for
    NaN. `share`: as per cent with one decimal.
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
    else:
        text = f"{value:,.{next(digits for limit, digits in DECIMALS if size < limit)}f}"
    return text.replace("-", "\u2212")


def short_power(text: str) -> str:
    """Write 5.0e-05 as 5e-5."""
    digits, _, power = text.partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}" if power else text


def show_seconds(seconds: float) -> str:
    """Format a duration: 8.4 s, 1 min 32 s, 2 h 05 min."""
    if seconds < 59.95:
        return f"{show(seconds)} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    return f"{round(seconds / 60) // 60} h {round(seconds / 60) % 60:02d} min"


def subtitle(run: RunRecords) -> str:
    method, planned, done = str(run.setting("method") or ""), run.setting("run.num_steps"), run.last_step
    named = {"task": "task.name", "model": "model.path", "forked from": "run.forked_from"}
    parts = [TITLES.get(method, one_line(method, 20))]
    parts += [f"{word} {one_line(str(value), 60)}" for word, key in named.items() if (value := run.setting(key))]
    if isinstance(planned, int) and done >= planned:
        parts.append("all " * (planned > 1) + _steps(planned))
    else:
        parts.append(f"{done:,} of {_steps(planned)} so far" if isinstance(planned, int) else f"{_steps(done)} so far")
    return " · ".join(filter(None, parts))


def outcome(run: RunRecords) -> str:
    """Return one sentence: the held-out score before and after with its interval, and the KL paid for it."""
    for key, held_key, name in SCORES:
        held, points, better = (
            run.finite(held_key),
            run.finite(key),
            f"{'low' if name == 'loss' else 'high'}er is better",
        )
        if len(held) > 1:
            return _held_out_change(run, held_key, name, better)
        if len(points) > 1 and not held:
            window = min(5, len(points) // 2)
            start, end = (fmean(value for _, value in some) for some in (points[:window], points[-window:]))
            means = f"means of the first and last {window} steps; " if window > 1 else ""
            change = f"{_change(start, end)} by step {points[-1][0]:,} ({means}{better})"
            return f"Training {name} {change}; no held-out comparison."
        for step, value in held or points:
            name = f"Held-out {name}" if held else name.capitalize()
            return f"{name} is {show(value)} at step {step} ({better}); it was measured once so far."
    return f"{_steps(run.last_step)} recorded; no reward, accuracy or loss among the metrics yet."


def _held_out_change(run: RunRecords, key: str, name: str, better: str) -> str:
    points, interval = run.finite(key), f"{key.removesuffix('_mean')}_ci"
    (first, start), (last, end) = points[0], points[-1]
    before, after, seeds = (
        run.interval(interval, first),
        run.interval(interval, last),
        run.interval(f"{key} range", last),
    )
    few = after is None and isinstance(run.steps[last].get(interval), list)
    around = "not enough prompts for an interval; " if few else ""
    if pair := after or seeds:
        around = f"{'95 % interval' if after else 'seeds from'} {show(pair[0])} to {show(pair[1])}; "
    overlap = bool(before and after and before[0] <= after[1] and after[0] <= before[1])
    caution = ", too little to call because the intervals overlap" if overlap and start != end else ""
    held_out, training, paid = dict(run.finite("eval/kl")), run.finite("objective/kl"), ""
    if last in held_out:
        paid = f", at a KL of {show(held_out[last])} nats per response"
    elif training:
        paid = f", at a KL of {show(training[-1][1])} nats per response in training"
    change = _change(start, end, since=first, unsure=overlap or few)
    return f"Held-out {name} {change} in {_steps(last - first)} ({around}{better}){caution}{paid}."


def _change(start: float, end: float, *, since: int = 0, unsure: bool = False) -> str:
    if start == end:
        return f"stayed at {show(end)}"
    verb = "went" if unsure else "rose" if end > start else "fell"
    return f"{verb} from {show(start)}{f' at step {since:,}' if since else ''} to {show(end)}"


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


def reward_is_pass(run: RunRecords) -> bool:
    """Return whether pass@1 equals the reward, as with a reward of 0 or 1: then one of them is enough."""
    rewards, passes = dict(run.finite("eval/reward_mean")), dict(run.finite("eval/pass@1"))
    return rewards.keys() == passes.keys() and all(abs(rewards[step] - passes[step]) < 1e-9 for step in rewards)


def tiles(run: RunRecords) -> list[tuple[str, str, str, str]]:
    """Return the key figures of the run, most important first: label, value before ("": none), value, unit."""
    found = []
    for key, (label, metric) in key_figures([run]).items():
        if key != "eval/pass@1" or not reward_is_pass(run):
            found.append((label, *first_to_last(run, key, share=metric.share), metric.unit))
    if seconds := [value for _, value in run.finite("time/total") if value > 0]:
        found.append(("Time in steps", "", show_seconds(sum(seconds)), f"{show_seconds(median(seconds))} a step"))
    if rates := [value for _, value in run.finite("tokens_per_second")]:
        found.append(("Speed", "", show(median(rates)), "tokens a second"))
    if memory := [value for _, value in run.finite("memory/peak_gb")]:
        found.append(("Peak memory", "", show(max(memory)), "GB"))
    return found


def key_figures(runs: list[RunRecords]) -> dict[str, tuple[str, Metric]]:
    """Return label and metric of the figures that some of the runs have, by key: held out, or else that of training."""
    found: dict[str, tuple[str, Metric]] = {}
    for metric in TABLE:
        training, held_out = metric.keys
        for key, label in ((held_out, metric.label), (training, f"{metric.label}, training")):
            if metric.label and any(run.finite(key) for run in runs):
                found[key] = (label, metric)
                break
    return found


def first_to_last(run: RunRecords, key: str, *, share: bool) -> tuple[str, str]:
    """Return the first and the last value of a key figure; the first is empty where both look the same."""
    points = run.finite(key) or [(0, math.nan)]
    share = share and all(0 <= value <= 1 for _, value in points)
    first, last = (show(value, share=share) for _, value in (points[0], points[-1]))
    return "" if first == last else first, last


def phase_seconds(run: RunRecords) -> dict[str, dict[int, float]]:
    """Return {phase: {step: seconds}} from time/<phase>, the longest first, at most MOST_PHASES of them. "other" is
    last: the part of time/total (which excludes evaluation) that none of them covers.
    """
    keys = [name for name in run.metric_names() if name.startswith("time/") and name.count("/") == 1]
    found = {one_line(key.removeprefix("time/"), 16): dict(run.finite(key)) for key in keys}
    total = found.pop("total", {})
    phases = dict(sorted(found.items(), key=lambda phase: -sum(phase[1].values()))[:MOST_PHASES])
    covered = [seconds for name, seconds in phases.items() if name != "evaluation"]
    other = {step: max(0.0, whole - sum(one.get(step, 0.0) for one in covered)) for step, whole in total.items()}
    if sum(other.values()) > 0.005 * sum(total.values()):
        phases["other"] = other
    return {name: seconds for name, seconds in phases.items() if any(seconds.values())}
