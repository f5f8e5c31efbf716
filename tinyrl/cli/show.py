"""Commands that look at runs and at the package: report, show, list."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import typer

from tinyrl.cli.together import Excludes, Needs, Rule
from tinyrl.config.recipe import dump_config, load_config, method_of, packaged_recipes
from tinyrl.config.settings import describe_settings
from tinyrl.runs import show as shown
from tinyrl.runs.run_dir import open_run
from tinyrl.text import hang, terminal_columns

OF_SAMPLES = ("--samples", "--step", "--kind", "--worst", "--unsolved", "--prompt")
OF_PROMPTS = ("--prompts", "--export-hard")
OF_SHOW: tuple[Rule, ...] = (
    *(Excludes(option, (*OF_PROMPTS, "--json"), "it shows samples") for option in OF_SAMPLES),
    *(Excludes(option, ("--json",), "it shows training prompts") for option in OF_PROMPTS),
    Needs("--num", (*OF_SAMPLES, *OF_PROMPTS), "it counts samples or prompts"),
    Excludes("--prompt", ("--worst", "--unsolved"), "it shows one sample per step", unless=("--step",)),
)


def report(
    runs: list[str] = typer.Argument(metavar="RUN...", help="a run, or several to compare in one set of charts"),
    output: str | None = typer.Option(
        None, metavar="FOLDER", help="with several runs: where to write the report; default: beside the first run"
    ),
) -> None:
    """Write report.html and report.png of a run, finished or going on, or of several runs together."""
    from tinyrl.tools.report import write_overlay, write_report  # with jinja2

    folders = [Path(run) for run in runs]
    if output is not None and len(folders) == 1:
        raise ValueError("--output is for a report of several runs; that of one run is in its folder")
    parent = Path(output) if output is not None else folders[0].resolve().parent
    print(*(write_report(folders[0]) if len(folders) == 1 else write_overlay(folders, parent)), sep="\n")


def show(
    run: str = typer.Argument(metavar="RUN", help="folder of the run"),
    samples: bool = typer.Option(
        False, "--samples", help="show samples of the last step; the options below select others"
    ),
    prompts: bool = typer.Option(
        False, "--prompts", help="show training prompts that were never solved, always solved, or forgotten"
    ),
    step: int | None = typer.Option(None, min=0, help="show samples of this step"),
    kind: Literal["train", "eval", "eval-greedy"] | None = typer.Option(
        None, help="show samples of training or of held-out prompts"
    ),
    worst: bool = typer.Option(False, "--worst", help="show the samples with the lowest rewards"),
    unsolved: bool = typer.Option(
        False, "--unsolved", help="show samples of prompts that no sample solves (task.solved_reward)"
    ),
    prompt: int | None = typer.Option(
        None, min=0, metavar="I", help="show samples of prompt I, at --step or one per step"
    ),
    num: int | None = typer.Option(
        None, min=1, help="number of samples (default: 4), or of prompts per outcome (default: 10)"
    ),
    export_hard: str | None = typer.Option(
        None, metavar="FILE.jsonl", help="write the rows that were never solved, or forgotten, to this file"
    ),
    json_output: bool = typer.Option(False, "--json", help="print the checkpoints as JSON"),
) -> None:
    """Show the checkpoints of a run: step, size, metric, whether each verifies; or its samples, or its prompts."""
    from tinyrl.data.rows import solved_from
    from tinyrl.tasks.run_rows import export_rows, row_texts  # with the tasks: not for --help
    from tinyrl.workers.foreign_code import tell_code

    opened = open_run(run)
    notes = list[str]()
    if samples or worst or unsolved or prompt is not None or step is not None or kind is not None:
        limit = solved_from(opened.read_config().task.solved_reward) if unsolved else None
        which = {"kind": kind, "step": step, "num": num or 4, "prompt": prompt}
        rows = shown.select_samples(opened.samples, notes, **which, worst=worst, unsolved=limit)
        text = shown.render_samples(rows) or "every prompt of that step has a sample that is right"
    elif prompts or export_hard is not None:
        tell_code(opened.path, opened.read_config(), sections=("task",))
        stats = shown.read_prompt_stats(opened.prompts, notes)
        hard = {record.index: record.key for record in stats if record.outcome in shown.HARD}
        text = shown.render_prompt_stats(stats, row_texts(opened, hard, notes), num=num or 10)
        if export_hard is not None:
            text += f"\n\n{export_rows(opened.read_config(), {*hard.values()}, Path(export_hard))}"
    else:
        text = shown.show_checkpoints(opened, notes, as_json=json_output)
        if not json_output:
            text = "\n".join([text, *shown.image_lines(opened.read_environment())])
    typer.echo(text)
    for note in notes:
        print(f"tinyrl: {note}", file=sys.stderr)


def list_names(
    what: Literal["settings", "recipes", "tasks"] = typer.Argument(help="what to list"),
    name: str | None = typer.Argument(
        None, metavar="[SECTION|RECIPE]", help="list only the settings of this section or recipe"
    ),
) -> None:
    """List settings (name, default, meaning, type), recipes or tasks."""
    if what == "settings":
        if name is not None and (name in packaged_recipes() or name.endswith(".yaml")):
            print(dump_config(load_config(method_of([name])[0], name, overrides=[])))
        else:
            print(describe_settings(name, columns=terminal_columns()))
    elif name is not None:
        raise ValueError(f"{name}: only `tinyrl list settings` takes a name")
    elif what == "recipes":
        for recipe, path in packaged_recipes().items():
            summary = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
            print(hang(summary, terminal_columns(), start=f"{recipe:25} ", indent=" " * 26))
    else:
        from tinyrl.tasks import TASKS, load_task  # with the tasks: not for --help

        for task in TASKS:
            print(hang(load_task(task).summary, terminal_columns(), start=f"{task:20} ", indent=" " * 21))
