"""The result of an evaluation or a comparison as JSON, or as a table for people: a column for each policy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from tinyrl.data.rows import FEW
from tinyrl.runs.run_dir import finite
from tinyrl.text import number

COUNTS = ("num_prompts", "num_samples", "trained_on")  # not in the table
EPISODES = "environment/"


def render(result: dict[str, Any] | list[dict[str, Any]], *, as_json: bool) -> str:
    """Render the result of `evaluate_target` or `compare`."""
    if as_json:
        return json.dumps(finite(result))
    several = isinstance(result, list)
    sides = result if several else [result, result["other"]] if "other" in result else [result]
    first, names = sides[0], [side["target"] for side in sides]  # the end of a name says which checkpoint
    lines = [" " * 18 + "".join(f"{name if len(name) < 24 else f'…{name[-22:]}':>24}" for name in names)]
    rows = [{**side, **side.get("held_out", {})} for side in sides]  # sampled and judged, or measured by a trainer
    there = dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, int | float | list))
    rewards = [key for key in there if key.startswith("reward/")]
    for key in there:
        if key not in COUNTS and (key not in rewards or len(rewards) > 1):
            cells = [_cell(row.get(key), row.get("greedy", {}).get(key)) for row in rows]
            lines.append(f"{key.removeprefix(EPISODES):18}" + "".join(f"{cell:>24}" for cell in cells))
    if "reward_ci" in first:
        kl = "; KL in nats per response to where each started" if several else ""
        lines.append(f"(greedy in brackets; {first['num_prompts']} prompts x {first['num_samples']}{kl})")
    for side in sides:
        if "difference" in side:
            lines += _against(side, first["target"] if several else first["other"]["target"], named=several)
    for side, prompts in zip(sides, ("these prompts", "the held-out prompts"), strict=False):
        if side.get("trained_on"):
            lines.append(f"warning: {side['target']} was trained on {side['trained_on']} of {prompts}")
    if first.get("num_prompts", FEW) < FEW:
        lines.append(f"warning: fewer than {FEW} prompts say little")
    return "\n".join(lines)


def _against(side: dict[str, Any], other: str, *, named: bool) -> list[str]:
    """Return lines for how a policy differs from another; `named`: each line names the policy."""
    who, difference = f"{side['target']}: " if named else "", side["difference"]
    lines = [f"{who}difference unknown: no prompt has a reward on both sides"]
    if not math.isnan(difference["reward_mean"]):
        verdict = "" if difference["distinguishable"] else ": not distinguishable"
        ends, shown = _interval(difference["reward_ci"], _signed), _signed(difference["reward_mean"])
        lines = [f"{who}difference {shown} (95 % interval {ends}, paired by prompt){verdict}"]
    if difference["left_out"]:
        seen = f"that {other} was trained on" if not named else "that one of the policies was trained on"
        lines.append(f"{who}left out: {difference['left_out']} held-out prompts {seen}")
    for judge, rate in side["win_rate"].items():
        tied = f", {rate['ties']:.0%} ties" if rate["ties"] else ""
        shown = f"{number(rate['mean'])} (95 % interval {_interval(rate['ci'])}{tied})"
        unknown = "unknown: no prompt has a value on both sides"
        lines.append(f"{who}win rate by {judge} {unknown if math.isnan(rate['mean']) else shown}")
    return lines


def _signed(value: float) -> str:
    return f"{'' if value < 0 else '+'}{number(value)}"


def _interval(ends: list[float], shown: Callable[[float], str] = number) -> str:
    low, high = ends
    return "unknown: too few prompts or no spread" if math.isnan(low) else f"{shown(low)} to {shown(high)}"


def _cell(value: float | list[float] | None, greedy: float | list[float] | None = None) -> str:
    if isinstance(value, list):
        return "unknown" if math.isnan(value[0]) else _interval(value)
    missing = value is None or math.isnan(value)
    shown = "-" if missing else number(value) if isinstance(value, float) else str(value)
    return shown if greedy is None else f"{shown} ({number(greedy) if isinstance(greedy, float) else greedy})"
