"""The `tinyrl` command. Parses, checks what needs no torch, then imports what a command needs inside it.

Exit codes: 0 done, 2 wrong config or data (before training), 3 stopped by a guard, 4 out of memory or disk, 75
interrupted and resumable.
"""

from __future__ import annotations

import gc
import shlex
import shutil
import sys
from typing import Annotated

import typer

import tinyrl
from tinyrl.cli import distill, doctor, eval, export, fork, runs, serve, sweep, train
from tinyrl.cli.errors import memory_sentences, sentences
from tinyrl.cli.options import Debug
from tinyrl.runs.launched import launched

SEVERAL_PROCESSES = ("train", "eval", "compare")  # commands that processes can share
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, help=tinyrl.__doc__)


def main() -> None:
    """Entry point of the `tinyrl` script."""
    try:
        with memory_sentences("--debug" in sys.argv):
            app()
    finally:
        gc.freeze()  # else Python looks through all objects of the libraries once more before it ends: over a second


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
            count = launched().world_size
            if count > 1:
                raise ValueError(
                    f"`tinyrl {command}` works in one process, and {count} were launched (WORLD_SIZE). Without the "
                    f"launcher:\n  {shlex.join(['tinyrl', *sys.argv[1:]])}"
                )


app.command()(train.train)
app.command()(train.plan)
app.command()(train.probe)
app.command()(sweep.sweep)
app.command()(fork.fork)
app.command()(fork.verify)
app.command("eval")(eval.evaluate)
app.command()(eval.compare)
app.command()(doctor.doctor)
app.command()(export.export)
app.command()(export.chat)
app.command()(serve.serve)
app.command()(runs.report)
app.command()(runs.checkpoints)
app.command()(runs.samples)
app.command()(runs.prompts)
app.add_typer(distill.distillation, name="distill")
app.add_typer(doctor.rewards, name="reward")
app.add_typer(doctor.environments, name="env")


def complete_section(incomplete: str) -> list[str]:
    from tinyrl.config.settings import SECTIONS

    return [name for name in SECTIONS if name.startswith(incomplete)]


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
