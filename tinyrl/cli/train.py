"""`tinyrl train`: a new run, a resumed one, one from a checkpoint. Torch is imported once the settings are right."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from tinyrl.cli.options import settings_argument
from tinyrl.cli.together import Excludes, Needs, Rule
from tinyrl.config.methods import METHODS, or_list
from tinyrl.config.recipe import load_config, method_of
from tinyrl.process.collector import lasting_imports
from tinyrl.process.errors import ExplainedByCheck, OutOfRoom
from tinyrl.process.launched import Options, launched
from tinyrl.runs.best import ended_early
from tinyrl.runs.places import run_to_resume
from tinyrl.runs.records import read_steps
from tinyrl.runs.run_dir import RunDir, check_new_run
from tinyrl.runs.show import go_on_without_patience

if TYPE_CHECKING:
    from tinyrl.config.schema import Config
    from tinyrl.training.run import Run

OF_A_NEW_RUN = ("METHOD", "--name", "--output-dir", "--overwrite", "--from")
OF_TRAIN: tuple[Rule, ...] = (
    Excludes("--resume", OF_A_NEW_RUN, "the run goes on as it is, with settings as section.key=value at most"),
    Excludes("--from", ("METHOD", "--overwrite"), "method and recipe are those of the run it starts from"),
    Excludes("--seeds", ("--resume", "--from", "--until"), "each seed is a new run to its end, or goes on to it"),
    Needs("--allow-config-change", ("--resume",), "it allows other settings in a run that goes on"),
)


def train(
    words: list[str] | None = settings_argument(
        f"{or_list([*METHODS])}; a recipe, by path or name", before="METHOD [RECIPE] ", default=None
    ),
    name: str | None = typer.Option(None, help="name of the run; default: METHOD-TASK-N"),
    output_dir: str | None = typer.Option(None, help="parent of the run's folder; default: runs (--from: beside RUN)"),
    overwrite: bool = typer.Option(False, "--overwrite", help="replace an existing run of the same name"),
    resume: str | None = typer.Option(None, metavar="RUN", help="resume this run with its own settings"),
    origin: str | None = typer.Option(
        None, "--from", metavar="RUN[@STEP|@best]", help="start a new run from a checkpoint of this run"
    ),
    allow_config_change: bool = typer.Option(
        False, "--allow-config-change", help="with --resume: allow changed settings, data or code"
    ),
    seeds: str | None = typer.Option(
        None, metavar="N|A,B,...", help="train N seeds from run.seed on, or these, one after another; one report"
    ),
    until: int | None = typer.Option(None, min=1, metavar="STEP", help="stop after this step and save a checkpoint"),
    *,
    options: Options,
) -> Callable[[], int] | None:
    """Train a model. Without a recipe: the embedded default, on a CPU, in about a minute."""
    words = words or []
    if seeds is not None:
        from tinyrl.cli.seeds import SeedCommands, prepare_seeds, train_seeds, typed_seeds  # with subprocesses

        where: dict[str, Any] = {"name": name, "output_dir": output_dir or "runs", "overwrite": overwrite}
        runs = prepare_seeds(typed_config(words), seeds=typed_seeds(seeds), **where)
        commands = SeedCommands(runs, words, given=seeds, options=options)
        return partial(train_seeds, runs, commands.train, again=commands.again)
    main = launched().rank == 0
    how: dict[str, Any] = {"options": options, "name": name, "command": ["tinyrl", *sys.argv[1:]], "until": until}
    if resume is not None:
        opened = run_to_resume(resume, writes=main)
        run = resumed(opened, words, options=options, allow_config_change=allow_config_change, until=until)
        if run is None:
            if main:
                print_finished(opened)
            return None
    elif origin is not None:
        if launched().world_size > 1:
            raise ValueError("--from works in one process: leave the launcher out")
        with lasting_imports():
            from tinyrl.training import launch  # with torch

        run = launch.fork(origin, words, output_dir=output_dir, **how)
    else:
        run = started(words, output_dir=output_dir or "runs", overwrite=overwrite, **how)
    from tinyrl.tools.report import write_report  # with jinja2

    return partial(run.go, report=write_report)


def started(
    words: list[str], *, options: Options, output_dir: str, name: str | None, overwrite: bool, **how: Any
) -> Run:
    """Load a new run of what the command line asks for."""
    from tinyrl.rollout.prepared import prepare  # with the tasks: not for --help

    config = typed_config(words)
    if launched().rank == 0:
        check_new_run(output_dir, name=name, overwrite=overwrite)
    prepared = prepare(config)
    with lasting_imports():
        from tinyrl.training import launch  # with torch

    where: dict[str, Any] = {"output_dir": output_dir, "name": name, "overwrite": overwrite}
    try:
        return launch.start(prepared, options=options, **where, **how)
    except (ExplainedByCheck, OutOfRoom) as error:
        advice = "for details: `tinyrl check` with the method and settings of this run (memory: --offline)"
        raise type(error)(f"{error}\n{advice}") from error


def print_finished(run: RunDir) -> None:
    """Say that there is nothing left to do, and how to go on with a run that ended early."""
    print(f"{run.path} is finished; there is nothing left to do. Look at {run.path}/report.html")
    if early := ended_early(run, read_steps(run.metrics, [])):
        print(f"It {early}. To go on: {go_on_without_patience(run)}")


def resumed(
    opened: RunDir, words: list[str], *, options: Options, allow_config_change: bool, until: int | None
) -> Run | None:
    """Load a run that goes on, with settings laid over its own; None: it is finished."""
    from tinyrl.rollout.prepared import prepare  # with the tasks: not for --help
    from tinyrl.runs.resolve import changed_config
    from tinyrl.workers.foreign_code import tell_code

    config = changed_config(opened, words)
    tell_code(opened.path, config)
    prepared = prepare(config, goes_on=True)
    with lasting_imports():
        from tinyrl.training import launch  # with torch

    return launch.resume(opened, prepared, options=options, allow_config_change=allow_config_change, until=until)


def print_note(sentence: str) -> None:
    if launched().rank == 0:
        print(f"note: {sentence}", file=sys.stderr)


def typed_config(words: list[str]) -> Config:
    """Load the configuration that the command line asks for."""
    from tinyrl.runs.resolve import model_facts

    method, words = method_of(words)
    has_recipe = bool(words) and ("=" not in words[0] or os.path.isfile(words[0]))
    recipe = words[0] if has_recipe else None
    overrides = words[1:] if has_recipe else words
    return load_config(method, recipe, overrides=overrides, note=print_note, facts=model_facts)
