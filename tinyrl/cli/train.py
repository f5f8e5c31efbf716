"""`tinyrl train`: a new run, a resumed one, one from a checkpoint. Torch is imported once the settings are right."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from tinyrl.cli.options import settings_argument
from tinyrl.config.methods import METHODS, or_list
from tinyrl.errors import SEE_CHECK, ExplainedByCheck, OutOfRoom
from tinyrl.runs.launched import Options, launched

if TYPE_CHECKING:
    from tinyrl.config.schema import Config
    from tinyrl.training.run import Run


def complete_method(incomplete: str) -> list[str]:
    return [name for name in METHODS if name.startswith(incomplete)]


def train(
    method: str | None = typer.Argument(None, help=or_list([*METHODS]), autocompletion=complete_method),
    settings: list[str] | None = settings_argument("recipe (path or name), settings", before="[RECIPE] ", default=None),
    name: str | None = typer.Option(None, help="name of the run; default <method>-<task>-<n>"),
    output_dir: str | None = typer.Option(None, help="where run folders are made; default runs (--from: beside RUN)"),
    overwrite: bool = typer.Option(False, "--overwrite", help="replace a run of that name"),
    resume: str | None = typer.Option(None, metavar="RUN", help="go on with a run; needs nothing else"),
    origin: str | None = typer.Option(None, "--from", metavar="RUN[@STEP]", help="start from a checkpoint of a run"),
    allow_config_change: bool = typer.Option(False, "--allow-config-change", help="with --resume: settings may differ"),
    until: int | None = typer.Option(None, min=1, metavar="STEP", help="stop after this step, with a checkpoint"),
    *,
    options: Options,
) -> Callable[[], int] | None:
    """Train a model. Without a recipe: the embedded default, on a CPU, in a minute or two."""
    words = [word for word in (method, *(settings or [])) if word]
    other = [word for word in words if "=" not in word] + ["--overwrite"] * overwrite
    if resume is not None:
        other += ["--name"] * (name is not None) + ["--from"] * (origin is not None)
        if other:
            got = " ".join(other)
            raise ValueError(f"--resume needs nothing else: config.yaml of the run says everything (got {got!r} too)")
        return _resume(resume, words, changes=allow_config_change, until=until, options=options)
    if allow_config_change:
        raise ValueError("--allow-config-change is for going on with a run: tinyrl train --resume RUN")
    how = {"options": options, "name": name, "command": ["tinyrl", *sys.argv[1:]]}
    if origin is not None:
        if other:
            got = " ".join(other)
            raise ValueError(f"--from takes section.key=value, --name, --output-dir and --until (got {got!r} too)")
        if launched().world_size > 1:
            raise ValueError("--from works in one process, and several were launched")
        from tinyrl.training.launch import fork

        launch = fork(origin, words, output_dir=output_dir, **how)
    else:
        launch = _start(config_of(method, settings or []), output_dir=output_dir or "runs", overwrite=overwrite, **how)
    from tinyrl.tools.report import write_report

    return partial(launch.go, report=write_report, until=until)


def _start(config: Config, *, output_dir: str, **how: Any) -> Run:
    """Start a new run; an error about which `tinyrl check` says more points to it."""
    from tinyrl.runs.run_dir import check_new_run

    if launched().rank == 0:
        check_new_run(output_dir, name=how["name"], overwrite=how["overwrite"])
    from tinyrl.training.launch import start

    try:
        return start(config, output_dir=output_dir, **how)
    except (ExplainedByCheck, OutOfRoom) as error:
        raise type(error)(f"{error}\n{SEE_CHECK}") from error


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
        from tinyrl.training.launch import resume

        launch = resume(opened, options=options, config=config, allow_config_change=changes)
        if launch is not None:
            held.pop_all()  # go() releases it
            return partial(launch.go, report=write_report, until=until)
    if opened.writes:
        print(f"{opened.path} is finished; there is nothing left to do. Look at {opened.path}/report.html")
    return None


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
