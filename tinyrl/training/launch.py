"""Opening of runs, their hand-over to a trainer, and the exit code at the end. training/resume.py opens one again."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tinyrl.components import Options, settle_threads
from tinyrl.config.schema import Config
from tinyrl.distributed import World
from tinyrl.errors import Interrupted, OutOfRoom, Stop, out_of_memory
from tinyrl.evaluation.held_out import Trainer, trainer_of
from tinyrl.models.device import as_out_of_memory, peak_memory_gb
from tinyrl.models.known_shapes import SHAPES, stand_in
from tinyrl.models.memory import checkpoint_bytes
from tinyrl.parts import Parts
from tinyrl.report import write_report
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.progress import Display, tell
from tinyrl.runs.reward_output import RewardOutput
from tinyrl.runs.run_dir import RunDir, create_run, environment
from tinyrl.runs.settle import settle
from tinyrl.runs.summary import summary
from tinyrl.runs.tracking import check_trackers
from tinyrl.training.memory_plan import MemoryPlan
from tinyrl.training.planning import (
    Outline,
    Planned,
    beside_measured,
    plan_run,
    seconds_in_words,
    tried_outline,
    tried_plan,
)
from tinyrl.training.replicas import check_alike
from tinyrl.training.session import Session
from tinyrl.training.sources import Sources, read_sources

AFTERWARDS = (  # what a broken matplotlib of a person's, a damaged file or no memory ends in
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass
class Launch:
    """A run ready to go: everything a user can fix has been checked."""

    run: RunDir
    trainer: Trainer
    parts: Parts
    session: Session
    plan: MemoryPlan | None = None

    def say(self, notes: list[str]) -> None:
        """Show what was found and chosen while the run was opened."""
        for note in notes:
            self.session.display.note(note)

    def go(self) -> int:
        """Train to the last step and release the run's lock; the exit code says how it ended."""
        with self.run.lock:
            return self._train()

    def _train(self) -> int:
        world = self.parts.world
        self.session.display.start(done=self.session.state.step)
        try:
            with out_of_memory_stops("while training"):
                self.trainer.train(self.session, self.parts)
        except Interrupted as reason:
            saved = self.session.interrupted(reason)
            if not world.is_main:
                return reason.exit_code
            if saved is None:
                return self._unsaved(f"stopped; step {self.session.state.step} is not saved")
            tell(f"stopped; nothing is lost. Go on with:\n  tinyrl train --resume {self.run.path}")
            return reason.exit_code
        except Stop as stop:
            world.announce(str(stop))
            self.session.display.note(str(stop))
            if isinstance(stop, OutOfRoom):
                self.session.display.note(self.parts.describe_memory())
            return stop.exit_code
        finally:
            self.session.display.close()
            self.session.trackers.close()
            self.parts.close()
        if not world.is_main:
            return 0
        with harmless(f"the report could not be written; later: tinyrl report {self.run.path}"):
            write_report(self.run.path)
        with harmless("the run could not be summed up"):
            tell(summary(self.run, prompts=self.parts.has_prompts()))
        with harmless("memory could not be compared with what was planned"):
            if self.plan is not None:
                tell(beside_measured(self.plan, peak_memory_gb(self.parts.accelerator.device)))
        return 0 if self.session.saved else self._unsaved("done, but the last step is not saved")

    def _unsaved(self, what: str) -> int:
        """Say what is lost where the last checkpoint could not be written; the exit code that says so."""
        if self.session.has_checkpoint:
            tell(f"{what}. When there is room again, go on from the checkpoint before:\n  "
                  f"tinyrl train --resume {self.run.path}")  # fmt: skip
        else:
            tell(f"{what}, nor is any other: the weights are lost. {self.run.checkpoints} could not be written to")
        return OutOfRoom.exit_code


def start(
    config: Config,
    *,
    options: Options,
    output_dir: str,
    name: str | None,
    overwrite: bool,
    command: list[str],
) -> Launch:
    """Load everything, check it, and make the run's folder. Raises ValueError before anything is written."""
    check_trackers(config.run.trackers)
    config = settle(config)
    trainer = trainer_of(config)
    with undone_on_failure() as undo:
        outline = tried_outline(config, options=options)
        with out_of_memory_stops("before the first step"):
            parts = trainer.load(config, options=options)
            undo.callback(parts.close)
            check_alike(parts)
            notes = [settle_threads(parts), *parts.check()]
            config = parts.config = with_threads(config, parts)
        if parts.world.is_main:
            copies = 2 if config.run.save_every else 1  # the newest one stays until the next is whole
            checkpoints.check_room(Path(output_dir), needed=checkpoint_bytes(parts.roles), copies=copies)
        run = _folder(parts.world, output_dir, name=name, config=config, overwrite=overwrite)
        undo.callback(run.lock.release)
        run.write_config(config)
        _write_environment(run, parts, command)
        reading = partial(read_sources, config, rows=parts.row_fingerprints, known={})
        sources = later(reading) if run.writes else Sources
        launch = open_session(run, trainer, parts, sources=sources, outline=outline)
        launch.say([f"run {run.path}", *notes])
        return launch


def with_threads(config: Config, parts: Parts) -> Config:
    """The configuration with the number of threads that run.threads=auto came to on a CPU: numbers depend on it."""
    if parts.accelerator.device.type != "cpu":
        return config
    run = config.run.model_copy(update={"threads": torch.get_num_threads()})
    return config.model_copy(update={"run": run})


def _folder(world: World, output_dir: str, *, name: str | None, config: Config, overwrite: bool) -> RunDir:
    """The run's folder, made and held by rank 0; the other processes write nothing into it."""
    made: list[RunDir] = []

    def make() -> str:
        made.append(create_run(output_dir, name=name, config=config, overwrite=overwrite))
        return str(made[0].path)

    path = world.on_main(make)
    return made[0] if made else RunDir(Path(path), writes=False)


@contextlib.contextmanager
def undone_on_failure() -> Iterator[contextlib.ExitStack]:
    """A stack of what is to be undone where the block raises, and kept where it does not."""
    with contextlib.ExitStack() as undo:
        yield undo
        undo.pop_all()


@contextlib.contextmanager
def harmless(what: str) -> Iterator[None]:
    """Around what comes after the last step: where it fails that is said, and the exit code is that of the run."""
    try:
        yield
    except AFTERWARDS as error:
        warn(f"warning: {what} ({type(error).__name__}: {error})")


@contextlib.contextmanager
def out_of_memory_stops(when: str) -> Iterator[None]:
    """End with exit code 4 and a sentence where memory runs out and nothing further inside could handle it."""
    try:
        with as_out_of_memory():
            yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(when, error) from error


def open_session(
    run: RunDir, trainer: Trainer, parts: Any, *, sources: Callable[[], Sources], outline: Outline | None = None
) -> Launch:
    """A launch whose session stands at the beginning of the run."""
    parts.keep_output(RewardOutput(run.path, warn=run.warn).append if run.writes else lambda text: None)
    session = Session(
        parts,
        run,
        evaluate=lambda: trainer.evaluate(parts),
        display=Display(num_steps=parts.config.run.num_steps, silent=not parts.world.is_main),
        sources=sources,
    )
    return Launch(run, trainer, parts, session, tried_plan(parts, outline))


def later(work: Callable[[], Sources]) -> Callable[[], Sources]:
    """Begin some work beside the training, and return where its result is to be had: large weights take seconds."""
    pool = ThreadPoolExecutor(1)
    result = pool.submit(work)
    pool.shutdown(wait=False)
    return result.result


def _write_environment(run: RunDir, parts: Parts, command: list[str]) -> None:
    device = parts.accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    run.write_environment(
        environment(
            command,
            device=name if parts.world.size == 1 else f"{parts.world.size} processes, each {name}",
            threads=torch.get_num_threads(),
            seed=parts.config.run.seed,
            dtype=str(parts.roles.causal.dtype).removeprefix("torch."),
        )
    )


def plan(config: Config, *, options: Options, output_dir: str = "runs") -> Planned:
    """Memory and disk of a run, before any weight is loaded; offline by the shapes that are known of its model."""
    load = trainer_of(config).load
    try:
        return plan_run(config, options=options, load=load, output_dir=output_dir)
    except ValueError:
        if os.environ.get("HF_HUB_OFFLINE") != "1" or config.model.path not in SHAPES:
            raise
    with tempfile.TemporaryDirectory() as folder:
        planned = plan_run(stand_in(config, Path(folder)), options=options, load=load, output_dir=output_dir)
    known = f"offline: by the shapes of {config.model.path}, with prompts and answers as long as they may be"
    return replace(planned, text=f"{known}\n{planned.text}", offline=True)


def time_steps(config: Config, *, options: Options) -> str:
    """How long a step takes, by a short calibration."""
    with out_of_memory_stops("while a step was timed"):
        parts = trainer_of(config).load(config, options=options)
        try:
            return f"{settle_threads(parts)}\n{seconds_in_words(parts)}"
        finally:
            parts.close()


def dry_run(config: Config, *, options: Options) -> str:
    """Everything up to the first step, without a run folder: what `--dry-run` shows besides the configuration."""
    with out_of_memory_stops("before the first step"):
        parts = trainer_of(config).load(config, options=options)
        try:
            settle_threads(parts)
            return f"{seconds_in_words(parts)}\n{parts.preview()}"
        finally:
            parts.close()


def warn(text: str) -> None:
    print(text, file=sys.stderr)
