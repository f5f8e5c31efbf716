"""`tinyrl train`: a new run, a dry run, or a resumed one.

Torch is imported once the settings are known to be right.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from tinyrl.cli.errors import address_space, sentences
from tinyrl.config.methods import METHODS, or_list
from tinyrl.errors import OutOfRoom
from tinyrl.runs.launched import forget_launcher, launched

if TYPE_CHECKING:
    from tinyrl.config.schema import Config
    from tinyrl.training.planning import Planned


# Turns of the loop in which an OpenMP thread waits before it sleeps: the most that costs nothing when alone. Two
# threads on two cores, seconds of a GRPO step of a small model, alone and beside a process that computes: 300,000 turns
# (libgomp's own) 3.2 alone, 30,000 3.1 and 20, 10,000 3.7 and 12.
SPINS = "30000"
LIBRARIES_GB = 1.0  # of address space that a build of torch for CPUs, transformers and PEFT take at least
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}  # of torch; the second is the older name


@dataclass(frozen=True)
class How:
    """Options of every command that loads a model."""

    device: str
    trust_remote_code: bool
    debug: bool


def start_run(
    method: str | None, settings: list[str], *, name: str | None, output_dir: str, overwrite: bool, how: How
) -> None:
    """Make a run's folder and train to its end."""
    with sentences(how.debug):
        from tinyrl.runs.run_dir import check_new_run

        config = _config_of(method, settings)
        if launched().rank == 0:
            check_new_run(output_dir, name=name, overwrite=overwrite)
    quiet_libraries()
    from tinyrl.runs.signals import StopFlag
    from tinyrl.training.launch import Options, start

    with StopFlag(), ending_together():
        with sentences(how.debug):
            options, command = (
                Options(device=how.device, trust_remote_code=how.trust_remote_code),
                ["tinyrl", *sys.argv[1:]],
            )
            launch = start(
                config, options=options, output_dir=output_dir, name=name, overwrite=overwrite, command=command
            )
        raise typer.Exit(launch.go())


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Around what several processes do: one that ends tells the others, and none is left behind."""
    code = None
    try:
        yield
        code = 0
    except typer.Exit as end:
        code = end.exit_code
        raise
    finally:
        distributed = sys.modules.get("tinyrl.distributed")  # not yet, where an error came before torch
        if distributed is not None and distributed.world().size > 1:
            if code is None:  # a bug, whose traceback nobody would see after this
                traceback.print_exc()
            distributed.leave(1 if code is None else code)


def show_run(method: str | None, settings: list[str], *, how: How) -> None:
    """Everything up to the first step, printed by one process: nothing is written."""
    with sentences(how.debug):
        from tinyrl.runs.settle import settle

        launch = launched()
        if launch.rank > 0:
            return
        forget_launcher()
        config = settle(_config_of(method, settings))
    quiet_libraries()
    from tinyrl.config.recipe import dump_config
    from tinyrl.runs.signals import StopFlag
    from tinyrl.training.launch import Options, dry_run, plan
    from tinyrl.training.replicas import divided

    with StopFlag(), sentences(how.debug):
        options = Options(device=how.device, trust_remote_code=how.trust_remote_code)
        print(dump_config(config))
        show_plan(plan(config, options=options))
        if launch.world_size > 1:
            print(divided(config, launch.world_size))
        print(dry_run(config, options=options))


def plan_run(words: list[str], *, output_dir: str, timed: bool, how: How) -> None:
    """What a run will take, printed: memory and disk before any weight is loaded, then seconds a step."""
    with sentences(how.debug):
        from tinyrl.config.recipe import method_of
        from tinyrl.runs.settle import settle

        method, settings = method_of(words)
        config = settle(_config_of(method, settings))
    quiet_libraries()
    from tinyrl.runs.signals import StopFlag
    from tinyrl.training.launch import Options, plan, time_steps

    with StopFlag(), sentences(how.debug):
        options = Options(device=how.device, trust_remote_code=how.trust_remote_code)
        planned = plan(config, options=options, output_dir=output_dir)
        show_plan(planned)
        if timed and not planned.offline:
            print(time_steps(config, options=options))


def show_plan(planned: Planned) -> None:
    """Print a plan. Raises OutOfRoom where the run does not fit."""
    print(planned.text, flush=True)
    if planned.problem is not None:
        raise OutOfRoom(planned.problem)


def resume_run(run: str, words: list[str], *, besides: list[str], allow_config_change: bool, how: How) -> None:
    """Go on with a run; of the `words` beside it only overrides make sense, and of options none of `besides`."""
    overrides = [word for word in words if "=" in word]
    with contextlib.ExitStack() as until_the_end:
        with sentences(how.debug):
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
        from tinyrl.components import Options
        from tinyrl.runs.signals import StopFlag
        from tinyrl.training.resume import resume

        until_the_end.enter_context(StopFlag())
        until_the_end.enter_context(ending_together())
        with sentences(how.debug):
            options = Options(device=how.device, trust_remote_code=how.trust_remote_code)
            launch = resume(opened, options=options, config=config, allow_config_change=allow_config_change)
        if launch is None:
            if opened.writes:
                print(f"{opened.path} is finished; there is nothing left to do. Look at {opened.path}/report.html")
            return
        raise typer.Exit(launch.go())


def _config_of(method: str | None, settings: list[str]) -> Config:
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


def quiet_libraries() -> None:
    """Before torch is imported: keep libraries' progress bars and advice from drowning what a run says, and their
    threads from spinning. Raises MemoryError where there is no room for them, which their C++ would end or hang on.

    Threads of OpenMP that wait for each other spin, by default for milliseconds. Where another process has their core,
    they then take turns with it at every barrier, and a step takes ten times as long. A person's own setting is kept.

    torch's large tensors begin at a page (THP_MEM_ALLOC_ENABLE), where glibc can give what one leaves to the next of
    its size. Elsewhere scraps of less than 100 bytes stay between them: a third of a pass's peak was gaps. On a GPU
    segments grow, for micro-batches of every size would leave gaps of their own.
    """
    limit = address_space()
    if limit is not None and limit < LIBRARIES_GB * 1e9:
        raise MemoryError(f"the libraries alone take {LIBRARIES_GB:g} GB of address space")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if not ALLOCATOR & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
