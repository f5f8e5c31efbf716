"""An evaluation as one JSON object, or as a table for people."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from tinyrl.data.rows import FEW
from tinyrl.runs.run_dir import finite
from tinyrl.text import number

BEFORE_SHARES = ("reward_mean", "reward_median", "reward_std")
SHARES = ("pass@1",)
EPISODES = "environment/"
AFTER_SHARES = ("verifier_mean", "kl", "entropy", "mean_length", "truncated", "distinct", "distinct_answers")


def render(result: dict[str, Any], *, as_json: bool) -> str:
    if as_json:
        return json.dumps(finite(result))
    sides = [result, result["other"]] if "other" in result else [result]
    names = [side["target"] for side in sides]  # the end of one says which checkpoint
    rows = [("", [name if len(name) < 24 else f"…{name[-22:]}" for name in names])]
    for key in _keys(sides):
        cells = [_cell(side.get(key), side.get("greedy", {}).get(key)) for side in sides]
        rows.append((key.removeprefix(EPISODES), cells))
    measured = [side.get("held_out", {}) for side in sides]  # by a trainer, on held-out rows
    for key in dict.fromkeys(key for numbers in measured for key in numbers):
        if any(isinstance(numbers.get(key), int | float) for numbers in measured):
            rows.append((key, [_cell(numbers.get(key), None) for numbers in measured]))
    lines = [f"{key:18}" + "".join(f"{cell:>24}" for cell in cells) for key, cells in rows]
    if "reward_ci" in result:
        interval = _interval(result["reward_ci"], number)
        of = f"{result['num_prompts']} prompts x {result['num_samples']}"
        lines.append(f"(greedy in brackets; {of}; reward 95 % interval {interval})")
    if "best_of" in result:
        bound = number(result["kl_bound"])
        lines.append(f"(each the best of {result['best_of']} by the reward: at most {bound} nats from one alone)")
    if "difference" in result:
        lines += _difference(result)
    lines += [_win_rate(judge, **rate) for judge, rate in result.get("win_rate", {}).items()]
    return "\n".join(lines + _warnings(result))


def _win_rate(judge: str, *, mean: float, ci: list[float], ties: float) -> str:
    if math.isnan(mean):
        return f"win rate by {judge} unknown: no prompt has a value on both sides"
    tied = f", {ties:.0%} ties" if ties else ""
    return f"win rate by {judge} {number(mean)} (95 % interval {_interval(ci, number)}{tied})"


def _warnings(result: dict[str, Any]) -> list[str]:
    lines = []
    if result.get("trained_on"):
        lines.append(f"warning: {result['target']} was trained on {result['trained_on']} of these prompts")
    if result.get("other", {}).get("trained_on"):
        other = result["other"]
        lines.append(f"warning: {other['target']} was trained on {other['trained_on']} of the held-out prompts")
    if result.get("num_prompts", FEW) < FEW:
        lines.append(f"warning: fewer than {FEW} prompts say little")
    return lines


def _keys(sides: list[dict[str, Any]]) -> list[str]:
    """The rows of the table: what a side has; each reward on its own where there are several; what episodes were."""
    there = list(dict.fromkeys(key for side in sides for key in side))
    rewards = [key for key in there if key.startswith("reward/")]
    shares = [key for key in there if key.startswith(("pass@", "majority@")) and key not in SHARES]
    episodes = [key for key in there if key.startswith(EPISODES)]
    wanted = (*BEFORE_SHARES, *(rewards if len(rewards) > 1 else ()), *SHARES, *shares, *AFTER_SHARES, *episodes)
    return [key for key in wanted if key in there]


def _difference(result: dict[str, Any]) -> list[str]:
    def signed(value: float) -> str:
        return f"{'' if value < 0 else '+'}{number(value)}"

    difference, other = result["difference"], result["other"]["target"]
    verdict = "" if difference["distinguishable"] else ": not distinguishable"
    lines = ["difference unknown: no prompt has a reward on both sides"]
    if not math.isnan(difference["reward_mean"]):
        interval, mean = _interval(difference["reward_ci"], signed), signed(difference["reward_mean"])
        lines = [f"difference {mean} (95 % interval {interval}, paired by prompt){verdict}"]
    if difference["left_out"]:
        lines.append(f"left out: {difference['left_out']} held-out prompts that {other} was trained on")
    return lines


def _interval(ends: list[float], shown: Callable[[float], str]) -> str:
    low, high = ends
    return "unknown: not enough prompts" if math.isnan(low) else f"{shown(low)} to {shown(high)}"


def _cell(value: float | None, greedy: float | None) -> str:
    missing = value is None or math.isnan(value)
    shown = "-" if missing else number(value) if isinstance(value, float) else str(value)
    inner = "" if greedy is None else f" ({number(greedy)})" if isinstance(greedy, float) else f" ({greedy})"
    return shown + inner
