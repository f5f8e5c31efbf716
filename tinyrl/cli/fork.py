"""`tinyrl fork` and `tinyrl verify`: a run's steps from a checkpoint on, under other settings or under the same.

Torch is imported once the run is known to be one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from tinyrl.cli.options import setting_words
from tinyrl.errors import GuardStop
from tinyrl.runs.launched import Options


def fork(
    origin: Annotated[str, typer.Argument(metavar="RUN[@STEP]", help="from which checkpoint; default the newest")],
    settings: Annotated[list[str] | None, setting_words("what is another from there on")] = None,
    name: Annotated[str | None, typer.Option(help="name of the new run; default <method>-<task>-<n>")] = None,
    output_dir: Annotated[str | None, typer.Option(help="where it is made; default beside RUN")] = None,
    *,
    options: Options,
) -> Callable[[], int]:
    """Go on from a checkpoint as a new run under other settings; RUN itself stays as it is."""
    from tinyrl.tools.report import write_report
    from tinyrl.training.resume import fork as forked

    command = ["tinyrl", *sys.argv[1:]]
    launch = forked(origin, settings or [], options=options, output_dir=output_dir, name=name, command=command)
    return partial(launch.go, report=write_report)


def verify(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    num: Annotated[int, typer.Option(min=1, help="stretches between checkpoints to repeat, drawn at random")] = 1,
    everything: Annotated[bool, typer.Option("--all", help="repeat all of them")] = False,
    *,
    options: Options,
) -> int:
    """Repeat steps of a run: are samples, metrics and weights those it wrote? Exits with 3 where they are not."""
    from tinyrl.runs.run_dir import open_run

    opened = open_run(run)
    from tinyrl.training.verify import verify as verified

    found = []
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
    return GuardStop.exit_code if different or not repeated else 0
