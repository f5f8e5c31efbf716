"""Commands that use a policy: `tinyrl export` and `tinyrl chat`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tinyrl.cli.errors import sentences
from tinyrl.cli.options import Debug, Device, RunOptions, TrustRemoteCode, complete_setting, quiet_libraries


def export(
    run: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT")],
    merge: Annotated[bool, typer.Option("--merge", help="one model, the adapter merged into its base")] = False,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="of a whole model; auto: as the base's files"),
    ] = "auto",
    output: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="where to; default RUN/export/adapter, model or merged")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an exported folder")] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="keep a model of which rounding changes over 1 % of greedy tokens")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Write the policy as a folder for transformers and PEFT, vLLM, llama.cpp: the adapter, or a merged model."""
    quiet_libraries()
    with sentences(debug):
        from tinyrl.tools.export.bundle import export as write
        from tinyrl.tools.export.bundle import plan_export

        plan = plan_export(run, merge=merge, dtype=dtype, output=output, overwrite=overwrite)
        print(write(plan, accept_changes=accept_changes, trust_remote_code=trust_remote_code).render())


def chat(
    target: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT|MODEL")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[section.key=value]...",
            help="of task, generation, environment and reward, in place of the run's",
            autocompletion=complete_setting,
        ),
    ] = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Talk to a policy or a model: answers as they are written, beside the start's, with the reward they would get."""
    quiet_libraries()
    with sentences(debug):
        from tinyrl.tools.chat.target import chat_target

        found = chat_target(target, settings or [])
        from tinyrl.tools.chat.speaker import load_speaker
        from tinyrl.tools.chat.terminal import converse

        options = RunOptions(device, trust_remote_code, debug).of_parts()
        with load_speaker(found, options=options) as speaker:
            converse(speaker)
