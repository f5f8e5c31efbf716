"""Opening and resuming of runs, their hand-over to a trainer, and the exit code at the end."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from tinyrl.components import Options, Parts, settle_threads
from tinyrl.config.changes import check_changes
from tinyrl.config.methods import METHODS
from tinyrl.config.schema import Config
from tinyrl.errors import Interrupted, OutOfRoom, Stop, out_of_memory
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.device import as_out_of_memory
from tinyrl.models.memory import checkpoint_bytes
from tinyrl.report import write_report
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.progress import Display
from tinyrl.runs.reward_output import RewardOutput
from tinyrl.runs.run_dir import RunDir, create_run, environment
from tinyrl.runs.settle import absolute_paths, settle
from tinyrl.runs.summary import summary
from tinyrl.runs.tracking import check_trackers
from tinyrl.training.optim import stretched_schedule
from tinyrl.training.session import Session
from tinyrl.training.state import read_state


class Trainer(Protocol):
    """The protocol of the files in tinyrl/trainers: load what a method needs, train, and evaluate during training."""

    def load(self, config: Config, *, options: Options) -> Any:
        """The parts that `train` and `evaluate` take. Raises ValueError for what a user can fix."""
        ...

    def train(self, session: Session, parts: Any) -> None:
        """Go on from the session's current step to the last."""
        ...

    def evaluate(self, parts: Any) -> Evaluation:
        """Held-out numbers."""
        ...


@dataclass
class Launch:
    """A run ready to go: everything a user can fix has been checked."""

    run: RunDir
    trainer: Trainer
    parts: Parts
    session: Session

    def say(self, notes: list[str]) -> None:
        """Show what was found and chosen while the run was opened."""
        for note in notes:
            self.session.display.note(note)

    def go(self) -> int:
        """Train to the last step; the exit code says how it ended."""
        self.session.display.start(done=self.session.state.step)
        try:
            with out_of_memory_stops("while training"):
                self.trainer.train(self.session, self.parts)
        except Interrupted as reason:
            saved = self.session.interrupted(reason)
            print(
                f"stopped; nothing is lost. Go on with:\n  tinyrl train --resume {self.run.path}"
                if saved
                else "stopped; no checkpoint could be written"
            )
            return reason.exit_code
        except Stop as stop:
            self.session.display.note(str(stop))
            if isinstance(stop, OutOfRoom):
                self.session.display.note(self.parts.describe_memory())
            return stop.exit_code
        finally:
            self.session.display.close()
            self.session.trackers.close()
            self.parts.close()
        try:
            write_report(self.run.path)
        except OSError as error:
            warn(f"warning: the report could not be written ({error}); later: tinyrl report {self.run.path}")
        print(summary(self.run))
        return 0


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
    with out_of_memory_stops("before the first step"):
        parts = trainer.load(config, options=options)
        threads = settle_threads(parts)
        notes = [threads, *parts.check()]
    checkpoints.check_room(Path(output_dir), needed=checkpoint_bytes(parts.roles))
    run = create_run(output_dir, name=name, config=config, overwrite=overwrite)
    run.write_config(config)
    _write_environment(run, parts, command)
    launch = _open(run, trainer, parts)
    launch.say([f"run {run.path}", *notes])
    return launch


def resume(
    run: RunDir,
    *,
    options: Options,
    config: Config | None = None,
    allow_config_change: bool = False,
) -> Launch | None:
    """Go on from the newest checkpoint that verifies, or from the beginning. None: the run is finished.

    `config` (default: the run's config.yaml) may differ from the checkpoint's only with `allow_config_change`; it is
    then the run's from here on. Raises ValueError otherwise.
    """
    config = settle(config or run.read_config())
    folder, warnings = checkpoints.newest_sound(run.checkpoints)
    changes, before = [], None
    if folder is not None:
        was = absolute_paths(read_state(folder).config)
        changes = check_changes(was, config, since=folder.name, allowed=allow_config_change)
        before = was["run"]["num_steps"]
    trainer = trainer_of(config)
    with out_of_memory_stops("before the first step"):
        parts = trainer.load(config, options=options)
        notes = [f"warning: {w}; using {folder.name if folder else 'the start'} instead" for w in warnings[:1]]
        notes += parts.check()
        if folder is None:
            notes.append(settle_threads(parts))
            run.cut({})
    launch = _open(run, trainer, parts)
    session = launch.session
    if folder is not None:
        session.restore(folder)
        notes += [f"changed since {folder.name}: {change}" for change in changes]
        state, now = session.state, config.run.num_steps
        notes += filter(None, [stretched_schedule(config.optim, step=state.step, before=before or now, now=now)])
        if state.phase == "rollout" and state.step >= config.run.num_steps:
            parts.close()
            return None
        notes.append(
            f"resuming {run.path} at step {state.step} of {config.run.num_steps} ({state.phase}) from {folder.name}"
        )
    if allow_config_change:
        run.write_config(config)
    launch.say(notes)
    return launch


@contextlib.contextmanager
def out_of_memory_stops(when: str) -> Iterator[None]:
    """End with exit code 4 and a sentence where memory runs out and nothing further inside could handle it."""
    try:
        with as_out_of_memory():
            yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(when, error) from error


def trainer_of(config: Config) -> Trainer:
    """The trainer of a run's method; imported now, since others may need libraries that this one does not."""
    return cast(Trainer, importlib.import_module(f"tinyrl.trainers.{METHODS[config.method].trainer}"))


def _open(run: RunDir, trainer: Trainer, parts: Any) -> Launch:
    parts.keep_output(RewardOutput(run.path, warn=run.warn).append)
    session = Session(
        parts,
        run,
        evaluate=lambda: trainer.evaluate(parts),
        display=Display(num_steps=parts.config.run.num_steps),
        fingerprint=parts.data_fingerprint,
    )
    return Launch(run, trainer, parts, session)


def _write_environment(run: RunDir, parts: Parts, command: list[str]) -> None:
    device = parts.accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    run.write_environment(
        environment(
            command,
            device=name,
            threads=torch.get_num_threads(),
            seed=parts.config.run.seed,
            dtype=str(parts.roles.causal.dtype).removeprefix("torch."),
        )
    )


def dry_run(config: Config, *, options: Options) -> str:
    """Everything up to the first step, without a run folder: what `--dry-run` shows besides the configuration."""
    with out_of_memory_stops("before the first step"):
        parts = trainer_of(config).load(config, options=options)
        try:
            return parts.preview()
        finally:
            parts.close()


def warn(text: str) -> None:
    print(text, file=sys.stderr)
