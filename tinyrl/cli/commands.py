"""The `tinyrl` command: its commands, and what replaces those that were removed.

Each command checks what needs no torch, then imports what it needs inside its function. Exit codes: 0 done, 2 wrong
config or data (before training), 3 stopped by a guard, 4 out of memory or disk, 75 interrupted and resumable.
"""

from __future__ import annotations

import gc
import shlex
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import tinyrl
from tinyrl.cli import check, evaluate, show, take, train
from tinyrl.cli.options import command, user_errors
from tinyrl.runs.launched import launched

SEVERAL_PROCESSES = ("train", "eval")  # commands that processes can share

GONE = {  # removed commands, and the line that does the work of each
    "checkpoints": "tinyrl show RUN",
    "compare": "tinyrl eval POLICY POLICY ... --vs POLICY",
    "env test": "tinyrl check grpo task.data=ROWS environment.name=FILE.py:NAME --quick",
    "distill store": "tinyrl train distill RECIPE teacher.path=TEACHER (it answers as training goes on)",
    "eval --benchmark": (
        "tinyrl serve RUN, and beside it lm_eval --model local-completions --model_args "
        "model=RUN,base_url=http://127.0.0.1:8000/v1/completions,tokenizer=MODEL --tasks ..."
    ),
    "fork": "tinyrl train --from RUN[@STEP] [section.key=value ...]",
    "plan": "tinyrl check [METHOD] RECIPE [section.key=value ...] --offline [--memory 24GB]",
    "probe": "tinyrl check [METHOD] RECIPE [section.key=value ...] [--write ROWS.jsonl]",
    "prompts": "tinyrl show RUN --prompts [--export-hard FILE.jsonl]",
    "reward attack": "tinyrl check grpo task.data=ROWS 'reward.functions=[{use: FILE.py:FUNCTION}]' --quick",
    "reward test": "tinyrl check grpo task.data=ROWS 'reward.functions=[{use: FILE.py:FUNCTION}]' --quick",
    "recipes": "tinyrl list recipes",
    "samples": "tinyrl show RUN --samples (or --worst, --unsolved, --prompt I, --step N)",
    "settings": "tinyrl list settings [SECTION]",
    "sweep": (
        "for seed in 1 2 3; do tinyrl train RECIPE run.seed=$seed --name seed-$seed; done; "
        "tinyrl report runs/seed-1 runs/seed-2 runs/seed-3"
    ),
    "tasks": "tinyrl list tasks",
    "train --dry-run": "tinyrl check METHOD RECIPE [section.key=value ...]",
    "verify": "tinyrl train --from RUN@STEP (without settings it repeats the steps, to the bit)",
}


class Commands(TyperGroup):
    """The commands. A removed one is answered with what replaces it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for gone, instead in GONE.items():
            name, *options = gone.split()
            if args[0] == name and {*options} <= {word.partition("=")[0] for word in args}:
                with user_errors(False):
                    raise ValueError(f"`tinyrl {gone}` is gone. Instead:\n  {instead}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, help=tinyrl.__doc__
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
    name = context.invoked_subcommand
    if name is not None and name not in SEVERAL_PROCESSES:
        with user_errors(False):
            count = launched().world_size
            if count > 1:
                raise ValueError(
                    f"`tinyrl {name}` works in one process, and {count} were launched (WORLD_SIZE). Without the "
                    f"launcher:\n  {shlex.join(['tinyrl', *sys.argv[1:]])}"
                )


app.command()(command(train.train, trains=True))
app.command()(command(check.check, trains=True))
app.command("eval")(command(evaluate.evaluate))
for function in (check.doctor, take.export, take.chat, take.serve, show.report, show.show):
    app.command()(command(function))
app.command("list")(command(show.list_names))
