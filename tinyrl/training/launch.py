"""Opening of runs, their hand-over to a trainer, and the exit code at the end. training/resume.py opens one again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tinyrl.config.schema import Config
from tinyrl.errors import Interrupted, OutOfRoom, Stop, out_of_memory
from tinyrl.models.device import as_out_of_memory
from tinyrl.models.parallel import World, check_alike
from tinyrl.models.roles import checkpoint_bytes
from tinyrl.rollout.components import Options, resolve_threads, trainer_of
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.progress import Display, tell
from tinyrl.runs.resolve import resolve
from tinyrl.runs.run_dir import RunDir, create_run, environment
from tinyrl.runs.summary import summary
from tinyrl.runs.tracking import check_trackers
from tinyrl.training.session import Session
from tinyrl.training.state import Sources, read_sources
from tinyrl.training.trainer import Trainer

# What the report or summary after the last step may raise (broken matplotlib, damaged file, no memory).
AFTERWARDS = (ArithmeticError, AttributeError, ImportError, LookupError, MemoryError, OSError, RuntimeError, TypeError,
              ValueError)  # fmt: skip


@dataclass
class Launch:
    """A run ready to go: everything a user can fix has been checked."""

    run: RunDir
    trainer: Trainer
    session: Session

    def say(self, notes: list[str]) -> None:
        for note in notes:
            self.session.display.note(note)

    def go(self, *, report: Callable[[Path], object], until: int | None = None) -> int:
        """Train to the last step, or to step `until`; write a `report` of the folder and release its lock. Returns the
        exit code of the run.
        """
        if until is not None:
            self.session.until = min(until, self.session.until)
        with self.run.lock:
            return self._train(report)

    def _train(self, report: Callable[[Path], object]) -> int:
        world = self.trainer.world
        self.session.display.start(done=self.session.state.step)
        try:
            with out_of_memory_stops("while training"):
                self.trainer.train(self.session)
                self.session.save_here()
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
                self.session.display.note(self.trainer.describe_memory())
            return stop.exit_code
        finally:
            self.close()
        if not world.is_main:
            return 0
        with harmless(f"the report could not be written; later: tinyrl report {self.run.path}"):
            report(self.run.path)
        with harmless("the run could not be summed up"):
            tell(summary(self.run, prompts=self.trainer.has_prompts))
        if self.session.saved and not self.session.finished:
            tell(f"stopped after step {self.session.state.step}. Go on with:\n  tinyrl train --resume {self.run.path}")
        return 0 if self.session.saved else self._unsaved("done, but the last step is not saved")

    def close(self) -> None:
        self.session.display.close()
        self.session.trackers.close()
        self.session.close()
        self.trainer.close()

    def _unsaved(self, what: str) -> int:
        """Say what is lost where the last checkpoint could not be written; the exit code that says so."""
        if self.session.has_checkpoint:
            tell(f"{what}. When there is room again, go on from the checkpoint before:\n  "
                  f"tinyrl train --resume {self.run.path}")  # fmt: skip
        else:
            tell(f"{what}, nor is any other: the weights are lost. {self.run.checkpoints} could not be written to")
        return OutOfRoom.exit_code


def start(
    config: Config, *, options: Options, output_dir: str, name: str | None, overwrite: bool, command: list[str]
) -> Launch:
    """Load everything, check it, and make the run's folder. Raises ValueError before anything is written."""
    check_trackers(config.run.trackers)
    config = resolve(config)
    with undone_on_failure() as undo:
        trainer = load(config, options=options, undo=undo)
        config = trainer.config  # with the date of the run
        with out_of_memory_stops("before the first step"):
            notes = [resolve_threads(trainer), *trainer.check()]
            if trainer.accelerator.device.type == "cpu":  # numbers depend on what run.threads=auto came to
                run_section = config.run.model_copy(update={"threads": torch.get_num_threads()})
                config = trainer.config = config.model_copy(update={"run": run_section})
        if trainer.world.is_main:
            copies = 2 if config.run.save_every else 1  # the newest one stays until the next is whole
            checkpoints.check_room(Path(output_dir), needed=checkpoint_bytes(trainer.roles), copies=copies)
        run = _folder(trainer.world, output_dir, name=name, config=config, overwrite=overwrite)
        undo.callback(run.lock.release)
        run.write_config(config)
        write_environment(run, trainer, options=options, command=command)
        reading = partial(read_sources, config, rows=trainer.row_fingerprints, known={})
        sources = Sources
        if run.writes:  # beside the training: large weights take seconds
            pool = ThreadPoolExecutor(1)
            sources = pool.submit(reading).result
            pool.shutdown(wait=False)
        launch = open_session(run, trainer, sources=sources)
        launch.say([f"run {run.path}", *notes])
        return launch


def load(config: Config, *, options: Options, undo: contextlib.ExitStack, also: str = "") -> Trainer:
    """The trainer of a run, alike in all processes; `undo` closes it. also: what else the processes must agree on."""
    with out_of_memory_stops("before the first step"):
        trainer: Trainer = trainer_of(config.method)(config, options=options)
        undo.callback(trainer.close)
        if trainer.world.size > 1:
            _check_alike(trainer, also)
    return trainer


def _check_alike(trainer: Trainer, checkpoint: str) -> None:
    """Raise ValueError, on every process, where one has read other settings, rows or prompts than rank 0."""
    sections = {name: own for name, own in trainer.config.written().items() if isinstance(own, dict)}
    prompts = [p.tokens for kind in ("train_prompts", "eval_prompts") for p in getattr(trainer, kind, ())]
    inputs = {
        "method": trainer.config.method,
        **{f"{section}.{name}": value for section, own in sections.items() for name, value in own.items()},
        "rows": trainer.row_fingerprints,
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "checkpoint": checkpoint,
    }
    advice = "Start all with the same command, files and versions; no environment may open its episodes at random"
    check_alike(trainer.world, inputs, what="settings or inputs", advice=advice)


def trained_on(trainer: Trainer) -> str:
    """The device, and where there are several how many processes; as env.json has it."""
    device, processes = trainer.accelerator.device, trainer.world.size
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return name if processes == 1 else f"{processes} processes, each {name}"


def write_environment(run: RunDir, trainer: Trainer, *, options: Options, command: list[str]) -> None:
    """env.json of a run that `trainer` trains."""
    device = trainer.accelerator.device.type
    facts = environment(
        command,
        options={"device": device, "trust_remote_code": options.trust_remote_code},
        device=trained_on(trainer),
        threads=torch.get_num_threads(),
        seed=trainer.config.run.seed,
        dtype=str(trainer.roles.causal.dtype).removeprefix("torch."),
    )
    run.write_environment(facts)


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
        print(f"warning: {what} ({type(error).__name__}: {error})", file=sys.stderr)


@contextlib.contextmanager
def out_of_memory_stops(when: str) -> Iterator[None]:
    """End with exit code 4 and a sentence where memory runs out and nothing further inside could handle it."""
    try:
        with as_out_of_memory():
            yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(when, error) from error


def open_session(
    run: RunDir,
    trainer: Trainer,
    *,
    sources: Callable[[], Sources],
) -> Launch:
    """A launch whose session stands at the beginning of the run."""
    trainer.keep_output(run.append_reward_output if run.writes else lambda text: None)
    session = Session(
        trainer,
        run,
        evaluate=trainer.evaluate,
        display=Display(num_steps=trainer.config.run.num_steps, silent=not trainer.world.is_main),
        sources=sources,
    )
    return Launch(run, trainer, session)
