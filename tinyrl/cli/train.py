"""`tinyrl train` (a new run, a dry run, a resumed one), and before it `tinyrl plan` and `tinyrl probe`.

Torch is imported once the settings are known to be right.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinyrl.cli.errors import sentences
from tinyrl.cli.options import (
    Debug,
    Device,
    Json,
    RunOptions,
    TrustRemoteCode,
    complete_setting,
    ending_together,
    quiet_libraries,
)
from tinyrl.config.methods import METHODS, or_list
from tinyrl.errors import OutOfRoom
from tinyrl.runs.launched import forget_launcher, launched

if TYPE_CHECKING:
    from tinyrl.config.schema import Config
    from tinyrl.training.planning import Planned


def complete_method(incomplete: str) -> list[str]:
    return [name for name in METHODS if name.startswith(incomplete)]


OutputDir = Annotated[str, typer.Option(help="where run folders are made")]


def train(
    method: Annotated[str | None, typer.Argument(help=or_list([*METHODS]), autocompletion=complete_method)] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [section.key=value]...",
            help="a recipe (path or packaged name), overrides",
            autocompletion=complete_setting,
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the run; default <method>-<task>-<n>")] = None,
    output_dir: OutputDir = "runs",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a run of that name")] = False,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="go on with a run; needs nothing else")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show the resolved config, a prompt and the reward, then exit")
    ] = False,
    allow_config_change: Annotated[
        bool, typer.Option("--allow-config-change", help="with --resume: go on with settings that have changed")
    ] = False,
    until: Annotated[
        int | None, typer.Option(min=1, metavar="STEP", help="stop after this step, with a checkpoint to go on from")
    ] = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Train a model. Without a recipe: the embedded default, on a CPU, in a minute or two."""
    options, words = RunOptions(device, trust_remote_code, debug), settings or []
    if resume is not None:
        besides = ["--name"] * bool(name) + ["--overwrite"] * overwrite + ["--dry-run"] * dry_run
        words = [word for word in (method, *words) if word]
        _resume(resume, words, besides=besides, allow_config_change=allow_config_change, until=until, options=options)
    elif allow_config_change:
        with sentences(debug):
            raise ValueError("--allow-config-change is for going on with a run: tinyrl train --resume RUN")
    elif dry_run:
        _dry_run(method, words, options=options)
    else:
        _start(method, words, name=name, output_dir=output_dir, overwrite=overwrite, until=until, options=options)


WORDS = typer.Argument(
    metavar="[METHOD] [RECIPE] [section.key=value]...",
    help="what `tinyrl train` would be given; a recipe says its method itself",
    autocompletion=complete_setting,
)
Words = Annotated[list[str], WORDS]


def plan(
    words: Words,
    output_dir: OutputDir = "runs",
    timed: Annotated[bool, typer.Option("--time/--no-time", help="load the weights too, and time a step")] = True,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Say what a run will take: memory by part, disk, what fits, seconds a step. Exits with 4 where it does not fit."""
    with sentences(debug):
        from tinyrl.config.recipe import method_of
        from tinyrl.runs.resolve import resolve

        method, settings = method_of(words)
        config = resolve(config_of(method, settings))
    quiet_libraries()
    from tinyrl.runs.signals import StopFlag
    from tinyrl.training.launch import plan, time_steps

    with StopFlag(), sentences(debug):
        options = RunOptions(device, trust_remote_code, debug).of_parts()
        planned = plan(config, options=options, output_dir=output_dir)
        _show_plan(planned)
        if timed and not planned.offline:
            print(time_steps(config, options=options))


def probe(
    words: Words,
    prompts: Annotated[int, typer.Option(min=1, help="training prompts to sample, at most")] = 64,
    samples: Annotated[int | None, typer.Option(min=2, help="completions of each; default a group, at least 8")] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="after which no further prompts are sampled")] = 2.0,
    write: Annotated[
        str | None, typer.Option(metavar="ROWS.jsonl", help="write the rows there, with a column pass_rate")
    ] = None,
    json_output: Json = False,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Before a run: sample some prompts, and say what would keep it from learning, and what to change."""
    with sentences(debug):
        from tinyrl.config.recipe import method_of
        from tinyrl.runs.resolve import resolve

        method, settings = method_of(words)
        config = resolve(config_of(method, settings))
    quiet_libraries()
    from tinyrl.runs.signals import StopFlag
    from tinyrl.tools.probe import probe, render, rows_with_rates, to_json, write_rows

    with StopFlag(), sentences(debug):
        options = RunOptions(device, trust_remote_code, debug).of_parts()
        seen = probe(config, options=options, num_prompts=prompts, samples=samples, minutes=minutes)
        print(json.dumps(to_json(seen)) if json_output else render(seen))
        if write is not None:
            rows = rows_with_rates(config, seen)
            write_rows(Path(write), rows)
            if not json_output:
                print(f"\n{write}: {len(rows):,} rows, {len(seen.groups):,} of them with a pass_rate")


def _start(
    method: str | None,
    settings: list[str],
    *,
    name: str | None,
    output_dir: str,
    overwrite: bool,
    until: int | None,
    options: RunOptions,
) -> None:
    with sentences(options.debug):
        from tinyrl.runs.run_dir import check_new_run

        config = config_of(method, settings)
        if launched().rank == 0:
            check_new_run(output_dir, name=name, overwrite=overwrite)
    quiet_libraries()
    from tinyrl.runs.signals import StopFlag
    from tinyrl.tools.report import write_report
    from tinyrl.training.launch import start

    with StopFlag(), ending_together():
        with sentences(options.debug):
            command = ["tinyrl", *sys.argv[1:]]
            launch = start(
                config,
                options=options.of_parts(),
                output_dir=output_dir,
                name=name,
                overwrite=overwrite,
                command=command,
            )
        raise typer.Exit(launch.go(report=write_report, until=until))


def _dry_run(method: str | None, settings: list[str], *, options: RunOptions) -> None:
    """Everything up to the first step, printed by one process: nothing is written."""
    with sentences(options.debug):
        from tinyrl.runs.resolve import resolve

        launch = launched()
        if launch.rank > 0:
            return
        forget_launcher()
        config = resolve(config_of(method, settings))
    quiet_libraries()
    from tinyrl.config.recipe import dump_config
    from tinyrl.runs.signals import StopFlag
    from tinyrl.training.launch import dry_run, plan
    from tinyrl.training.replicas import divided

    with StopFlag(), sentences(options.debug):
        print(dump_config(config))
        _show_plan(plan(config, options=options.of_parts()))
        if launch.world_size > 1:
            print(divided(config, launch.world_size))
        print(dry_run(config, options=options.of_parts()))
        if config.samples:
            said = shlex.join(["tinyrl", "probe", config.method, *settings])
            print(f"what the policy makes of its prompts, and whether it can learn from them: {said}")


def _show_plan(planned: Planned) -> None:
    print(planned.text, flush=True)
    if planned.problem is not None:
        raise OutOfRoom(planned.problem)


def _resume(
    run: str,
    words: list[str],
    *,
    besides: list[str],
    allow_config_change: bool,
    until: int | None,
    options: RunOptions,
) -> None:
    """Go on with a run; of the `words` beside it only overrides make sense, and of options none of `besides`."""
    overrides = [word for word in words if "=" in word]
    with contextlib.ExitStack() as until_the_end:
        with sentences(options.debug):
            from tinyrl.cli.preflight import check_before_loading
            from tinyrl.runs.run_dir import open_run

            got = " ".join([*(word for word in words if "=" not in word), *besides])
            if got:
                said = "config.yaml of the run says everything"
                raise ValueError(f"--resume needs nothing else: {said} (got {got!r} too)")
            opened = open_run(run, writes=launched().rank == 0)
            config = opened.read_config(overrides)
            check_before_loading(config)
            until_the_end.enter_context(opened.lock)
        quiet_libraries()
        from tinyrl.runs.signals import StopFlag
        from tinyrl.tools.report import write_report
        from tinyrl.training.resume import resume

        until_the_end.enter_context(StopFlag())
        until_the_end.enter_context(ending_together())
        with sentences(options.debug):
            launch = resume(opened, options=options.of_parts(), config=config, allow_config_change=allow_config_change)
        if launch is None:
            if opened.writes:
                print(f"{opened.path} is finished; there is nothing left to do. Look at {opened.path}/report.html")
            return
        raise typer.Exit(launch.go(report=write_report, until=until))


def config_of(method: str | None, settings: list[str]) -> Config:
    """The configuration that the command line asks for, checked as far as that goes without torch."""
    from tinyrl.cli.preflight import ask_hub_once, check_before_loading
    from tinyrl.config.recipe import load_config, split_settings

    if method is None:
        first, *others = METHODS
        raise ValueError(f"which method? `tinyrl train {first}`, {or_list(others)}; or `tinyrl train --resume RUN`")
    recipe, overrides = split_settings(settings)
    config = load_config(method, recipe, overrides=overrides)
    check_before_loading(config)
    ask_hub_once(config)
    return config
