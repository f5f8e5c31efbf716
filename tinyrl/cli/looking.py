"""`tinyrl samples` and `tinyrl prompts`: what a run wrote, and which of its training prompts it solves."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

import click
import typer

from tinyrl.cli.errors import sentences
from tinyrl.cli.options import Debug

RunFolder = Annotated[str, typer.Argument(metavar="RUN")]


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
    debug: Debug = False,
) -> None:
    """Print samples of a run: prompt, what was written and what was read between turns, reward, why it ended."""
    notes: list[str] = []
    with sentences(debug):
        from tinyrl.runs import samples as found
        from tinyrl.runs.run_dir import open_run

        chosen = {
            "--worst": worst,
            "--unsolved": unsolved,
            "--most-changed": most_changed,
            "--prompt": prompt is not None,
        }
        asked = [name for name, given in chosen.items() if given]
        if len(asked) > 1:
            raise ValueError(f"{' and '.join(asked)}: one of them at a time")
        opened = open_run(run)
        path = opened.samples
        if worst:
            rows = found.worst_samples(path, kind=kind, step=step, num=num, notes=notes)
        elif unsolved:
            least = opened.read_config().task.solved_reward
            rows = found.unsolved_samples(path, kind=kind, step=step, num=num, notes=notes, solved_reward=least)
        elif most_changed:
            rows = found.most_changed_samples(path, kind=kind, step=step, num=num, notes=notes)
        elif prompt is not None and step is None:
            rows = found.samples_over_time(path, kind=kind, prompt=prompt, num=num, notes=notes)
        else:
            rows = found.read_samples(path, kind=kind, step=step, num=num, notes=notes, prompt=prompt)
    in_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    text = found.render(rows, grey=lambda text: typer.style(text, dim=True) if in_colour else text)
    _show(text or "every prompt of that step has a sample that is right", notes)


def prompts(
    run: RunFolder,
    num: Annotated[int, typer.Option(min=1, help="how many of each kind to list")] = 10,
    export_hard: Annotated[
        str | None,
        typer.Option(metavar="FILE.jsonl", help="write the rows of prompts never solved, or forgotten, as task.data"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Training prompts by what became of them: never solved, always solved, forgotten."""
    notes: list[str] = []
    with sentences(debug):
        from tinyrl.runs.run_dir import open_run
        from tinyrl.runs.samples import HARD, hard_keys, prompt_texts, read_ledger, render_ledger
        from tinyrl.tasks.hard_rows import row_texts

        opened = open_run(run)
        ledger = read_ledger(opened.prompts, notes)
        hard = {record.index: record.key for record in ledger if record.standing in HARD}
        texts = prompt_texts(opened.samples, {*hard})
        if texts.keys() < hard.keys():
            texts = row_texts(opened, hard, notes) | texts
        text = render_ledger(ledger, texts, num=num)
        if export_hard is not None:
            from tinyrl.tasks.hard_rows import export_rows

            text += f"\n\n{export_rows(opened.read_config(), hard_keys(ledger), Path(export_hard))}"
    _show(text, notes)


def _show(text: str, notes: list[str]) -> None:
    """Print, by the pager where a terminal is too small; what is to be said about it goes beside it."""
    size = shutil.get_terminal_size()
    height = sum(1 + len(line) // max(1, size.columns) for line in text.split("\n"))
    if sys.stdout.isatty() and height >= size.lines:
        click.echo_via_pager(text)
    else:
        print(text)
    for note in notes:
        print(f"tinyrl: {note}", file=sys.stderr)
