"""The `tinyrl` command. Parses, checks what needs no torch, then imports what a command needs inside it.

Exit codes: 0 done, 2 wrong config or data (before training), 3 stopped by a guard, 4 out of memory or disk, 75
interrupted and resumable.
"""

from __future__ import annotations

import gc
import shlex
import shutil
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import tinyrl
from tinyrl.cli import doctor, eval, policy, runs, train
from tinyrl.cli.errors import memory_sentences, sentences
from tinyrl.cli.options import framed
from tinyrl.runs.launched import launched

SEVERAL_PROCESSES = ("train", "eval", "compare")  # commands that processes can share
GONE = {  # removed commands, and what replaces each
    "sweep": (
        "for seed in 1 2 3; do tinyrl train RECIPE run.seed=$seed --name seed-$seed; done; "
        "tinyrl report runs/seed-1 runs/seed-2 runs/seed-3"
    ),
    "eval --benchmark": (
        "tinyrl serve RUN, and beside it lm_eval --model local-completions --model_args "
        "model=RUN,base_url=http://127.0.0.1:8000/v1/completions,tokenizer=MODEL --tasks ..."
    ),
    "distill store": "tinyrl train distill RECIPE teacher.path=TEACHER (it answers as training goes on)",
    "fork": "tinyrl train --from RUN[@STEP] [section.key=value ...]",
    "verify": "tinyrl train --from RUN@STEP (without settings it repeats the steps, to the bit)",
}


class Commands(TyperGroup):
    """The commands. A removed one is answered with what replaces it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for gone, instead in GONE.items():
            command, *options = gone.split()
            if args[0] == command and {*options} <= {word.partition("=")[0] for word in args}:
                with sentences(False):
                    raise ValueError(f"`tinyrl {gone}` is gone. Instead:\n  {instead}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, help=tinyrl.__doc__
)


def main() -> None:
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


def complete_section(incomplete: str) -> list[str]:
    from tinyrl.config.settings import SECTIONS

    return [name for name in SECTIONS if name.startswith(incomplete)]


def settings(
    section: Annotated[
        str | None, typer.Argument(help="model, lora, task, ...; default: all", autocompletion=complete_section)
    ] = None,
) -> None:
    """Every setting of a recipe: name, default, meaning, type."""
    from tinyrl.config.settings import describe_settings

    print(describe_settings(section, width=max(60, min(shutil.get_terminal_size().columns, 120))))


def recipes() -> None:
    """List the recipes that ship with tinyrl."""
    from tinyrl.config.recipe import packaged_recipes

    for name, path in packaged_recipes().items():
        first = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        print(f"{name:28} {first}")


def tasks() -> None:
    """List the tasks: rows, a prompt, a verifier."""
    from tinyrl.tasks import TASKS, load_task

    for name in TASKS:
        print(f"{name:20} {load_task(name).summary}")


TRAINING = (train.train, train.plan, train.probe)
OTHERS = (eval.evaluate, eval.compare, doctor.doctor, policy.export, policy.chat, policy.serve)
LOOKING = (runs.report, runs.checkpoints, runs.samples, runs.prompts, settings)
for function in (*TRAINING, *OTHERS, *LOOKING):
    app.command({"evaluate": "eval"}.get(function.__name__))(framed(function, stops=function in TRAINING))
for function in (recipes, tasks):
    app.command()(function)
for group, about, functions in (
    ("reward", "Try a reward before training on it.", {"test": doctor.reward_test, "attack": doctor.reward_attack}),
    ("env", "Try an environment before training.", {"test": doctor.environment_test}),
):
    inner = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=about)
    app.add_typer(inner, name=group)
    for name, function in functions.items():
        inner.command(name)(framed(function))
