"""Commands that look at a run: report, checkpoints, samples, prompts."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

import click
import typer

from tinyrl.cli.options import Json

RunFolder = Annotated[str, typer.Argument(metavar="RUN")]


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="one run, or several that are laid over each other")
    ],
    output: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="of several runs: where to write; default the folder of the first run's"),
    ] = None,
) -> None:
    """Write report.html and report.png of a run, finished or going on, or of several runs together."""
    from tinyrl.tools.report import write_overlay, write_report

    folders = [Path(run) for run in runs]
    if output is not None and len(folders) == 1:
        raise ValueError("--output is for a report of several runs; that of one run is in its folder")
    parent = Path(output) if output is not None else folders[0].resolve().parent
    for path in write_report(folders[0]) if len(folders) == 1 else write_overlay(folders, parent):
        print(path)


def checkpoints(run: RunFolder, json_output: Json = False) -> None:
    """List the checkpoints of a run: step, size, metric, and whether each verifies."""
    from tinyrl.runs.run_dir import open_run
    from tinyrl.runs.summary import list_verified, render

    opened = open_run(run)
    listed = list_verified(opened)
    print(json.dumps([vars(one) for one in listed]) if json_output else render(opened, listed))


def samples(
    run: RunFolder,
    step: Annotated[int | None, typer.Option(min=0, help="of which step; default the last that has any")] = None,
    num: Annotated[int, typer.Option(min=1, help="how many")] = 4,
    kind: Annotated[
        Literal["train", "eval", "eval-greedy"] | None,
        typer.Option(help="of training, or held out, sampled or greedy; default whatever comes first"),
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="those with the lowest rewards")] = False,
    unsolved: Annotated[
        bool, typer.Option("--unsolved", help="of prompts without a sample that reaches task.solved_reward")
    ] = False,
    most_changed: Annotated[
        bool,
        typer.Option("--most-changed", help="held-out ones that differ most from the first step's, before and now"),
    ] = False,
    prompt: Annotated[
        int | None, typer.Option(min=0, metavar="I", help="to prompt I: at --step, or step after step")
    ] = None,
) -> None:
    """Print samples of a run: prompt, what was written and what was read between turns, reward, why it ended."""
    notes: list[str] = []
    from tinyrl.runs.run_dir import open_run
    from tinyrl.runs.samples import render, select_samples

    asked = ["--worst"] * worst + ["--unsolved"] * unsolved + ["--most-changed"] * most_changed
    asked += ["--prompt"] * (prompt is not None)
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(asked)}: one of them at a time")
    opened = open_run(run)
    rows = select_samples(
        opened.samples,
        notes,
        kind=kind,
        step=step,
        num=num,
        prompt=prompt,
        worst=worst,
        most_changed=most_changed,
        unsolved=opened.read_config().task.solved_reward if unsolved else None,
    )
    in_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    text = render(rows, grey=lambda text: typer.style(text, dim=True) if in_colour else text)
    _show(text or "every prompt of that step has a sample that is right", notes)


def prompts(
    run: RunFolder,
    num: Annotated[int, typer.Option(min=1, help="how many of each kind to list")] = 10,
    export_hard: Annotated[
        str | None,
        typer.Option(metavar="FILE.jsonl", help="write the rows of prompts never solved, or forgotten, as task.data"),
    ] = None,
) -> None:
    """Training prompts by what became of them: never solved, always solved, forgotten."""
    notes: list[str] = []
    from tinyrl.runs.run_dir import open_run
    from tinyrl.runs.samples import HARD, hard_keys, prompt_texts, read_prompt_stats, render_prompt_stats
    from tinyrl.tasks import row_texts

    opened = open_run(run)
    prompt_stats = read_prompt_stats(opened.prompts, notes)
    hard = {record.index: record.key for record in prompt_stats if record.standing in HARD}
    texts = prompt_texts(opened.samples, {*hard})
    if texts.keys() < hard.keys():
        texts = row_texts(opened, hard, notes) | texts
    text = render_prompt_stats(prompt_stats, texts, num=num)
    if export_hard is not None:
        from tinyrl.tasks import export_rows

        text += f"\n\n{export_rows(opened.read_config(), hard_keys(prompt_stats), Path(export_hard))}"
    _show(text, notes)


def _show(text: str, notes: list[str]) -> None:
    size = shutil.get_terminal_size()
    height = sum(1 + len(line) // max(1, size.columns) for line in text.split("\n"))
    if sys.stdout.isatty() and height >= size.lines:
        click.echo_via_pager(text)
    else:
        print(text)
    for note in notes:
        print(f"tinyrl: {note}", file=sys.stderr)
