"""Open or resume a run, hand it to its trainer, and say at the end what came of it."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tinyrl.components import Base, Options, Parts, settle_threads
from tinyrl.config.changes import check_drift
from tinyrl.config.config import Config
from tinyrl.errors import Interrupted, OutOfRoom, Stop, out_of_memory
from tinyrl.models.device import as_out_of_memory
from tinyrl.models.memory import checkpoint_bytes
from tinyrl.report import write_report
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.progress import Display
from tinyrl.runs.run_dir import RunDir, create_run, environment
from tinyrl.runs.signals import StopFlag
from tinyrl.runs.summary import summary
from tinyrl.runs.tracking import check_trackers
from tinyrl.text import visible
from tinyrl.training.checks import check_reference, describe_memory, try_reward
from tinyrl.training.session import Session, read_state

TRAINERS = {"grpo": "grpo", "ppo": "ppo", "sft": "sft", "reward": "reward_model"}


@dataclass
class Launch:
    """A run ready to go: everything a person can mend has been checked."""

    run: RunDir
    trainer: ModuleType
    parts: Base
    session: Session
    flag: StopFlag

    def say(self, notes: list[str]) -> None:
        """Show what was found and chosen while the run was opened."""
        for note in notes:
            self.session.display.note(note)

    def go(self) -> int:
        """Train to the last step; the exit code says how it ended."""
        self.session.display.start(done=self.session.step)
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
            if isinstance(stop, OutOfRoom) and isinstance(self.parts, Parts):
                self.session.display.note(describe_memory(self.parts))
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
    flag: StopFlag,
) -> Launch:
    """Load everything, check it, and make the run's folder. Raises ValueError before anything is written when
    something is wrong.
    """
    check_trackers(config.run.trackers)
    trainer = trainer_of(config)
    with out_of_memory_stops("before the first step"):
        parts = trainer.load(config, options=options, should_stop=flag.check)
        threads = settle_threads(parts)
        notes = [threads, *_check(parts)]
    checkpoints.check_room(Path(output_dir), needed=checkpoint_bytes(parts.roles))
    run = create_run(output_dir, name=name, config=config, overwrite=overwrite)
    run.write_config(config)
    _write_environment(run, parts, command)
    launch = _open(run, trainer, parts, flag=flag)
    launch.say([f"run {run.path}", *notes])
    return launch


def resume(
    run: RunDir,
    *,
    options: Options,
    flag: StopFlag,
    config: Config | None = None,
    allow_config_change: bool = False,
) -> Launch | None:
    """Go on from the newest checkpoint that verifies; from the beginning where there is none. None: the run is
    finished.

    `config` (default: what config.yaml of the run says) may differ from the checkpoint's only where
    `allow_config_change`; it is then the run's from here on. Raises ValueError otherwise.
    """
    config = config or run.read_config()
    folder, warnings = checkpoints.newest_sound(run.checkpoints)
    changes: list[str] = []
    if folder is not None:
        changes = check_drift(read_state(folder)["config"], config, since=folder.name, allowed=allow_config_change)
    trainer = trainer_of(config)
    with out_of_memory_stops("before the first step"):
        parts = trainer.load(config, options=options, should_stop=flag.check)
        notes = [f"warning: {w}; using {folder.name if folder else 'the start'} instead" for w in warnings[:1]]
        notes += _check(parts)
        if folder is None:
            notes.append(settle_threads(parts))
            run.cut({})
    launch = _open(run, trainer, parts, flag=flag)
    session = launch.session
    if folder is not None:
        session.restore(folder)
        notes += [f"changed since {folder.name}: {change}" for change in changes]
        if session.phase == "rollout" and session.step >= config.run.num_steps:
            parts.close()
            return None
        notes.append(
            f"resuming {run.path} at step {session.step} of {config.run.num_steps} ({session.phase}) from {folder.name}"
        )
    if allow_config_change:
        run.write_config(config)
    launch.say(notes)
    return launch


@contextlib.contextmanager
def out_of_memory_stops(when: str) -> Iterator[None]:
    """End with exit code 4 and a sentence where memory runs out and nobody nearer knew what to do about it."""
    try:
        with as_out_of_memory():
            yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(when, error) from error


def trainer_of(config: Config) -> ModuleType:
    return importlib.import_module(f"tinyrl.trainers.{TRAINERS[config.method]}")


def _open(run: RunDir, trainer: ModuleType, parts: Any, *, flag: StopFlag) -> Launch:
    session = Session(
        parts,
        run,
        evaluate=lambda: trainer.evaluate(parts),
        flag=flag,
        display=Display(num_steps=parts.config.run.num_steps),
        fingerprint=parts.data_fingerprint,
    )
    return Launch(run, trainer, parts, session, flag)


def _check(parts: Base) -> list[str]:
    """The reference at step 0 and the reward on a gold answer; returns lines worth showing, the engine's among them."""
    if not isinstance(parts, Parts):
        return []
    check_reference(parts)
    parts.scorer.start()
    warning = try_reward(parts).warning
    engine = f"sampling engine {parts.engine.name} ({parts.engine_reason})"
    warnings = [f"warning: {warning} (prompt {parts.train_prompts[0].text[:60]!r})"] if warning else []
    return [engine, describe_memory(parts), *warnings]


def _write_environment(run: RunDir, parts: Base, command: list[str]) -> None:
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
    """Everything up to the first step, without a run folder: one rendered prompt with its tokens, and the reward on
    three answers.
    """
    parts = trainer_of(config).load(config, options=options)
    try:
        if not isinstance(parts, Parts):
            return "configuration, model and rows are fine"
        check_reference(parts)
        parts.scorer.start()
        trial = try_reward(parts)
        prompt = trial.prompt
        tokens = " ".join(f"{visible(str(parts.tokenizer.decode([t])))!r}:{t}" for t in prompt.tokens[:64])
        lines = [
            f"prompt ({len(prompt.tokens)} tokens of at most "
            f"{parts.config.generation.max_prompt_tokens if parts.config.generation else 0}):",
            visible(prompt.text),
            f"tokens: {tokens}{' ...' if len(prompt.tokens) > 64 else ''}",
            f"reward ({' + '.join(parts.scorer.names)}):",
            f"  gold answer {visible(trial.gold_text)[:200]!r}: {trial.gold:.4g}"
            if trial.gold is not None and trial.gold_text is not None
            else "  gold answer: this task has none",
            f"  nothing: {trial.empty:.4g}",
            f"  nonsense: {trial.nonsense:.4g}",
            f"prompts: {len(parts.train_prompts)} to train on, {len(parts.eval_prompts)} held out",
        ]
        return "\n".join([*lines, *([f"warning: {trial.warning}"] if trial.warning else [])])
    finally:
        parts.close()


def warn(text: str) -> None:
    print(text, file=sys.stderr)
