"""The `tinyrl` command.

Each command checks what needs no torch, then imports what it needs inside its function. Exit codes: 0 done, 2 wrong
config or data (before training), 3 stopped by a guard, 4 out of memory or disk, 75 interrupted and resumable.
"""

from __future__ import annotations

import gc
import shlex
import sys
from typing import Annotated

import typer

import tinyrl
from tinyrl.cli import check, evaluate, show, take, train
from tinyrl.cli.options import command, user_errors
from tinyrl.runs.launched import launched

SEVERAL_PROCESSES = ("train", "eval")  # commands that processes can share

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, help=tinyrl.__doc__)


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


app.command()(command(train.train, trains=True))
app.command()(command(check.check, trains=True))
app.command("eval")(command(evaluate.evaluate))
for function in (check.doctor, take.export, take.chat, take.serve, show.report, show.show):
    app.command()(command(function))
app.command("list")(command(show.list_names))
