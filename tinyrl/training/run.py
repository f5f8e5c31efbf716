"""A run as it goes on: its steps, and after each one evaluation, metrics, a checkpoint when due; how it stops.

The trainer owns the order of a step; the run owns where the run stands (training/state.py). A step is a
transaction: random numbers are keyed by (seed, step, ...), so a step that is begun again is the same step to the bit,
and nothing of one under way is in a checkpoint. A stop puts back what the step has changed, from a copy of the trained
weights and optimizer state that its update starts with; where those are large, it waits for the end of the update.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinyrl.data.rows import seeded_permutation
from tinyrl.errors import Interrupted, OutOfRoom, Stop, out_of_memory
from tinyrl.models.device import as_out_of_memory, peak_memory_gb, python_rng, restore_rng, rng_tensors
from tinyrl.models.parallel import CHECK_EVERY, check_replicas
from tinyrl.rollout.records import SAMPLES_BYTES
from tinyrl.rollout.sample import Sample, num_episodes
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.findings import Watch
from tinyrl.runs.metrics import BEST
from tinyrl.runs.progress import Display, tell
from tinyrl.runs.records import read_steps
from tinyrl.runs.run_dir import RunDir
from tinyrl.runs.show import summary
from tinyrl.runs.signals import stop_held
from tinyrl.runs.tracking import Trackers
from tinyrl.training.method import Method
from tinyrl.training.state import Best, CheckpointState, InputHashes, RunState
from tinyrl.training.step import Updater, load_optimizers, optimizer_tensors, rate_factor, role_optimizers

OPTIMIZER, RANDOM = "optimizer.safetensors", "random.safetensors"
MOST_COPIED = 1 << 30  # bytes of weights and optimizer state that are copied at the start of an update
# Errors of the report or summary after the last step (broken matplotlib, damaged file, no memory).
AFTERWARDS = (ArithmeticError, AttributeError, ImportError, LookupError, MemoryError, OSError, RuntimeError, TypeError,
              ValueError)  # fmt: skip
RandomState = tuple[dict[str, Tensor], list[Any]]  # of torch and of python


@dataclass
class StepStart:
    """A snapshot that a stop inside a step restores."""

    state: RunState
    random: RandomState
    records: dict[str, int]  # bytes of each
    tensors: tuple[list[Tensor], dict[str, Tensor]] | None = None  # weights and optimizer state, in an update


class StepMetrics:
    """Metrics of a step."""

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        self.values = {} if values is None else values  # also in a checkpoint before the evaluation after the step
        self.sums: dict[str, list[float]] = {}  # metric -> [sum, count] over the optimizer steps
        self.seconds: dict[str, float] = {}  # by phase

    def add(self, metrics: dict[str, float]) -> None:
        """Add metrics of one optimizer step; the line has their mean (non-finite ones are left out)."""
        for key, value in metrics.items():
            if math.isfinite(value):
                total = self.sums.setdefault(key, [0.0, 0])
                total[0] += value
                total[1] += 1

    def line(self, **measured: float) -> dict[str, Any]:
        """Return all metrics, with `measured`, the total of the times without evaluations, and tokens a second."""
        total = sum(seconds for phase, seconds in self.seconds.items() if phase != "evaluation")
        times = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        line = {**self.values, **times, "time/total": total, **measured}
        tokens = self.values.get("completion/tokens")
        return {**line, "tokens_per_second": tokens / total} if tokens and total else line


class Run:
    """A run between its first step and its last. state: after the last finished step; minibatch: of the update under
    way; update: its number among the step's optimizer steps; until: the step after which to stop.
    """

    def __init__(
        self, method: Method, folder: RunDir, *, sources: Callable[[], InputHashes], silent: bool = False
    ) -> None:
        self.method, self.config, self.folder, self.world = method, method.config, folder, method.world
        self.policy = method.policy
        self._sources = sources
        self.state, self.until = RunState(), self.config.run.num_steps
        self.minibatch: list[Sample] = []
        self.update = 0
        self.metrics = StepMetrics()
        self._start: StepStart | None = None  # of the step under way
        self._held = contextlib.ExitStack()  # while a stop has to wait
        self._update_seconds = math.nan  # of the last step
        self.display = Display(num_steps=self.until, silent=silent or not self.world.is_main)
        self.watch = Watch(self.config.written())
        trackers = self.config.run.trackers if self.world.is_main else []
        self.trackers = Trackers(trackers, folder.path, config=self.config.written(), note=self.display.note)
        self.last_checkpoint: Path | None = None
        self.resumed_from: Path | None = None
        self.saved = True  # whether the last save succeeded
        self.new_config = False  # config.yaml is still that of the run before, until a checkpoint is this one's
        self.optimizers = role_optimizers(self.config.optim, self.policy.parameters)
        self.updater = Updater(self.policy, self.optimizers, max_grad_norm=self.config.optim.max_grad_norm)
        self.updater.gradient_checkpointing = self.config.model.gradient_checkpointing
        self.updater.dump_bad_batch = self._dump_bad_batch
        method.keep_output(folder.append_reward_output if folder.writes else lambda text: None)

    # ---- from here to the end ----

    def go(self, *, report: Callable[[Path], object], until: int | None = None) -> int:
        """Train to the last step, or to step `until`; write a `report` of the folder. Returns the run's exit code."""
        if until is not None:
            self.until = min(until, self.until)
        with self.folder.lock:
            code = self._train()
            if code is not None or not self.world.is_main:
                return code or 0
            for write in (
                lambda: report(self.folder.path),
                lambda: tell(summary(self.folder, prompts=self.method.has_prompts)),
            ):
                try:
                    write()
                except AFTERWARDS as error:
                    what = f"warning: no report or summary ({type(error).__name__}: {error})"
                    print(f"{what}; later: tinyrl report {self.folder.path}", file=sys.stderr)
            if not self.saved:
                return self._unsaved("done, but the last step is not saved")
            if not self.finished:
                tell(f"stopped after step {self.state.step}. Go on with:\n  tinyrl train --resume {self.folder.path}")
            return 0

    def _train(self) -> int | None:
        """Train to step `until`. Returns the exit code where the run has stopped before."""
        self.display.start(done=self.state.step)
        try:
            with out_of_memory_stops("while training"):
                self.method.train(self)
                if not self.finished and self._saved_step != self.state.step:
                    self.save()
            return None
        except Interrupted as reason:
            saved = self._interrupted(reason)
            self.display.close()
            if not self.world.is_main:
                return reason.exit_code
            if saved is None:
                return self._unsaved(f"stopped; step {self.state.step} is not saved")
            tell(f"stopped; nothing is lost. Go on with:\n  tinyrl train --resume {self.folder.path}")
            return reason.exit_code
        except Stop as stop:
            self.world.announce(str(stop))
            self.display.note(str(stop))
            if isinstance(stop, OutOfRoom):
                self.display.note(self.method.describe_memory())
            return stop.exit_code
        finally:
            self.close()
            self.method.close()

    def close(self) -> None:
        """End the display, the trackers, and the wait of a stop."""
        self.display.close()
        self.trackers.close()
        self._held.close()

    def _unsaved(self, what: str) -> int:
        """Tell what is lost where the last checkpoint could not be written; returns the exit code."""
        if checkpoints.list_checkpoints(self.folder.checkpoints):
            tell(f"{what}. When there is room again, go on from the checkpoint before:\n  "
                  f"tinyrl train --resume {self.folder.path}")  # fmt: skip
        else:
            tell(f"{what}, nor is any other: the weights are lost. {self.folder.checkpoints} could not be written to")
        return OutOfRoom.exit_code

    @property
    def finished(self) -> bool:
        return self.state.phase == "rollout" and self.state.step >= self.config.run.num_steps

    # ---- a step ----

    def steps(self) -> Iterator[int]:
        """Yield the steps still to do (0-based), with the learning rate of each."""
        check_replicas(self.world, self.policy.parameters)
        self.trackers.start(self.state.step + (self.state.phase != "evaluation"))
        if self.state.phase == "evaluation":
            self._finish_step()
        while self.state.step < self.until:
            optim, num_steps = self.config.optim, self.config.run.num_steps
            factor = rate_factor(optim.schedule, self.state.step, num_steps=num_steps, warmup_steps=optim.warmup_steps)
            for role in self.optimizers.values():
                role.set_rate(factor)
            self._start = StepStart(self._state_now(), (rng_tensors(), python_rng()), self.folder.lengths())
            yield self.state.step

    def start_update(self, **metrics: float) -> None:
        """Begin to change weights: copy them for a stop, or let it wait where they are large."""
        assert self._start is not None
        self.update = 0
        self.metrics.values, self.metrics.sums = dict(metrics), {}
        if 3 * sum(p.numel() * p.itemsize for p in self._trained()) > MOST_COPIED:  # weights and two moments
            self._held.enter_context(stop_held(self._note_wait))
            return
        weights = [p.detach().to("cpu", copy=True) for p in self._trained()]
        moments = {key: tensor.to("cpu", copy=True) for key, tensor in optimizer_tensors(self.optimizers).items()}
        self._start.tensors = weights, moments

    def _trained(self) -> Iterator[Tensor]:
        return (p for role in self.optimizers.values() for p in role.parameters.values())

    def _note_wait(self, signal: str) -> None:
        known = math.isfinite(self._update_seconds)
        took = f"; the last one took {self._update_seconds:.0f} s" if known else ""
        self.display.note(f"{signal}: the trained weights are large, so the stop waits for the end of the update{took}")

    def minibatches(self, samples: list[Sample], *, num_epochs: int, size: int | None) -> Iterator[list[Sample]]:
        """Yield the samples of each optimizer step: all conversations of `size` episodes, in epochs shuffled by (seed,
        step, epoch).
        """
        count = num_episodes(samples)
        size = size or count
        for epoch in range(num_epochs):
            key = f"minibatch {self.config.run.seed} {self.state.step} {epoch}"
            order = list(range(count)) if size >= count else seeded_permutation(key, count)
            for i in range(0, count, size):
                chosen = set(order[i : i + size])
                self.minibatch = [sample for sample in samples if sample.episode in chosen]
                yield self.minibatch
                self.update += 1
        self.minibatch = []

    def end_step(self, **metrics: float) -> None:
        policy = self.optimizers.get("policy")
        rate = policy.optimizer.param_groups[0]["lr"] if policy is not None else 0.0
        optim = {"optim/learning_rate": rate, "optim/skipped_steps": self.updater.skipped}
        means = {key: total / count for key, (total, count) in self.metrics.sums.items()}
        self.metrics.values |= means | metrics | optim
        self.state.step += 1
        self.state.phase, self._start = "evaluation", None
        self._update_seconds = self.metrics.seconds.get("update", math.nan)
        self._held.close()
        self._finish_step()

    def evaluates_after(self, step: int) -> bool:
        run = self.config.run
        due = bool(run.eval_every) and step % run.eval_every == 0
        return run.eval_prompts > 0 and (due or step == 0 or step >= run.num_steps)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        self.display.phase(phase)
        start, seconds = time.perf_counter(), self.metrics.seconds
        try:
            yield
        finally:
            seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start

    def _finish_step(self) -> None:
        """Evaluate where that is due, write the step's line, and save where that is due."""
        settings, step = self.config.run, self.state.step
        last = step >= settings.num_steps
        evaluation = None
        if self.evaluates_after(step):
            with self.timed("evaluation"):
                evaluation = self.method.evaluate()
            found = evaluation.flat()
            self.metrics.values |= found
            every = settings.eval_every or settings.num_steps
            self.folder.append_samples(
                [{"step": step, **line} for line in evaluation.samples],
                turn=0 if last else step // every,
                most_bytes=SAMPLES_BYTES / 2 / (settings.num_steps // every + 1),
            )
            self.trackers.log_completions(evaluation.samples, step)
            value, best = found.get(BEST), self.state.best
            if isinstance(value, int | float) and math.isfinite(value) and (best is None or value > best.value):
                self.state.best = Best(step=step, value=float(value))
        line = self.metrics.line(**{"memory/peak_gb": peak_memory_gb(self.policy.accelerator.device)})
        self.folder.append_metrics(step, line)
        self.display.step(step, line)
        if evaluation is not None:
            self.display.sample(evaluation.samples)
        for warning in self.watch.look(step, line):
            self.display.note(f"warning: {warning}")
        self.trackers.log(line, step)
        self.metrics, self.state.phase = StepMetrics(), "rollout"
        if step % CHECK_EVERY == 0:
            check_replicas(self.world, self.policy.parameters)
        if last or (settings.save_every and step % settings.save_every == 0):
            self.save()

    # ---- checkpoints ----

    def save(self) -> Path | None:
        """Write a checkpoint, on rank 0; when the disk refuses, warn and go on: older ones are intact."""
        if not self.world.is_main:
            return None
        try:
            try:
                self._write_checkpoint()
            except OSError as error:  # older ones than the newest give way, and only where that makes room
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._prune(keep=1):
                    raise
                self._write_checkpoint()
            if self.new_config:
                self.folder.write_config(self.config)
                self.new_config = False
            self._prune(keep=self.config.run.keep_checkpoints)
        except OSError as error:
            some = checkpoints.list_checkpoints(self.folder.checkpoints)
            intact = "Older checkpoints are intact" if some else "There is no checkpoint yet"
            self.display.note(f"warning: could not save step {self.state.step}: {error}. {intact}.")
            self.saved = False
            return None
        self.saved = True
        return self.last_checkpoint

    @property
    def _saved_step(self) -> int | None:
        return None if self.last_checkpoint is None else checkpoints.checkpoint_step(self.last_checkpoint)

    def _prune(self, *, keep: int) -> bool:
        protected = [p for p in (self.last_checkpoint, self.resumed_from) if p is not None]
        if self.state.best is not None:
            protected.append(self.folder.checkpoints / checkpoints.checkpoint_name(self.state.best.step))
        return checkpoints.prune(self.folder.checkpoints, keep=keep, protected=protected)

    def _write_checkpoint(self) -> None:
        def write(folder: Path) -> None:
            self.method.save(folder)
            save_file(optimizer_tensors(self.optimizers), folder / OPTIMIZER)
            save_file(rng_tensors(), folder / RANDOM)
            CheckpointState(
                run=self._state_now(),
                micro_batch_tokens=self.policy.micro_batches.tokens,
                threads=torch.get_num_threads(),
                sources=self._sources(),
                config=self.config.written(),
                records=self.folder.lengths(),
                python_random=python_rng(),
            ).write(folder)

        with stop_held():
            self.last_checkpoint = checkpoints.write_checkpoint(self.folder.checkpoints, self.state.step, write=write)

    def _state_now(self) -> RunState:
        """Copy the state, with that of metrics and updater."""
        skips = {"skipped": self.updater.skipped, "skipped_in_a_row": self.updater.skipped_in_a_row}
        own = {"values": {**self.metrics.values}, "loss_scale": self.updater.scaler.state_dict(), **skips}
        return self.state.model_copy(deep=True, update=own)

    def _stand_at(self, state: RunState, *, random: RandomState, records: dict[str, int]) -> list[str]:
        """Restore a state and random numbers, and cut the records; returns a line for each that is not whole."""
        self.state, self._start, self.metrics = state, None, StepMetrics({**state.values})
        self.updater.skipped, self.updater.skipped_in_a_row = state.skipped, state.skipped_in_a_row
        if state.loss_scale:
            self.updater.scaler.load_state_dict(state.loss_scale)
        restore_rng(*random)
        return self.folder.cut(records, step=state.step)

    def restore(self, folder: Path, kept: CheckpointState) -> list[str]:
        """Go on from a verified checkpoint, whose state.json is `kept`; returns a line for each damaged record."""
        self.method.load(folder)
        if kept.setting("optim", "optimizer") in (None, self.config.optim.optimizer):
            load_optimizers(self.optimizers, load_file(folder / OPTIMIZER))
        else:
            self.display.note(f"optim.optimizer={self.config.optim.optimizer} begins without the moments of the other")
        if kept.setting("run", "micro_batch_tokens") == self.config.run.micro_batch_tokens:
            self.policy.micro_batches.tokens = kept.micro_batch_tokens  # what `auto` came to
        if self.config.run.threads == "auto":  # on a GPU
            torch.set_num_threads(kept.threads)
        random = load_file(folder / RANDOM), kept.python_random
        notes = self._stand_at(kept.run, random=random, records=kept.records)
        there = self.world.is_main and self.folder.metrics.is_file()
        self.watch.know(read_steps(self.folder.metrics, []) if there else {})
        self.last_checkpoint = self.resumed_from = folder
        return notes

    def _interrupted(self, reason: Interrupted) -> Path | None:
        """Tell other processes, put back what the step under way has changed, and save where the run then stands."""
        self.world.announce(str(reason))
        self._held.close()
        if (start := self._start) is not None:
            if start.tensors is not None:
                weights, moments = start.tensors
                with torch.no_grad():
                    for parameter, weight in zip(self._trained(), weights, strict=True):
                        parameter.copy_(weight)
                load_optimizers(self.optimizers, moments)
            self._stand_at(start.state, random=start.random, records=start.records)
        if self._saved_step == self.state.step and self.saved and not self.new_config:
            return self.last_checkpoint
        self.display.note(f"{reason}: saving step {self.state.step}")
        return self.save()

    def _dump_bad_batch(self, why: str) -> None:
        if not self.world.is_main:
            return
        folder = self.folder.path / "nonfinite"
        where = f"the batch is in {folder}"
        try:
            folder.mkdir(exist_ok=True)
            facts = {"why": why, "samples": [sample.plain() for sample in self.minibatch]}
            file = folder / f"step-{self.state.step:06d}-{self.updater.skipped}.json"
            file.write_text(json.dumps(facts), encoding="utf-8")
        except OSError as error:
            where = f"the batch could not be written to {folder}: {error}"
        self.display.note(f"warning: step {self.state.step}: {why}; no weight was changed, {where}")


@contextlib.contextmanager
def out_of_memory_stops(when: str) -> Iterator[None]:
    """End with exit code 4 and a sentence where memory runs out and nothing further inside could handle it."""
    try:
        with as_out_of_memory():
            yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(when, error) from error
