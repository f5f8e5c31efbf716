"""Commands that look at runs and at the package: report, show, list."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Literal

import click
import typer

from tinyrl.runs.run_dir import RunDir, open_run


def report(
    runs: list[str] = typer.Argument(metavar="RUN...", help="one run, or several in one set of charts"),
    output: str | None = typer.Option(None, metavar="FOLDER", help="of several runs: where; default beside the first"),
) -> None:
    """Write report.html and report.png of a run, finished or going on, or of several runs together."""
    from tinyrl.tools.report import write_overlay, write_report

    folders = [Path(run) for run in runs]
    if output is not None and len(folders) == 1:
        raise ValueError("--output is for a report of several runs; that of one run is in its folder")
    parent = Path(output) if output is not None else folders[0].resolve().parent
    print(*(write_report(folders[0]) if len(folders) == 1 else write_overlay(folders, parent)), sep="\n")


def show(
    run: str = typer.Argument(metavar="RUN"),
    samples: bool = typer.Option(False, "--samples", help="samples of the last step; see the options below"),
    prompts: bool = typer.Option(False, "--prompts", help="training prompts: never solved, always solved, forgotten"),
    step: int | None = typer.Option(None, min=0, help="samples of this step"),
    kind: Literal["train", "eval", "eval-greedy"] | None = typer.Option(None, help="samples of training, or held-out"),
    worst: bool = typer.Option(False, "--worst", help="samples with the lowest rewards"),
    unsolved: bool = typer.Option(False, "--unsolved", help="samples of prompts that none solves (task.solved_reward)"),
    prompt: int | None = typer.Option(None, min=0, metavar="I", help="samples of prompt I: at --step, or step by step"),
    num: int | None = typer.Option(None, min=1, help="how many samples (4), or prompts of each outcome (10)"),
    export_hard: str | None = typer.Option(None, metavar="FILE.jsonl", help="write rows never solved, or forgotten"),
    json_output: bool = typer.Option(False, "--json", help="print the checkpoints as JSON"),
) -> None:
    """Show the checkpoints of a run: step, size, metric, whether each verifies; or its samples, or its prompts."""
    ways = {"--worst": worst, "--unsolved": unsolved, "--prompt": prompt is not None}
    chosen = [option for option, given in ways.items() if given]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)}: one of them at a time")
    samples = samples or bool(chosen) or step is not None or kind is not None
    prompts = prompts or export_hard is not None
    if samples + prompts + json_output > 1:
        raise ValueError("samples, --prompts and --json (of checkpoints): one of them at a time")
    from tinyrl.runs.show import render_samples, select_samples, show_checkpoints

    opened, notes = open_run(run), list[str]()
    if samples:
        limit = opened.read_config().task.solved_reward if unsolved else None
        which = {"kind": kind, "step": step, "num": num or 4, "prompt": prompt}
        rows = select_samples(opened.samples, notes, **which, worst=worst, unsolved=limit)
        in_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        text = render_samples(rows, grey=lambda text: typer.style(text, dim=True) if in_colour else text)
        text = text or "every prompt of that step has a sample that is right"
    elif prompts:
        text = _prompts(opened, notes, num=num or 10, export_hard=export_hard)
    else:
        text = show_checkpoints(opened, as_json=json_output)
    size = shutil.get_terminal_size()
    height = sum(1 + len(line) // max(1, size.columns) for line in text.split("\n"))
    (click.echo_via_pager if sys.stdout.isatty() and height >= size.lines else print)(text)
    for note in notes:
        print(f"tinyrl: {note}", file=sys.stderr)


def _prompts(opened: RunDir, notes: list[str], *, num: int, export_hard: str | None) -> str:
    """Return the training prompts by outcome; write the rows of the hard ones."""
    from tinyrl.runs.show import HARD, prompt_texts, read_prompt_stats, render_prompt_stats
    from tinyrl.tasks import export_rows, row_texts

    prompt_stats = read_prompt_stats(opened.prompts, notes)
    hard = {record.index: record.key for record in prompt_stats if record.outcome in HARD}
    texts = prompt_texts(opened.samples, {*hard})
    if texts.keys() < hard.keys():
        texts = row_texts(opened, hard, notes) | texts
    text = render_prompt_stats(prompt_stats, texts, num=num)
    if export_hard is not None:
        text += f"\n\n{export_rows(opened.read_config(), {*hard.values()}, Path(export_hard))}"
    return text


def complete_section(incomplete: str) -> list[str]:
    from tinyrl.config.settings import SECTIONS

    return [name for name in SECTIONS if name.startswith(incomplete)]


def list_names(
    what: Literal["settings", "recipes", "tasks"] = typer.Argument(help="settings, recipes or tasks"),
    name: str | None = typer.Argument(
        None, metavar="[SECTION|RECIPE]", help="settings of a section, or a recipe's", autocompletion=complete_section
    ),
) -> None:
    """List settings (name, default, meaning, type), recipes or tasks."""
    if what == "settings":
        from tinyrl.config.recipe import dump_config, load_config, method_of, packaged_recipes
        from tinyrl.config.settings import describe_settings

        if name is not None and (name in packaged_recipes() or name.endswith(".yaml")):
            print(dump_config(load_config(str(method_of([name])[0]), name, overrides=[])))
        else:
            print(describe_settings(name, width=max(60, min(shutil.get_terminal_size().columns, 120))))
    elif name is not None:
        raise ValueError(f"{name}: only `tinyrl list settings` takes a name")
    elif what == "recipes":
        from tinyrl.config.recipe import packaged_recipes

        for recipe, path in packaged_recipes().items():
            print(f"{recipe:28} {path.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}")
    else:
        from tinyrl.tasks import TASKS, load_task

        for task in TASKS:
            print(f"{task:20} {load_task(task).summary}")
