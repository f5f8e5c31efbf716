"""What distillation needs before it trains: `tinyrl distill store`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tinyrl.cli.errors import sentences
from tinyrl.cli.options import Debug, Device, RunOptions, TrustRemoteCode, complete_setting, quiet_libraries

STORED_TOP_K = 64  # of the teacher's tokens that are kept where teacher.top_k does not say
distillation = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Keep what a teacher says in files.")


@distillation.command("store")
def store(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RECIPE] [section.key=value]...",
            help="what `tinyrl train distill` would be given",
            autocompletion=complete_setting,
        ),
    ],
    output: Annotated[str, typer.Option(metavar="FOLDER", help="where to; then teacher.path=FOLDER needs no teacher")],
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Let a teacher read the answers in the rows and keep its likeliest tokens, so that training does without it."""
    with sentences(debug):
        from tinyrl.cli.train import config_of
        from tinyrl.runs.resolve import resolve

        asked = [] if any(word.startswith("teacher.top_k=") for word in words) else [f"teacher.top_k={STORED_TOP_K}"]
        config = resolve(config_of("distill", [*words, *asked]))
        if config.teacher.kind == "stored":
            raise ValueError(f"teacher.path={config.teacher.path} is stored already")
        if Path(output).exists() and any(Path(output).iterdir()):
            raise ValueError(f"{output} is there already; choose another --output")
    quiet_libraries()
    from tinyrl.rollout.components import trainer_of
    from tinyrl.runs.signals import StopFlag

    with StopFlag(), sentences(debug):
        trainer = trainer_of("distill")(config, options=RunOptions(device, trust_remote_code, debug).of_parts())
        trainer.store(Path(output), told=lambda line: print(line, flush=True))
        others = [word for word in words if not word.startswith("teacher.")]
        print(f"next: {shlex.join(['tinyrl', 'train', 'distill', *others, f'teacher.path={output}'])}")
