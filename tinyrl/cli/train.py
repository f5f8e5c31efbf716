"""`tinyrl train` (a new run, a dry run, a resumed one), and what comes before it: `plan` and `probe`.

`train --from` goes on from a checkpoint as a new run, under other settings or under the same.

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

from tinyrl.cli.options import Json, setting_words
from tinyrl.config.methods import METHODS, or_list
from tinyrl.errors import OutOfRoom
from tinyrl.runs.launched import Options, forget_launcher, launched

if TYPE_CHECKING:
    from tinyrl.config.schema import Config


def complete_method(incomplete: str) -> list[str]:
    return [name for name in METHODS if name.startswith(incomplete)]


WORDS = setting_words(
    "what `tinyrl train` would be given; a recipe says its method itself", before="[METHOD] [RECIPE] "
)


def train(
    method: Annotated[str | None, typer.Argument(help=or_list([*METHODS]), autocompletion=complete_method)] = None,
    settings: Annotated[
        list[str] | None,
        setting_words("a recipe (path or packaged name), overrides", before="[RECIPE] "),
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
    given = settings or []
    if resume is not None:
        besides = ["--name"] * bool(name) + ["--overwrite"] * overwrite + ["--dry-run"] * dry_run
        besides += ["--from"] * (origin is not None)
        given = [word for word in (method, *given) if word]
        return _resume(resume, given, besides=besides, changes=allow_config_change, until=until, options=options)
    if allow_config_change:
        raise ValueError("--allow-config-change is for going on with a run: tinyrl train --resume RUN")
    if origin is not None:
        words = [word for word in (method, *given) if word]
        besides = ["--overwrite"] * overwrite + ["--dry-run"] * dry_run
        return _fork(origin, words, besides=besides, output_dir=output_dir, name=name, until=until, options=options)
    if dry_run:
        return _dry_run(method, given, options=options)
    output_dir = output_dir or "runs"
    from tinyrl.runs.run_dir import check_new_run

    config = config_of(method, given)
    if launched().rank == 0:
        check_new_run(output_dir, name=name, overwrite=overwrite)
    from tinyrl.tools.report import write_report
    from tinyrl.training.launch import start

    command = ["tinyrl", *sys.argv[1:]]
    launch = start(config, options=options, output_dir=output_dir, name=name, overwrite=overwrite, command=command)
    return partial(launch.go, report=write_report, until=until)


def plan(
    words: Annotated[list[str], WORDS],
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
    words: Annotated[list[str], WORDS],
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
    """Before a run: sample some prompts, and say what would keep it from learning, and what to change."""
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


def _dry_run(method: str | None, settings: list[str], *, options: Options) -> None:
    """Everything up to the first step, printed by one process: nothing is written."""
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
        said = shlex.join(["tinyrl", "probe", config.method, *settings])
        print(f"what the policy makes of its prompts, and whether it can learn from them: {said}")


def _resume(
    run: str, given: list[str], *, besides: list[str], changes: bool, until: int | None, options: Options
) -> Callable[[], int] | None:
    """Go on with a run; of the words `given` beside it only overrides make sense, and of options none of `besides`."""
    from tinyrl.cli.preflight import check_before_loading
    from tinyrl.runs.run_dir import open_run

    if got := " ".join([*(word for word in given if "=" not in word), *besides]):
        raise ValueError(f"--resume needs nothing else: config.yaml of the run says everything (got {got!r} too)")
    opened = open_run(run, writes=launched().rank == 0)
    config = opened.read_config(given)
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


def _fork(
    origin: str,
    given: list[str],
    *,
    besides: list[str],
    output_dir: str | None,
    name: str | None,
    until: int | None,
    options: Options,
) -> Callable[[], int]:
    """Start a new run from a checkpoint, under its settings with those `given`; RUN itself is only read."""
    if got := " ".join([*(word for word in given if "=" not in word), *besides]):
        raise ValueError(f"--from takes section.key=value, --name, --output-dir and --until (got {got!r} too)")
    if launched().world_size > 1:
        raise ValueError("--from works in one process, and several were launched")
    from tinyrl.tools.report import write_report
    from tinyrl.training.resume import fork

    command = ["tinyrl", *sys.argv[1:]]
    launch = fork(origin, given, options=options, output_dir=output_dir, name=name, command=command)
    return partial(launch.go, report=write_report, until=until)


def _resolved(words: list[str]) -> Config:
    from tinyrl.config.recipe import method_of
    from tinyrl.runs.resolve import resolve

    return resolve(config_of(*method_of(words)))


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
