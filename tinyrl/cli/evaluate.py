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
from tinyrl.evaluation.result import Against, ComparisonResult, EvalSide, TargetResult, TrainedOn
from tinyrl.evaluation.side import OwnSide
from tinyrl.formatting import format_number
from tinyrl.process.collector import lasting_imports
from tinyrl.process.launched import Options, launched
from tinyrl.runs.records import json_safe
from tinyrl.text import hang, terminal_columns

NAME = 28  # most characters of a target's name above its column: its end says which checkpoint
SHORT_NAME = 18  # where the terminal has no room for more
COUNTS = ("num_prompts", "num_samples", "dropped")  # not in the table


def evaluate(
    words: list[str] = settings_argument(
        "runs, checkpoints (also RUN@best, RUN@STEP) or models, and settings that replace theirs", before="TARGET... "
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
        with lasting_imports():
            from tinyrl.tools.compare import evaluate_target  # with torch

        result = evaluate_target(prepared, options=options)
    else:
        targets = targets if vs is None else [vs, *targets]
        prepared = prepare_comparison(targets, asked)
        announce_loading(targets)
        with lasting_imports():
            from tinyrl.tools.compare import compare  # with torch

        result = compare(prepared, options=options)
    if launched().rank == 0:
        print(render(result, as_json=json_output, columns=terminal_columns()))


def announce_loading(targets: list[str]) -> None:
    """Tell that models are being loaded and sampled, before the table."""
    if launched().rank == 0:
        print(f"evaluating {', '.join(targets)} ...", file=sys.stderr, flush=True)


def render(result: TargetResult | ComparisonResult, *, as_json: bool, columns: int | None = None) -> str:
    """Render what `evaluate_target` or `compare` has found, in lines of so many columns."""
    if as_json:
        return json.dumps(json_safe(result.as_json()))
    table = _table_of(result.sides)
    lines = table_lines([side.target for side in result.sides], table, columns)
    notes = _captions(result.sides, has_kl="kl" in table) + _notes(result)
    return "\n".join([*lines, *(hang(note, columns) for note in notes)])


def _table_of(sides: list[EvalSide]) -> dict[str, list[str]]:
    """Return the cells of each row, one cell for a side: greedy numbers are in brackets."""
    rows = [_numbers_of(side) for side in sides]
    there = dict.fromkeys(key for row in rows for key, value in row.items() if _is_known(value))
    rewards = [key for key in there if key.startswith("reward/")]
    table = dict[str, list[str]]()
    for key in there:
        if key in COUNTS or (key in rewards and len(rewards) == 1):
            continue
        label = key.removeprefix("environment/")
        sampled = [_shown(row.get(key)) for row in rows]
        greedy = [None if side.sampled is None else side.sampled.greedy.get(key) for side in sides]
        in_brackets = ["" if value is None else f" ({_shown(value)})" for value in greedy]
        if any(isinstance(value, list) for value in greedy):  # two intervals are a line each
            table[label] = sampled
            table[f"{label}, greedy"] = ["" if value is None else _shown(value) for value in greedy]
        else:
            table[label] = [value + other for value, other in zip(sampled, in_brackets, strict=True)]
    return table


def _numbers_of(side: EvalSide) -> dict[str, Any]:
    """Return the numbers of a side by name: those of its samples, and those that a trainer measures."""
    sampled = {} if side.sampled is None else side.sampled.metrics
    measured = {} if side.measured is None else side.measured.metrics
    return {**sampled, **measured}


def _captions(sides: list[EvalSide], *, has_kl: bool) -> list[str]:
    """Return lines that say what the numbers of the table are."""
    first = sides[0]
    captions = list[str]()
    if first.sampled is not None:
        kl = f"; KL in nats per response to where {_start_of(sides)} started" if has_kl else ""
        num_samples = first.sampled.num_samples
        samples = "1 sample" if num_samples == 1 else f"{num_samples} samples"
        captions.append(f"({first.sampled.num_prompts} prompts, {samples} each; greedy in brackets{kl})")
    if first.sampled is not None and len(sides) > 1:
        captions.append(f"(rows, reward and generation.max_new_tokens of {first.target}, where none are given here)")
    if any(side.measured is not None and side.measured.own_reference for side in sides):
        captions.append("(rewards, margin, loss and accuracy are against each one's own reference)")
    return captions


def _notes(result: TargetResult | ComparisonResult) -> list[str]:
    """Return lines on dropped samples, on how the sides differ, and on rows that say little."""
    first = result.sides[0]
    notes = list[str]()
    for side in result.sides:
        if side.sampled is not None and (dropped := side.sampled.dropped_warning()):
            notes.append(f"warning: {side.target}: {dropped}")
    for side in result.sides:
        if side.against is not None and side.sampled is not None:
            who = f"{side.target}: " if isinstance(result, ComparisonResult) else ""
            notes += [who + line for line in _against(side.against, prompts=side.sampled.num_prompts)]
    if isinstance(result, TargetResult):
        if result.left_out:
            notes.append(f"left out: {result.left_out} held-out rows that a side was trained on")
        if result.trained_on is not None:
            notes += _knows(first.target, result.trained_on)
    if first.sampled is not None and first.sampled.num_prompts < FEW:
        notes.append(f"warning: fewer than {FEW} prompts say little")
    return notes


def _knows(target: str, trained_on: TrainedOn) -> list[str]:
    """Return a warning where a run was trained on some of the rows, or may have been."""
    if trained_on.count is None:
        return [f"warning: the training rows of {target} cannot be read; it may know some of these"]
    return [f"warning: {target} was trained on {trained_on.count} of these rows"] if trained_on.count else []


def _start_of(sides: list[EvalSide]) -> str:
    """Return whose start the KL of the sides is to: a run's own base or start has the run's reference."""
    if len(sides) == 1:
        return "it"
    return sides[0].target if sides[1].target in (OwnSide.BASE, OwnSide.START) else "each"


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


def _against(against: Against, *, prompts: int) -> list[str]:
    """Return lines for how a policy differs from another on so many prompts."""
    from tinyrl.evaluation.statistics import FEWEST  # scipy with it

    difference = against.difference
    if math.isnan(difference.reward_mean):
        return ["no reward on both sides, so there is nothing to compare"]
    low, high = difference.reward_ci
    reason = f", as fewer than {FEWEST} prompts differ" if low > 0.0 or high < 0.0 else ""
    verdict = "" if difference.distinguishable else f": not distinguishable{reason}"
    mean = _shown(difference.reward_mean, signed=True)
    interval = _shown(difference.reward_ci, signed=True)
    lines = [f"difference {mean} (95 % interval {interval}, paired by prompt){verdict}"]
    if difference.pairs < prompts:
        lines.append(f"difference over {difference.pairs} of {prompts} prompts: the others lack a reward")
    if against.left_out:
        lines.append(f"left out: {against.left_out} held-out prompts that a policy was trained on")
    rate = against.win_rate
    tied = f", {rate.ties:.0%} ties" if rate.ties > 0 else ""
    lines.append(f"win rate {_shown(rate.mean)} (95 % interval {_shown(rate.ci)}{tied})")
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
