"""`tinyrl fork` and `tinyrl verify`: a run's steps from a checkpoint on, under other settings or under the same.

Torch is imported once the run is known to be one.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tinyrl.cli.errors import sentences
from tinyrl.cli.options import Debug, Device, RunOptions, TrustRemoteCode, complete_setting, quiet_libraries
from tinyrl.errors import GuardStop


def fork(
    origin: Annotated[str, typer.Argument(metavar="RUN[@STEP]", help="from which checkpoint; default the newest")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[section.key=value]...", help="what is another from there on", autocompletion=complete_setting
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the new run; default <method>-<task>-<n>")] = None,
    output_dir: Annotated[str | None, typer.Option(help="where it is made; default beside RUN")] = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Go on from a checkpoint as a new run under other settings; RUN itself stays as it is."""
    quiet_libraries()
    from tinyrl.runs.signals import StopFlag
    from tinyrl.tools.report import write_report
    from tinyrl.training.resume import fork as forked

    with StopFlag():
        with sentences(debug):
            launch = forked(
                origin,
                settings or [],
                options=RunOptions(device, trust_remote_code, debug).of_parts(),
                output_dir=output_dir,
                name=name,
                command=["tinyrl", *sys.argv[1:]],
            )
        raise typer.Exit(launch.go(report=write_report))


def verify(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    num: Annotated[int, typer.Option(min=1, help="stretches between checkpoints to repeat, drawn at random")] = 1,
    everything: Annotated[bool, typer.Option("--all", help="repeat all of them")] = False,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Repeat steps of a run: are samples, metrics and weights those it wrote? Exits with 3 where they are not."""
    with sentences(debug):
        from tinyrl.runs.run_dir import open_run

        opened = open_run(run)
    quiet_libraries()
    from tinyrl.runs.signals import StopFlag
    from tinyrl.training.verify import verify as verified

    found = []
    with StopFlag(), sentences(debug):
        options = RunOptions(device, trust_remote_code, debug).of_parts()
        for one in verified(opened, options=options, num=None if everything else num):
            print(one, flush=True)
            found.append(one)
    repeated = [one for one in found if one.skipped is None]
    different = [one for one in repeated if one.different]
    if not repeated:
        print("nothing could be repeated: keep more checkpoints (run.save_every, run.keep_checkpoints)")
    elif not different:
        print(f"verified: {len(repeated)} of {len(found)} stretches were repeated, and are the same to the bit")
    else:
        print(f"NOT verified: {len(different)} of {len(repeated)} differ")
    if different or not repeated:
        raise typer.Exit(GuardStop.exit_code)
