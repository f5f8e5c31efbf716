"""Commands that look at runs and at the package: report, show, list."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import typer

from tinyrl.cli.together import Excludes, Needs, Rule
from tinyrl.config.recipe import dump_config, load_config, method_of, packaged_recipes
from tinyrl.config.settings import describe_settings
from tinyrl.runs import show as shown
from tinyrl.runs.places import RunAt, reported_at, runs_at
from tinyrl.runs.records import run_name, seed_runs
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
    runs: list[str] = typer.Argument(
        metavar="RUN...", help="a run, several to compare in one set of charts, or the folder of a command with --seeds"
    ),
    output: str | None = typer.Option(
        None, metavar="FOLDER", help="with several runs: where to write the report; default: beside the first run"
    ),
) -> None:
    """Write report.html and report.png of a run, finished or going on, or of several runs together."""
    from tinyrl.tools.report import write_overlay, write_report  # with jinja2

    of_seeds = bool(seed_runs(Path(runs[0])))
    is_one_run = len(runs) == 1 and not of_seeds
    if is_one_run and output is not None:
        raise ValueError("--output is for a report of several runs; that of one run is in its folder")
    notes = list[str]()
    folders = [folder for run in runs for folder in reported_at(run, notes)]
    if is_one_run:
        print(*write_report(folders[0]), sep="\n")
        return
    first = Path(runs[0]) if of_seeds else folders[0]
    beside = first if len(runs) == 1 else first.resolve().parent
    print(*write_overlay(folders, beside if output is None else Path(output)), sep="\n")
    for note in notes:
        print(f"tinyrl: {note}", file=sys.stderr)


def show(
    run: str = typer.Argument(
        metavar="RUN|CHECKPOINT",
        help="a run, a checkpoint (also RUN@best, RUN@STEP) to show that step, or the folder of a command with --seeds",
    ),
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
    asks_samples = samples or worst or unsolved or any(given is not None for given in (prompt, step, kind))
    asks_prompts = prompts or export_hard is not None
    found = runs_at(run)
    if export_hard is not None and len(found) > 1:
        raise ValueError(f"--export-hard writes the rows of one run, and {run} holds {len(found)}: name one of them")
    if json_output:
        each = {run_name(at.run.path): shown.checkpoint_lines(at.run, [], step=at.step) for at in found}
        typer.echo(json.dumps(each if len(found) > 1 else next(iter(each.values()))))
        return
    which: dict[str, Any] = {"kind": kind, "step": step, "num": num or 4, "prompt": prompt, "worst": worst}
    for number, at in enumerate(found):
        notes = list[str]()
        if asks_samples:
            text = _samples(at, notes, unsolved=unsolved, **which)
        elif asks_prompts:
            text = _prompts(at, notes, num=num or 10, export_hard=export_hard)
        else:
            images = shown.image_lines(at.run.read_environment())
            text = "\n".join([shown.render_checkpoints(at.run, notes, step=at.step), *images])
        head = f"{at.run.path}\n" if len(found) > 1 else ""
        if number > 0:
            typer.echo("")
        typer.echo(head + text)
        for note in notes:
            print(f"tinyrl: {note}", file=sys.stderr)


def _samples(at: RunAt, notes: list[str], *, step: int | None, unsolved: bool, **which: Any) -> str:
    """Return samples of a run as text: of `step`, or else of that of the checkpoint that was named."""
    from tinyrl.data.rows import solved_from  # not for --help

    if None not in (step, at.step) and step != at.step:
        raise ValueError(f"--step {step}: the checkpoint that is named is of step {at.step}; leave one of them out")
    limit = solved_from(at.run.read_config().task.solved_reward) if unsolved else None
    step = at.step if step is None else step
    rows = shown.select_samples(at.run.samples, notes, step=step, unsolved=limit, **which)
    return shown.render_samples(rows) or "every prompt of that step has a sample that is right"


def _prompts(at: RunAt, notes: list[str], *, num: int, export_hard: str | None) -> str:
    """Return training prompts of a run by outcome, up to the checkpoint that was named; write the hard ones to a file
    if one is given.
    """
    from tinyrl.tasks.run_rows import export_rows, row_texts  # with the tasks: not for --help
    from tinyrl.workers.foreign_code import tell_code

    config = at.run.read_config()
    tell_code(at.run.path, config, sections=("task",))
    stats = shown.read_prompt_stats(at.run.prompts, notes, until=at.step)
    hard = {record.index: record.key for record in stats if record.outcome in shown.HARD}
    text = shown.render_prompt_stats(stats, row_texts(at.run, hard, notes), num=num)
    if export_hard is None:
        return text
    return f"{text}\n\n{export_rows(config, {*hard.values()}, Path(export_hard))}"


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
