"""Evaluations and comparisons as JSON, or as a table for people."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from tinyrl.data.rows import FEW
from tinyrl.runs.run_dir import finite
from tinyrl.text import number

BEFORE_SHARES = ("reward_mean", "reward_median", "reward_std")
EPISODES = "environment/"
AFTER_SHARES = ("verifier_mean", "kl", "entropy", "mean_length", "truncated", "distinct", "distinct_answers")
FEW_PROMPTS = f"warning: fewer than {FEW} prompts say little"


def render(result: dict[str, Any], *, as_json: bool) -> str:
    """Render the result of `evaluate_target`."""
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
            rows.append((key, [_cell(numbers.get(key)) for numbers in measured]))
    lines = [f"{key:18}" + "".join(f"{cell:>24}" for cell in cells) for key, cells in rows]
    if "reward_ci" in result:
        of = f"{result['num_prompts']} prompts x {result['num_samples']}"
        lines.append(f"(greedy in brackets; {of}; reward 95 % interval {_interval(result['reward_ci'])})")
    if "difference" in result:
        lines += _difference(result)
    for judge, rate in result.get("win_rate", {}).items():
        tied = f", {rate['ties']:.0%} ties" if rate["ties"] else ""
        shown = f"{number(rate['mean'])} (95 % interval {_interval(rate['ci'])}{tied})"
        unknown = "unknown: no prompt has a value on both sides"
        lines.append(f"win rate by {judge} {unknown if math.isnan(rate['mean']) else shown}")
    for side, prompts in ((result, "these prompts"), (result.get("other", {}), "the held-out prompts")):
        if side.get("trained_on"):
            lines.append(f"warning: {side['target']} was trained on {side['trained_on']} of {prompts}")
    return "\n".join(lines + ([FEW_PROMPTS] if result.get("num_prompts", FEW) < FEW else []))


def _keys(sides: list[dict[str, Any]]) -> list[str]:
    """Return the rows of the table: metrics that a side has, each reward where there are several, those of episodes."""
    there = list(dict.fromkeys(key for side in sides for key in side))
    rewards = [key for key in there if key.startswith("reward/")]
    shares = sorted((key for key in there if key.startswith(("pass@", "majority@"))), key=lambda key: key != "pass@1")
    episodes = [key for key in there if key.startswith(EPISODES)]
    wanted = (*BEFORE_SHARES, *(rewards if len(rewards) > 1 else ()), *shares, *AFTER_SHARES, *episodes)
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


def _interval(ends: list[float], shown: Callable[[float], str] = number) -> str:
    low, high = ends
    return "unknown: too few prompts or no spread" if math.isnan(low) else f"{shown(low)} to {shown(high)}"


def _cell(value: float | None, greedy: float | None = None) -> str:
    missing = value is None or math.isnan(value)
    shown = "-" if missing else number(value) if isinstance(value, float) else str(value)
    inner = "" if greedy is None else f" ({number(greedy)})" if isinstance(greedy, float) else f" ({greedy})"
    return shown + inner


# ---- several policies beside one ----


def render_comparison(rows: list[dict[str, Any]], *, as_json: bool) -> str:
    """Render the result of `compare_policies`, a line a policy."""
    if as_json:
        return json.dumps(finite(rows))
    first = rows[0]
    judges = list(dict.fromkeys(judge for row in rows for judge in row.get("win_rate", {})))
    verified = ["verifier"] if "verifier_mean" in first else []
    header = ["policy", "reward", "median", *verified, "KL", "length", *(f"wins by {judge}" for judge in judges)]
    table = [header]
    for row in rows:
        rates = [row.get("win_rate", {}).get(judge) for judge in judges]
        table.append(
            [
                row["policy"],
                _with_interval(row["reward_mean"], row["reward_ci"]),
                _cell(row["reward_median"]),
                *(_cell(row.get("verifier_mean")) for _ in verified),
                _cell(row.get("kl")),
                f"{row['mean_length']:.1f}",
                *("-" if rate is None else _with_interval(rate["mean"], rate["ci"]) for rate in rates),
            ]
        )
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(f"{cell:>{w}}" for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in table
    ]
    lines.append(
        f"({first['num_prompts']} prompts x {first['num_samples']}; 95 % intervals; KL in nats per response to where "
        f"each started; wins against {first['policy']}, ties half)"
    )
    return "\n".join(lines + ([FEW_PROMPTS] if first["num_prompts"] < FEW else []))


def _with_interval(value: float, ends: list[float]) -> str:
    return f"{_cell(value)} {'' if math.isnan(ends[0]) else f'({_interval(ends)})'}"
