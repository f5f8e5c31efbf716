"""A run as it goes on: its steps, and after each one evaluation, metrics, a checkpoint when due.

The trainer owns the order of a step; the session owns where the run stands (training/state.py). A step is a
transaction: random numbers are keyed by (seed, step, ...), so a step that is begun again is the same step to the bit,
and nothing of one under way is in a checkpoint. A stop puts back what the step has changed, from a copy of the trained
weights and optimizer state that its update starts with; where those are large, it waits for the end of the update.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinyrl.data.rows import keyed_order
from tinyrl.errors import Interrupted
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.device import cores_here, peak_memory_gb
from tinyrl.rollout.components import Parts
from tinyrl.rollout.sample import Sample, num_episodes
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.diagnosis import Watch
from tinyrl.runs.metrics import BEST
from tinyrl.runs.progress import Display
from tinyrl.runs.records import read_steps
from tinyrl.runs.rng_state import python_rng, restore_rng, rng_tensors
from tinyrl.runs.run_dir import RunDir
from tinyrl.runs.signals import stop_held
from tinyrl.runs.tracking import Trackers
from tinyrl.training.optim import load_optimizers, optimizer_tensors, rate_factor, role_optimizers
from tinyrl.training.replicas import CHECK_EVERY, check_replicas
from tinyrl.training.state import Best, CheckpointState, RunState, Sources
from tinyrl.training.update import Updater

OPTIMIZER, RANDOM = "optimizer.safetensors", "random.safetensors"
SAMPLES_BYTES = 90e6  # of samples.jsonl; a long run leaves out steps
MOST_COPIED = 1 << 30  # bytes of weights and optimizer state that are copied at the start of an update


@dataclass
class StepStart:
    """What a stop inside a step restores: state, random numbers, bytes of the records, counts of skipped steps.

    tensors: trained weights and optimizer state by role, once the update has begun; None before.
    """

    state: RunState
    torch_rng: dict[str, Tensor]
    python_rng: list[Any]
    records: dict[str, int]
    skipped: tuple[int, int]
    loss_scale: dict[str, Any]
    tensors: tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]] | None = None


class StepMetrics:
    """Metrics of a step. `values` go into a checkpoint that is written before the evaluation after the step."""

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        self.values = {} if values is None else values
        self.sums: dict[str, list[float]] = {}  # metric -> [sum, count] over the optimizer steps
        self.seconds: dict[str, float] = {}

    def start_update(self, metrics: dict[str, float]) -> None:
        """What the rollout had to say, and no optimizer step yet."""
        self.values, self.sums = dict(metrics), {}

    def add(self, metrics: dict[str, float]) -> None:
        """Metrics of one optimizer step; the line shows their mean (non-finite ones are left out)."""
        for key, value in metrics.items():
            if math.isfinite(value):
                total = self.sums.setdefault(key, [0.0, 0])
                total[0] += value
                total[1] += 1

    def end_update(self, metrics: dict[str, float]) -> None:
        self.values |= {key: total / count for key, (total, count) in self.sums.items()} | metrics
        self.sums = {}

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def line(self, **measured: float) -> dict[str, Any]:
        """Everything, with `measured`, the total of the times (evaluations are not part of a step), tokens a second."""
        total = sum(seconds for phase, seconds in self.seconds.items() if phase != "evaluation")
        times = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        line = {**self.values, **times, "time/total": total, **measured}
        tokens = self.values.get("completion/tokens")
        return {**line, "tokens_per_second": tokens / total} if tokens and total else line


class Session:
    """One run between its first step and its last. `state` is where it stands, `minibatch` what an update works
    on, `update` its number among the step's optimizer steps.
    """

    def __init__(
        self,
        parts: Parts,
        run: RunDir,
        *,
        evaluate: Callable[[], Evaluation],
        display: Display,
        sources: Callable[[], Sources],
    ) -> None:
        self.parts, self.config, self.run = parts, parts.config, run
        self.world = parts.world
        self.display, self._sources = display, sources
        self._evaluate = evaluate
        self.state, self.until = RunState(), self.config.run.num_steps  # the step after which to stop
        self.minibatch: list[Sample] = []
        self.update = 0
        self.metrics = StepMetrics()
        self._start: StepStart | None = None  # of the step under way
        self._held = contextlib.ExitStack()  # while a stop has to wait
        self._update_seconds = math.nan  # of the last step
        self.watch = Watch(self.config.written())
        trackers = self.config.run.trackers if self.world.is_main else []
        self.trackers = Trackers(trackers, run.path, config=self.config.written(), note=display.note)
        self.last_checkpoint: Path | None = None
        self.resumed_from: Path | None = None
        self.saved = True  # whether the last save succeeded
        self.new_config = False  # config.yaml is still that of the run before, until a checkpoint is this one's
        self.optimizers = role_optimizers(self.config.optim, parts.roles.parameters)
        self.updater = Updater(
            parts.accelerator,
            parts.roles,
            self.optimizers,
            parts.micro_batches,
            max_grad_norm=self.config.optim.max_grad_norm,
            gradient_checkpointing=self.config.model.gradient_checkpointing,
            dump_bad_batch=self._dump_bad_batch,
            world=parts.world,
        )

    @property
    def finished(self) -> bool:
        return self.state.phase == "rollout" and self.state.step >= self.config.run.num_steps

    # ---- a step ----

    def steps(self) -> Iterator[int]:
        """The steps still to do (0-based); the learning rate of each is set before it is handed out."""
        check_replicas(self.world, self.updater.roles.parameters)
        self.trackers.start(self.state.step + (self.state.phase != "evaluation"))
        if self.state.phase == "evaluation":
            self._finish_step()
        while self.state.step < self.until:
            optim, num_steps = self.config.optim, self.config.run.num_steps
            factor = rate_factor(optim.schedule, self.state.step, num_steps=num_steps, warmup_steps=optim.warmup_steps)
            for role in self.optimizers.values():
                role.set_rate(factor)
            updater = self.updater
            self._start = StepStart(
                self.state.model_copy(deep=True),
                rng_tensors(),
                python_rng(),
                self.run.lengths(),
                (updater.skipped, updater.skipped_in_a_row),
                updater.scaler.state_dict(),
            )
            yield self.state.step

    def start_update(self, **metrics: float) -> None:
        """Sampling is over: from here on weights change. Copy them for a stop, or let it wait where they are large."""
        assert self._start is not None, "steps() hands out the steps"
        self.update = 0
        self.metrics.start_update(metrics)
        trained = sum(p.numel() * p.itemsize for of in self.optimizers.values() for p in of.parameters.values())
        if 3 * trained > MOST_COPIED:  # weights and two moments
            self._held.enter_context(stop_held(self._say_wait))
            return
        weights = {
            role: {name: p.detach().to("cpu", copy=True) for name, p in of.parameters.items()}
            for role, of in self.optimizers.items()
        }
        moments = {key: tensor.to("cpu", copy=True) for key, tensor in optimizer_tensors(self.optimizers).items()}
        self._start.tensors = weights, moments

    def _say_wait(self, signal: str) -> None:
        known = math.isfinite(self._update_seconds)
        took = f"; the last one took {self._update_seconds:.0f} s" if known else ""
        self.display.note(f"{signal}: the trained weights are large, so the stop waits for the end of the update{took}")

    def minibatches(self, samples: list[Sample], *, num_epochs: int, size: int | None) -> Iterator[list[Sample]]:
        """The samples of each optimizer step: all conversations of `size` episodes. Each epoch covers all of them,
        shuffled by (seed, step, epoch).
        """
        count = num_episodes(samples)
        size = size or count
        for epoch in range(num_epochs):
            key = f"minibatch {self.config.run.seed} {self.state.step} {epoch}"
            order = list(range(count)) if size >= count else keyed_order(key, count)
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
        self.metrics.end_update(metrics | optim)
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
        with self.metrics.timed(phase):
            yield

    def _finish_step(self) -> None:
        settings, step = self.config.run, self.state.step
        last = step >= settings.num_steps
        evaluation = None
        if self.evaluates_after(step):
            with self.timed("evaluation"):
                evaluation = self._evaluate()
            self.metrics.values |= evaluation.flat()
            every = settings.eval_every or settings.num_steps
            self.run.append_samples(
                [{"step": step, **line} for line in evaluation.samples],
                turn=0 if last else step // every,
                most_bytes=SAMPLES_BYTES / 2 / (settings.num_steps // every + 1),
            )
            self.trackers.log_completions(evaluation.samples, step)
            self._note_best(evaluation)
        line = self.metrics.line(**{"memory/peak_gb": peak_memory_gb(self.parts.accelerator.device)})
        self.run.append_metrics(step, line)
        self.display.step(step, line)
        if evaluation is not None:
            self.display.sample(evaluation.samples)
        for warning in self.watch.look(step, line):
            self.display.note(f"warning: {warning}")
        self.trackers.log(line, step)
        self.metrics, self.state.phase = StepMetrics(), "rollout"
        if step % CHECK_EVERY == 0:
            check_replicas(self.world, self.updater.roles.parameters)
        if last or (settings.save_every and step % settings.save_every == 0):
            self.save()

    def _note_best(self, evaluation: Evaluation) -> None:
        value, best = evaluation.flat().get(BEST), self.state.best
        if isinstance(value, int | float) and math.isfinite(value) and (best is None or value > best.value):
            self.state.best = Best(step=self.state.step, value=float(value))

    # ---- checkpoints ----

    def save(self) -> Path | None:
        """Write a checkpoint, on rank 0; when the disk refuses, say so and go on: older ones are intact."""
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
                self.run.write_config(self.config)
                self.new_config = False
            self._prune(keep=self.config.run.keep_checkpoints)
        except OSError as error:
            intact = "Older checkpoints are intact" if self.has_checkpoint else "There is no checkpoint yet"
            self.display.note(f"warning: could not save step {self.state.step}: {error}. {intact}.")
            self.saved = False
            return None
        self.saved = True
        return self.last_checkpoint

    def save_here(self) -> None:
        """A checkpoint of where the run stands, where it was to stop before its last step, and there is none."""
        last = self.last_checkpoint
        if not self.finished and (last is None or checkpoints.checkpoint_step(last) != self.state.step):
            self.save()

    def _write_checkpoint(self) -> None:
        with stop_held():
            self.last_checkpoint = checkpoints.write_checkpoint(
                self.run.checkpoints, self.state.step, write=self._write
            )

    def _prune(self, *, keep: int) -> bool:
        protected = [p for p in (self.last_checkpoint, self.resumed_from) if p is not None]
        if self.state.best is not None:
            protected.append(self.run.checkpoints / checkpoints.checkpoint_name(self.state.best.step))
        return checkpoints.prune(self.run.checkpoints, keep=keep, protected=protected)

    @property
    def has_checkpoint(self) -> bool:
        return bool(checkpoints.list_checkpoints(self.run.checkpoints))

    def _write(self, folder: Path) -> None:
        self.parts.save_models(folder)
        save_file(optimizer_tensors(self.optimizers), folder / OPTIMIZER)
        save_file(rng_tensors(), folder / RANDOM)
        updater = self.updater
        skips = {"skipped": updater.skipped, "skipped_in_a_row": updater.skipped_in_a_row}
        scale = {"loss_scale": updater.scaler.state_dict()}
        CheckpointState(
            run=self.state.model_copy(update={"values": self.metrics.values, **skips, **scale}),
            micro_batch_tokens=self.parts.micro_batches.tokens,
            threads=torch.get_num_threads(),
            sources=self._sources(),
            config=self.config.written(),
            records=self.run.lengths(),
            python_random=python_rng(),
        ).write(folder)

    def restore(self, folder: Path, kept: CheckpointState) -> list[str]:
        """Go on from a verified checkpoint, whose state.json is `kept`; a line for each record that is not whole."""
        self.parts.load_models(folder)
        if kept.setting("optim", "optimizer") in (None, self.config.optim.optimizer):
            load_optimizers(self.optimizers, load_file(folder / OPTIMIZER))
        else:
            self.display.note(f"optim.optimizer={self.config.optim.optimizer} begins without the moments of the other")
        self.state = kept.run
        self.metrics = StepMetrics(kept.run.values)
        self.updater.skipped, self.updater.skipped_in_a_row = kept.run.skipped, kept.run.skipped_in_a_row
        if kept.run.loss_scale:
            self.updater.scaler.load_state_dict(kept.run.loss_scale)
        if kept.setting("run", "micro_batch_tokens") == self.config.run.micro_batch_tokens:
            self.parts.micro_batches.tokens = kept.micro_batch_tokens  # what `auto` came to
        wanted, cores = self.config.run.threads, cores_here()
        threads = kept.threads if wanted == "auto" else wanted  # auto: on a GPU
        torch.set_num_threads(threads)
        if threads > cores and self.parts.accelerator.device.type == "cpu":
            self.display.note(
                f"warning: run.threads={threads} where each process has {cores} cores: slow, and as before"
            )
        restore_rng(load_file(folder / RANDOM), kept.python_random)
        notes = self.run.cut(kept.records, step=kept.run.step)
        there = self.world.is_main and self.run.metrics.is_file()
        self.watch.know(read_steps(self.run.metrics, []) if there else {})
        self.last_checkpoint = self.resumed_from = folder
        return notes

    def interrupted(self, reason: Interrupted) -> Path | None:
        """Tell other processes, put back what the step under way has changed, and save where the run then stands."""
        self.world.announce(str(reason))
        self._held.close()
        if self._start is not None:
            self._put_back(self._start)
        last = self.last_checkpoint
        there = last is not None and checkpoints.checkpoint_step(last) == self.state.step
        if there and self.saved and not self.new_config:
            return last
        self.display.note(f"{reason}: saving step {self.state.step}")
        return self.save()

    def _put_back(self, start: StepStart) -> None:
        """Restore the run as it was before the step."""
        if start.tensors is not None:
            weights, moments = start.tensors
            with torch.no_grad():
                for role, of in self.optimizers.items():
                    for name, parameter in of.parameters.items():
                        parameter.copy_(weights[role][name])
            load_optimizers(self.optimizers, moments)
        self.state, self.metrics, self._start = start.state, StepMetrics(), None
        self.updater.skipped, self.updater.skipped_in_a_row = start.skipped
        if start.loss_scale:
            self.updater.scaler.load_state_dict(start.loss_scale)
        restore_rng(start.torch_rng, start.python_rng)
        if self.world.is_main:
            self.run.cut(start.records, step=start.state.step)

    def close(self) -> None:
        """Release what a step under way holds."""
        self._held.close()

    def _dump_bad_batch(self, rows: list[int], why: str) -> None:
        if not self.world.is_main:
            return
        folder = self.run.path / "nonfinite"
        name = f"step-{self.state.step:06d}"
        where = f"the batch is in {folder}"
        try:
            folder.mkdir(exist_ok=True)
            samples = [sample.plain() for sample in self.minibatch]
            facts = {"why": why, "rows": rows, "samples": samples}
            (folder / f"{name}-{self.updater.skipped}.json").write_text(json.dumps(facts), encoding="utf-8")
        except OSError as error:
            where = f"the batch could not be written to {folder}: {error}"
        self.display.note(f"warning: step {self.state.step}: {why}; no weight was changed, {where}")
