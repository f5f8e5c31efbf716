"""`tinyrl train` (a new run, a resumed one, one from a checkpoint, a dry run), and what comes before: `plan`, `probe`.

Torch is imported once the settings are known to be right.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinyrl.cli.options import Json, settings_argument
from tinyrl.config.methods import METHODS, or_list
from tinyrl.errors import OutOfRoom
from tinyrl.runs.launched import Options, forget_launcher, launched

if TYPE_CHECKING:
    from tinyrl.config.schema import Config

Words = Annotated[
    list[str],
    settings_argument(
        "the words that `tinyrl train` would be given; a recipe says its method", before="[METHOD] [RECIPE] "
    ),
]


def complete_method(incomplete: str) -> list[str]:
    return [name for name in METHODS if name.startswith(incomplete)]


def train(
    method: Annotated[str | None, typer.Argument(help=or_list([*METHODS]), autocompletion=complete_method)] = None,
    settings: Annotated[
        list[str] | None, settings_argument("a recipe (path or packaged name), settings", before="[RECIPE] ")
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the run; default <method>-<task>-<n>")] = None,
    output_dir: Annotated[
        str | None, typer.Option(help="where run folders are made; default runs, with --from beside RUN")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a run of that name")] = False,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="go on with a run; needs nothing else")] = None,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="RUN[@STEP]", help="start a new run from a checkpoint (default: the newest) of RUN"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show the resolved config, a prompt and the reward, then exit")
    ] = False,
    allow_config_change: Annotated[
        bool, typer.Option("--allow-config-change", help="with --resume: go on with settings that have changed")
    ] = False,
    until: Annotated[
        int | None, typer.Option(min=1, metavar="STEP", help="stop after this step, with a checkpoint to go on from")
    ] = None,
    *,
    options: Options,
) -> Callable[[], int] | None:
    """Train a model. Without a recipe: the embedded default, on a CPU, in a minute or two."""
    words = [word for word in (method, *(settings or [])) if word]
    refused = [word for word in words if "=" not in word] + ["--overwrite"] * overwrite + ["--dry-run"] * dry_run
    if resume is not None:
        refused += ["--name"] * (name is not None) + ["--from"] * (origin is not None)
        if refused:
            got = " ".join(refused)
            raise ValueError(f"--resume needs nothing else: config.yaml of the run says everything (got {got!r} too)")
        return _resume(resume, words, changes=allow_config_change, until=until, options=options)
    if allow_config_change:
        raise ValueError("--allow-config-change is for going on with a run: tinyrl train --resume RUN")
    if origin is not None:
        if refused:
            got = " ".join(refused)
            raise ValueError(f"--from takes section.key=value, --name, --output-dir and --until (got {got!r} too)")
        if launched().world_size > 1:
            raise ValueError("--from works in one process, and several were launched")
    elif dry_run:
        return _dry_run(method, settings or [], options=options)
    command = ["tinyrl", *sys.argv[1:]]
    if origin is not None:
        from tinyrl.training.resume import fork

        launch = fork(origin, words, options=options, output_dir=output_dir, name=name, command=command)
    else:
        from tinyrl.runs.run_dir import check_new_run

        config, folder = config_of(method, settings or []), output_dir or "runs"
        if launched().rank == 0:
            check_new_run(folder, name=name, overwrite=overwrite)
        from tinyrl.training.launch import start

        launch = start(config, options=options, output_dir=folder, name=name, overwrite=overwrite, command=command)
    from tinyrl.tools.report import write_report

    return partial(launch.go, report=write_report, until=until)


def _resume(
    run: str, settings: list[str], *, changes: bool, until: int | None, options: Options
) -> Callable[[], int] | None:
    """Load a run that goes on, and lock it; None for a finished one."""
    from tinyrl.cli.preflight import check_before_loading
    from tinyrl.runs.run_dir import open_run

    opened = open_run(run, writes=launched().rank == 0)
    config = opened.read_config(settings)
    check_before_loading(config)
    with contextlib.ExitStack() as held:
        held.enter_context(opened.lock)
        from tinyrl.tools.report import write_report
        from tinyrl.training.resume import resume

        launch = resume(opened, options=options, config=config, allow_config_change=changes)
        if launch is not None:
            held.pop_all()  # go() releases it
            return partial(launch.go, report=write_report, until=until)
    if opened.writes:
        print(f"{opened.path} is finished; there is nothing left to do. Look at {opened.path}/report.html")
    return None


def _dry_run(method: str | None, settings: list[str], *, options: Options) -> None:
    """Print everything up to the first step, in one process; nothing is written."""
    processes = launched()
    if processes.rank > 0:
        return
    forget_launcher()
    from tinyrl.config.recipe import dump_config
    from tinyrl.runs.resolve import resolve

    config = resolve(config_of(method, settings))
    from tinyrl.training.launch import dry_run
    from tinyrl.training.replicas import divided

    print(dump_config(config))
    if processes.world_size > 1:
        print(divided(config, processes.world_size))
    print(dry_run(config, options=options))
    if config.samples:
        probing = shlex.join(["tinyrl", "probe", config.method, *settings])
        print(f"what the policy makes of its prompts, and whether it can learn from them: {probing}")


def plan(
    words: Words,
    output_dir: Annotated[str, typer.Option(help="where run folders are made")] = "runs",
    *,
    options: Options,
) -> None:
    """Estimate a run's memory by part, and its disk, from the model's shapes. Exits with 4 where it does not fit."""
    config = _resolved(words)
    from tinyrl.models.device import make_accelerator, memory_room
    from tinyrl.tools.plan import plan_run

    device = make_accelerator(options.device, dtype=config.model.dtype).device
    planned = plan_run(config, device=device.type, room=memory_room(device), output_dir=output_dir)
    print("\n".join(planned.lines()), flush=True)
    if planned.problem is not None:
        raise OutOfRoom(planned.problem)


def probe(
    words: Words,
    prompts: Annotated[int, typer.Option(min=1, help="training prompts to sample, at most")] = 64,
    samples: Annotated[int | None, typer.Option(min=2, help="completions of each; default a group, at least 8")] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="after which no further prompts are sampled")] = 2.0,
    write: Annotated[
        str | None, typer.Option(metavar="ROWS.jsonl", help="write the rows there, with a column pass_rate")
    ] = None,
    json_output: Json = False,
    *,
    options: Options,
) -> None:
    """Before a run: sample some prompts, and report what would keep it from learning, and what to change."""
    config = _resolved(words)
    from tinyrl.tools.probe import probe, rows_with_rates, write_rows
    from tinyrl.tools.probe_findings import render, to_json

    seen = probe(config, options=options, num_prompts=prompts, samples=samples, minutes=minutes)
    print(json.dumps(to_json(seen)) if json_output else render(seen))
    if write is not None:
        rows = rows_with_rates(config, seen)
        write_rows(Path(write), rows)
        if not json_output:
            print(f"\n{write}: {len(rows):,} rows, {len(seen.groups):,} of them with a pass_rate")


def _resolved(words: list[str]) -> Config:
    from tinyrl.config.recipe import method_of
    from tinyrl.runs.resolve import resolve

    return resolve(config_of(*method_of(words)))


def config_of(method: str | None, settings: list[str]) -> Config:
    """Load the configuration that the command line asks for, and check what can be checked without torch."""
    from tinyrl.cli.preflight import check_before_loading, go_offline_if_unreachable
    from tinyrl.config.recipe import load_config, split_settings

    if method is None:
        first, *others = METHODS
        raise ValueError(f"which method? `tinyrl train {first}`, {or_list(others)}; or `tinyrl train --resume RUN`")
    recipe, overrides = split_settings(settings)
    config = load_config(method, recipe, overrides=overrides)
    check_before_loading(config)
    go_offline_if_unreachable(config)
    return config
