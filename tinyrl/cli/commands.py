"""The `tinyrl` command. Parses, checks what needs no torch, then imports what a command needs inside it.

Exit codes: 0 done, 2 wrong config or data (before training), 3 stopped by a guard, 4 out of memory or disk, 75
interrupted and resumable.
"""

from __future__ import annotations

import gc
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

import tinyrl
from tinyrl.cli import checkup, judging, looking, taking, trials
from tinyrl.cli.errors import memory_sentences, sentences
from tinyrl.cli.options import Debug, Device, TrustRemoteCode, complete_setting
from tinyrl.cli.train import How, plan_run, resume_run, show_run, start_run
from tinyrl.config.methods import METHODS, or_list
from tinyrl.runs.launched import launched

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=tinyrl.__doc__,
)


def complete_method(incomplete: str) -> list[str]:
    """Methods that begin like this."""
    return [name for name in METHODS if name.startswith(incomplete)]


def complete_section(incomplete: str) -> list[str]:
    """Sections of the configuration that begin like this."""
    from tinyrl.config.settings import SECTIONS

    return [name for name in SECTIONS if name.startswith(incomplete)]


OutputDir = Annotated[str, typer.Option(help="where run folders are made")]


def main() -> None:
    """Entry point of the `tinyrl` script."""
    try:
        with memory_sentences("--debug" in sys.argv):
            app()
    finally:
        gc.freeze()  # else Python looks through all objects of the libraries once more before it ends: over a second


SEVERAL_PROCESSES = ("train", "eval", "compare")  # commands that processes can share


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context, show: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    if show:
        print(tinyrl.__version__)
        raise typer.Exit
    command = context.invoked_subcommand
    if command is not None and command not in SEVERAL_PROCESSES:
        with sentences(False):
            refuse_processes(command)


def refuse_processes(command: str) -> None:
    """Raise ValueError, with the command to type, where several processes were launched for one that needs one."""
    count = launched().world_size
    if count > 1:
        raise ValueError(
            f"`tinyrl {command}` works in one process, and {count} were launched (WORLD_SIZE). Without the launcher:\n"
            f"  {shlex.join(['tinyrl', *sys.argv[1:]])}"
        )


@app.command()
def train(
    method: Annotated[str | None, typer.Argument(help=or_list([*METHODS]), autocompletion=complete_method)] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [section.key=value]...",
            help="a recipe (path or packaged name), overrides",
            autocompletion=complete_setting,
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the run; default <method>-<task>-<n>")] = None,
    output_dir: OutputDir = "runs",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a run of that name")] = False,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="go on with a run; needs nothing else")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show the resolved config, a prompt and the reward, then exit")
    ] = False,
    allow_config_change: Annotated[
        bool, typer.Option("--allow-config-change", help="with --resume: go on with settings that have changed")
    ] = False,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Train a model. Without a recipe: the embedded default, on a CPU, in a minute or two."""
    how = How(device, trust_remote_code, debug)
    if resume is not None:
        besides = ["--name"] * bool(name) + ["--overwrite"] * overwrite + ["--dry-run"] * dry_run
        words = [word for word in (method, *(settings or [])) if word]
        resume_run(resume, words, besides=besides, allow_config_change=allow_config_change, how=how)
    elif allow_config_change:
        with sentences(debug):
            raise ValueError("--allow-config-change is for going on with a run: tinyrl train --resume RUN")
    elif dry_run:
        show_run(method, settings or [], how=how)
    else:
        start_run(method, settings or [], name=name, output_dir=output_dir, overwrite=overwrite, how=how)


@app.command()
def plan(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[METHOD] [RECIPE] [section.key=value]...",
            help="what `tinyrl train` would be given; a recipe says its method itself",
            autocompletion=complete_setting,
        ),
    ],
    output_dir: OutputDir = "runs",
    timed: Annotated[bool, typer.Option("--time/--no-time", help="load the weights too, and time a step")] = True,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Say what a run will take: memory by part, disk, what fits, seconds a step. Exits with 4 where it does not fit."""
    plan_run(words, output_dir=output_dir, timed=timed, how=How(device, trust_remote_code, debug))


app.command("eval")(judging.evaluate)
app.command()(judging.compare)
app.command()(checkup.doctor)
app.command()(taking.export)
app.command()(taking.chat)


@app.command()
def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="one run, or several that are laid over each other")
    ],
    output: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="of several runs: where to write; default the folder of the first run's"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write report.html and report.png of a run, finished or going on, or of several runs together."""
    with sentences(debug):
        from tinyrl.report import write_overlay, write_report

        folders = [Path(run) for run in runs]
        if output is not None and len(folders) == 1:
            raise ValueError("--output is for a report of several runs; that of one run is in its folder")
        parent = Path(output) if output is not None else folders[0].resolve().parent
        for path in write_report(folders[0]) if len(folders) == 1 else write_overlay(folders, parent):
            print(path)


@app.command()
def checkpoints(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    json_output: Annotated[bool, typer.Option("--json", help="print one JSON list")] = False,
    debug: Debug = False,
) -> None:
    """List the checkpoints of a run: step, size, metric, and whether each verifies."""
    with sentences(debug):
        from tinyrl.runs.run_dir import open_run
        from tinyrl.runs.summary import list_verified, render

        opened = open_run(run)
        listed = list_verified(opened)
        print(json.dumps([vars(one) for one in listed]) if json_output else render(opened, listed))


app.command()(looking.samples)
app.command()(looking.prompts)
app.add_typer(trials.rewards, name="reward")
app.add_typer(trials.environments, name="env")


@app.command("settings")
def list_settings(
    section: Annotated[
        str | None, typer.Argument(help="model, lora, task, ...; default: all", autocompletion=complete_section)
    ] = None,
    debug: Debug = False,
) -> None:
    """Every setting of a recipe: name, default, meaning, type."""
    with sentences(debug):
        from tinyrl.config.settings import describe_settings

        print(describe_settings(section, width=max(60, min(shutil.get_terminal_size().columns, 120))))


@app.command()
def recipes() -> None:
    """List the recipes that ship with tinyrl."""
    from tinyrl.config.recipe import packaged_recipes

    for name, path in packaged_recipes().items():
        first = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        print(f"{name:28} {first}")


@app.command()
def tasks() -> None:
    """List the tasks: rows, a prompt, a verifier."""
    from tinyrl.tasks import TASKS, load_task

    for name in TASKS:
        print(f"{name:20} {load_task(name).summary}")
