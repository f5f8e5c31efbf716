"""`tinyrl eval`: policies and reward models on held-out rows, as JSON or as a table with a column for each."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any, Literal

import typer

from tinyrl.cli.options import Json, settings_argument
from tinyrl.data.rows import FEW
from tinyrl.process.launched import Options, launched
from tinyrl.runs.records import json_safe
from tinyrl.runs.run_dir import OwnSide
from tinyrl.text import format_number, hang, terminal_columns

NAME = 28  # most characters of a target's name above its column: its end says which checkpoint
SHORT_NAME = 18  # where the terminal has no room for more
COUNTS = ("num_prompts", "num_samples", "dropped", "trained_on", "left_out")  # not in the table


def evaluate(
    words: list[str] = settings_argument(
        "runs, checkpoints or models, and settings that replace theirs", before="TARGET... "
    ),
    vs: str | None = typer.Option(
        None, help="baseline: a run, checkpoint or model; for a single target also base, start or teacher"
    ),
    task: str | None = typer.Option(None, help="evaluate on this task instead of the run's"),
    data: str | None = typer.Option(None, metavar="FILE", help="evaluate on these rows instead of the held-out ones"),
    split: Literal["eval", "train"] = typer.Option("eval", help="evaluate on held-out or training prompts"),
    num_prompts: int = typer.Option(512, min=1, help="maximum number of prompts"),
    samples: int = typer.Option(1, min=1, help="samples per prompt"),
    save_samples: str | None = typer.Option(
        None, metavar="FILE.jsonl", help="write the samples of both sides to this file"
    ),
    json_output: Json = False,
    *,
    options: Options,
) -> None:
    """Evaluate runs, checkpoints or models on held-out prompts, or a reward model on held-out rows.

    One target: its metrics and, with --vs, those of a baseline, paired by prompt. Several policies: one table of
    reward, KL, length and win rates against --vs, all judged in the same way.
    """
    from tinyrl.evaluation.prepared import prepare_comparison, prepare_evaluation  # with the tasks: not for --help
    from tinyrl.evaluation.targets import Asked

    settings = tuple(word for word in words if "=" in word and not os.path.exists(word))
    targets = [word for word in words if word not in settings]
    asked = Asked(task, data, settings, split, num_prompts, samples, save_samples)
    if not targets:
        raise ValueError("which run, checkpoint or model? tinyrl eval RUN [section.key=value]...")
    if len(targets) == 1:
        prepared = prepare_evaluation(targets[0], asked, vs=vs)
        announce_loading(targets)
        from tinyrl.tools.compare import evaluate_target  # with torch

        result = evaluate_target(prepared, options=options)
    else:
        targets = targets if vs is None else [vs, *targets]
        prepared = prepare_comparison(targets, asked)
        announce_loading(targets)
        from tinyrl.tools.compare import compare  # with torch

        result = compare(prepared, options=options)
    if launched().rank == 0:
        print(render(result, as_json=json_output, columns=terminal_columns()))


def announce_loading(targets: list[str]) -> None:
    """Tell that models are being loaded and sampled, before the table."""
    if launched().rank == 0:
        print(f"evaluating {', '.join(targets)} ...", file=sys.stderr, flush=True)


def render(result: dict[str, Any] | list[dict[str, Any]], *, as_json: bool, columns: int | None = None) -> str:
    """Render the result of `evaluate_target` or `compare`, in lines of so many columns."""
    if as_json:
        return json.dumps(json_safe(result))
    several = isinstance(result, list)
    sides = result if several else [result, result["other"]] if "other" in result else [result]
    first = sides[0]
    rows = [{**side, **side.get("held_out", {})} for side in sides]  # sampled and judged, or measured by a trainer
    there = dict.fromkeys(key for row in rows for key, value in row.items() if _is_known(value))
    rewards = [key for key in there if key.startswith("reward/")]
    table = dict[str, list[str]]()
    for key in there:
        if key in COUNTS or (key in rewards and len(rewards) == 1):
            continue
        label = key.removeprefix("environment/")
        sampled = [_shown(row.get(key)) for row in rows]
        greedy = [row.get("greedy", {}).get(key) for row in rows]
        in_brackets = ["" if value is None else f" ({_shown(value)})" for value in greedy]
        if any(isinstance(value, list) for value in greedy):  # two intervals are a line each
            table[label] = sampled
            table[f"{label}, greedy"] = ["" if value is None else _shown(value) for value in greedy]
        else:
            table[label] = [value + other for value, other in zip(sampled, in_brackets, strict=True)]
    lines = table_lines([side["target"] for side in sides], table, columns)
    notes = list[str]()
    if "reward_ci" in first:
        kl = f"; KL in nats per response to where {_start_of(sides)} started" if "kl" in there else ""
        samples = "1 sample" if first["num_samples"] == 1 else f"{first['num_samples']} samples"
        notes.append(f"({first['num_prompts']} prompts, {samples} each; greedy in brackets{kl})")
    if "reward_ci" in first and len(sides) > 1:
        notes.append(f"(rows, reward and generation.max_new_tokens of {first['target']}, where none are given here)")
    if any(side.get("held_out", {}).get("reference") == "own" for side in sides):
        notes.append("(rewards, margin, loss and accuracy are against each one's own reference)")
    from tinyrl.evaluation.evaluate import dropped_warning  # with torch, which has run by now

    for side in sides:
        if dropped := dropped_warning(side, side.get("why_dropped", "")):
            notes.append(f"warning: {side['target']}: {dropped}")
    for side in sides:
        if "difference" in side:
            notes += _against(side, named=several, prompts=first["num_prompts"])
    if first.get("left_out"):
        notes.append(f"left out: {first['left_out']} held-out rows that a side was trained on")
    if (seen := first.get("trained_on", 0)) is None:
        notes.append(f"warning: the training rows of {first['target']} cannot be read; it may know some of these")
    elif seen:
        notes.append(f"warning: {first['target']} was trained on {seen} of these rows")
    if first.get("num_prompts", FEW) < FEW:
        notes.append(f"warning: fewer than {FEW} prompts say little")
    return "\n".join([*lines, *(hang(note, columns) for note in notes)])


def _start_of(sides: list[dict[str, Any]]) -> str:
    """Return whose start the KL of the sides is to: a run's own base or start has the run's reference."""
    if len(sides) == 1:
        return "it"
    return sides[0]["target"] if sides[1]["target"] in (OwnSide.BASE, OwnSide.START) else "each"


def table_lines(names: list[str], table: dict[str, list[str]], columns: int | None) -> list[str]:
    """Return a table with a column for each name, as wide as its widest cell; `table` has the cells of each row.

    Where it has no room in `columns`, names are shortened from their beginning, and what still has none is a table of
    its own below.
    """
    room = math.inf if columns is None else columns
    label_width = max(map(len, table), default=0)
    cell_widths = [max((len(cells[i]) for cells in table.values()), default=0) for i in range(len(names))]
    widths = list[int]()
    for longest in (NAME, SHORT_NAME):
        widths = [max(width, min(len(name), longest)) for name, width in zip(names, cell_widths, strict=True)]
        if label_width + sum(2 + width for width in widths) <= room:
            break
    groups: list[list[int]] = [[]]
    for i, width in enumerate(widths):
        used = label_width + sum(2 + widths[at] for at in groups[-1])
        if groups[-1] and used + 2 + width > room:
            groups.append([])
        groups[-1].append(i)
    titles = [_end_of(name, width) for name, width in zip(names, widths, strict=True)]
    lines = list[str]()
    for group in groups:
        if lines:
            lines.append("")
        for label, cells in {"": titles, **table}.items():
            lines.append(f"{label:{label_width}}" + "".join(f"  {cells[i]:>{widths[i]}}" for i in group))
    return lines


def _end_of(name: str, width: int) -> str:
    return name if len(name) <= width else f"…{name[1 - width :]}"


def _against(side: dict[str, Any], *, named: bool, prompts: int) -> list[str]:
    """Return lines for how a policy differs from another on so many prompts; `named`: each line names the policy."""
    who = f"{side['target']}: " if named else ""
    difference = side["difference"]
    if math.isnan(difference["reward_mean"]):
        return [f"{who}no reward on both sides, so there is nothing to compare"]
    verdict = "" if difference["distinguishable"] else ": not distinguishable"
    mean = _shown(difference["reward_mean"], signed=True)
    interval = _shown(difference["reward_ci"], signed=True)
    lines = [f"{who}difference {mean} (95 % interval {interval}, paired by prompt){verdict}"]
    if difference["pairs"] < prompts:
        lines.append(f"{who}difference over {difference['pairs']} of {prompts} prompts: the others lack a reward")
    if difference["left_out"]:
        lines.append(f"{who}left out: {difference['left_out']} held-out prompts that a policy was trained on")
    rate = side["win_rate"]
    tied = f", {rate['ties']:.0%} ties" if rate["ties"] > 0 else ""
    lines.append(f"{who}win rate {_shown(rate['mean'])} (95 % interval {_shown(rate['ci'])}{tied})")
    return lines


def _is_known(value: Any) -> bool:
    """Return whether a value is a number, or an interval; an unknown one is NaN."""
    if isinstance(value, list):
        return bool(value) and not math.isnan(value[0])
    return isinstance(value, int | float) and not math.isnan(value)


def _shown(value: float | list[float] | None, *, signed: bool = False) -> str:
    """Format a number, or an interval as "low to high"."""
    ends = value if isinstance(value, list) else [value]
    if isinstance(value, list) and math.isnan(value[0]):
        return "unknown"
    return " to ".join(format_number(end, signed=signed, missing="unknown") for end in ends)
