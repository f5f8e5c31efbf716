"""The `tinyrl` command.

Each command checks what needs no torch, then imports what it needs inside its function. Exit codes: 0 done, 2 wrong
config or data (before training), 3 stopped by a guard, 4 out of memory or disk, or the run's folder lost, 75
interrupted and resumable, 130 ended by Ctrl-C with nothing to resume.
"""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Callable
from typing import Annotated

import typer

import tinyrl
from tinyrl.cli import check, evaluate, show, take, train
from tinyrl.cli.options import CommandWithSettings, command, training_command, user_errors
from tinyrl.process.launched import launched

SEVERAL_PROCESSES = ("train", "eval")  # commands that processes can share

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=tinyrl.__doc__,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    try:
        app()
    finally:
        gc.freeze()  # else the interpreter collects all objects of the libraries before it exits: over a second


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context, show: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    if show:
        print(tinyrl.__version__)
        raise typer.Exit
    with user_errors(False):
        if context.invoked_subcommand not in SEVERAL_PROCESSES and launched().world_size > 1:
            alone = shlex.join(["tinyrl", *sys.argv[1:]])
            raise ValueError(f"`{alone}` works in one process, and several were launched (WORLD_SIZE)")


def add(name: str, wrapped: Callable[..., None], summary: str) -> None:
    """Add a command; `summary` is its line in `tinyrl --help`, which would cut the help itself."""
    app.command(name, cls=CommandWithSettings, short_help=summary)(wrapped)


add(
    "train",
    training_command(train.train, rules=train.OF_TRAIN),
    "Train a model: grpo, ppo, distill, sft, reward or dpo.",
)
add(
    "check", command(check.check, stops=True, rules=check.OF_CHECK), "Report whether a run will work and what it costs."
)
add("eval", command(evaluate.evaluate), "Evaluate policies or reward models on held-out rows.")
add("doctor", command(check.doctor), "Diagnose a run by its metrics: what is wrong, what to change.")
add(
    "export",
    command(take.export, rules=take.OF_EXPORT),
    "Write the policy as a folder for other libraries, or one model.",
)
add("chat", command(take.chat), "Talk to a policy or a model.")
add("serve", command(take.serve), "Answer OpenAI clients with a policy or a model.")
add("report", command(show.report), "Write report.html and report.png of a run, or of several.")
add("show", command(show.show, rules=show.OF_SHOW), "Show the checkpoints, samples or training prompts of a run.")
add("list", command(show.list_names), "List settings, recipes or tasks.")
