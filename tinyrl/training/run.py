"""A run: its steps, and after each one evaluation, metrics, a checkpoint when due; how it stops, and goes on.

The trainer owns the order of a step; the run owns where the run stands (RunState), which state.json of a checkpoint
holds. A step is a transaction: random numbers are keyed by (seed, step, ...), so a step that is begun again is the same
step to the bit, and nothing of one under way is in a checkpoint. A stop puts back what the step has changed, from a
copy of the trained weights and optimizer state that its update starts with; where those are large, it waits for the end
of the update.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, NonNegativeInt, PositiveInt, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinyrl.config.schema import Config
from tinyrl.data.rows import seeded_permutation
from tinyrl.generation.sample import Sample, num_episodes
from tinyrl.models.device import as_out_of_memory, device_name, peak_memory_gb, python_rng, restore_rng, rng_tensors
from tinyrl.models.kernels import Kernels
from tinyrl.models.parallel import CHECK_EVERY, check_replicas
from tinyrl.process.errors import Interrupted, OutOfRoom, Stop, out_of_memory
from tinyrl.process.signals import stop_held
from tinyrl.rollout.records import room_for_samples
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.findings import Watch
from tinyrl.runs.folders import write_atomic
from tinyrl.runs.metrics import BEST
from tinyrl.runs.progress import Display, tell
from tinyrl.runs.run_dir import RunDir
from tinyrl.runs.show import summary
from tinyrl.runs.tracking import Trackers
from tinyrl.training.kernel_trial import KernelTrial
from tinyrl.training.method import Method, Pass
from tinyrl.training.policy_loss import Experience
from tinyrl.training.step import Updater, load_optimizers, optimizer_tensors, rate_factor, role_optimizers

STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"
OF_A_RUN = (checkpoints.MANIFEST, STATE, OPTIMIZER, RANDOM)  # files of a checkpoint that no other run reads
OnStep = Callable[[dict[str, Any]], object]  # gets a line of metrics.jsonl; "stop" ends the run
MOST_COPIED = 1 << 30  # bytes of weights and optimizer state that are copied at the start of an update


# ---- state.json ----


class SourceFile(BaseModel):
    """A file that a run has read; module: as user code has imported it."""

    bytes: int
    modified: int  # nanoseconds
    sha256: str
    module: str | None = None


class InputHashes(BaseModel):
    """Hashes of a run's inputs. rows: hashes of "training" and "held-out"; files: by "setting: file"; unread: why those
    have no hash that went after they were loaded; functions: fingerprints of those that a notebook or script defined,
    by "setting: use".
    """

    rows: dict[str, str] = {}
    files: dict[str, SourceFile] = {}
    unread: dict[str, str] = {}
    functions: dict[str, str] = {}
    versions: dict[str, str] = {}


class Best(BaseModel):
    step: int
    value: float


class Controllers(BaseModel):
    """State of the methods between steps."""

    kl_coef: float | None = None  # PPO's weight of the KL, which may adapt
    pass_rates: dict[str, list[float]] = {}  # of rows by fingerprint: completions right, wrong, in which step
    failing_batches: int = 0  # in a row, whose rewards failed
    flat_steps: int = 0  # without a gradient of the policy
    unrewarded_steps: int = 0  # without a sample that has a reward
    inexact_sampling: bool = False  # measured, though the engine's numbers should be those of training


class RunState(BaseModel):
    """The state of a run after `step` finished steps. phase: what comes next, the evaluation after that step (of step
    0: before training), whose other metrics are `values`, or the next step's rollout. seconds: by phase, and in all as
    "total", of a step whose evaluation is still to come; peak_gb: its peak memory.
    """

    step: int = 0
    phase: Literal["evaluation", "rollout"] = "evaluation"
    values: dict[str, int | float | None] = {}
    seconds: dict[str, float] = {}
    peak_gb: float = 0.0
    controllers: Controllers = Controllers()
    best: Best | None = None
    skipped: int = 0
    skipped_in_a_row: int = 0
    loss_scale: dict[str, Any] = {}


class CheckpointState(BaseModel):
    """state.json: the run's state, and what it was a function of or depends on for an exact resume."""

    run: RunState
    micro_batch_tokens: int
    micro_batch_device: str | None = None  # that the budget fits; None: not written by an earlier version
    max_rows: PositiveInt | None = None  # that are sampled at a time on that device
    engine: str | None = None  # that sampled; None: the method does not sample, or not written by an earlier version
    kernels: Kernels | None = None  # None: not chosen yet, or not written by an earlier version
    kernels_place: str | None = None  # device and torch of that choice
    sources: InputHashes
    config: dict[str, Any]
    given: dict[str, Any] | None = None  # None: by a run of an earlier version, which did not keep it
    records: dict[str, NonNegativeInt]  # bytes of metrics.jsonl and the like
    python_random: list[Any]
    judge_requests: dict[str, NonNegativeInt] = {}  # that the run has made, by the judge's name among the rewards

    @classmethod
    def read(cls, folder: Path) -> CheckpointState:
        """Read state.json of a checkpoint. Raises ValueError, naming the field, for one that is not of ours."""
        try:
            return cls.model_validate_json((folder / STATE).read_bytes())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "it"
            raise ValueError(f"{folder / STATE} is not what this tinyrl writes: {place}: {first['msg']}") from None

    def write(self, folder: Path) -> None:
        (folder / STATE).write_text(json.dumps(self.model_dump(), indent=1), encoding="utf-8")


# ---- a step ----


@dataclass
class StepStart:
    """A snapshot that a stop inside a step restores."""

    state: RunState
    random: tuple[dict[str, Tensor], list[Any]]  # of torch and of python
    records: dict[str, int]  # bytes of each
    tensors: tuple[list[Tensor], dict[str, Tensor]] | None = None  # weights and optimizer state, in an update


class StepMetrics:
    """Metrics of a step, which begins when they are made; seconds: those that it took before, as RunState has them."""

    def __init__(self, values: dict[str, Any] | None = None, *, seconds: dict[str, float] | None = None) -> None:
        before = dict(seconds or {})
        self.values = {} if values is None else values  # also in a checkpoint before the evaluation after the step
        self.sums: dict[str, list[float]] = {}  # metric -> [sum, count] over the optimizer steps
        self.began = time.perf_counter() - before.pop("total", 0.0)
        self.seconds = before  # by phase

    def add(self, metrics: dict[str, float]) -> None:
        """Add metrics of one optimizer step; the line has their mean (non-finite ones are left out)."""
        for key, value in metrics.items():
            if math.isfinite(value):
                total = self.sums.setdefault(key, [0.0, 0])
                total[0] += value
                total[1] += 1

    def line(self, **measured: float) -> dict[str, Any]:
        """Return all metrics, with `measured`, tokens per second, and times: of each phase, and in all without the
        evaluation. `time/other` is what belongs to no phase, such as the advantages.
        """
        phases = sum(seconds for phase, seconds in self.seconds.items() if phase != "evaluation")
        evaluation = self.seconds.get("evaluation", 0.0)
        total = time.perf_counter() - self.began - evaluation if phases else 0.0  # 0: an evaluation by itself
        times = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        times |= {"time/other": max(0.0, total - phases), "time/total": total}
        line = {**self.values, **times, **measured}
        tokens = self.values.get("completion/tokens")
        return {**line, "tokens_per_second": tokens / total} if tokens and total else line


class Run:
    """A run between its first step and its last. state: after the last finished step; minibatch: of the update under
    way; update: its number among the step's optimizer steps.

    config: the settings as the folder has them, which are the method's with the threads that `auto` came to; sources:
    returns the hashes of what the run reads, for its checkpoints; until: the step after which to stop; on_step: called
    with the metrics of each step, and of the evaluation before the first; where it returns "stop", the run ends there.
    """

    def __init__(
        self,
        method: Method,
        folder: RunDir,
        *,
        config: Config,
        sources: Callable[[], InputHashes] = InputHashes,
        state: RunState | None = None,
        until: int | None = None,
        on_step: OnStep | None = None,
        silent: bool = False,
    ) -> None:
        self.method = method
        self.sources = sources
        self.config = config
        self.folder = folder
        self.world = method.world
        self.policy = method.policy
        self.state = state or RunState()
        self.until = config.run.num_steps if until is None else min(until, config.run.num_steps)
        self.on_step = on_step
        self.minibatch: Experience | None = None
        self.update = 0
        self.metrics = StepMetrics()
        self._start: StepStart | None = None  # of the step under way
        self._held = contextlib.ExitStack()  # while a stop has to wait
        self._update_seconds = 0.0  # of the last step
        self.display = Display(num_steps=config.run.num_steps, silent=silent or not self.world.is_main)
        self.watch = Watch(folder.metrics, self.config.written())
        trackers = self.config.run.trackers if self.world.is_main else []
        self.trackers = Trackers(trackers, folder.path, config=self.config.written(), note=self.display.note)
        self._unread = dict[str, str]()  # inputs that have no hash, as a note has said
        self.saved = True  # whether the last save succeeded
        self._saved_step = self._resumed_step = -1
        self.optimizers = role_optimizers(self.config.optim, self.policy.parameters)
        self.updater = Updater(self.policy, self.optimizers, self.config.optim.max_grad_norm, self._dump_bad_batch)
        self.kernel_trial = KernelTrial(self.updater, setting=config.run.kernels)
        method.keep_output(folder.append_reward_output)

    # ---- from here to the end ----

    def go(self, *, report: Callable[[Path], object]) -> int:
        """Train to the last step, or to where `until` or `on_step` stops; write a `report` of the folder. Returns the
        run's exit code.
        """
        with self.folder.lock:
            code = self._train()
            if code is not None or not self.world.is_main:
                return code or 0
            try:
                report(self.folder.path)
                tell(summary(self.folder))
            except (ImportError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
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
            return self._train_or_save()
        except Stop as stop:
            self.world.announce(str(stop))
            self.display.note(str(stop))
            if isinstance(stop, OutOfRoom):
                self.display.note(self.method.describe_memory())
            return stop.exit_code
        finally:
            self.close()
            self.method.close()

    def _train_or_save(self) -> int | None:
        """Train to step `until`, or to an interrupt, which saves. Returns the exit code of an interrupt."""
        try:
            with out_of_memory_stops("while training"):
                self.method.train(self)
                if not self.finished and self._saved_step != self.state.step:
                    self.save()
                if self.finished:
                    self.method.check_end(self)
            return None
        except Interrupted as reason:
            self._interrupted(reason)
            self.display.close()
            if not self.world.is_main:
                return reason.exit_code
            if not self.saved:
                return self._unsaved(f"stopped; step {self.state.step} is not saved")
            tell(f"stopped; nothing is lost. Go on with:\n  tinyrl train --resume {self.folder.path}")
            return reason.exit_code

    def close(self) -> None:
        """End the display, the trackers, and the wait of a stop."""
        self.display.close()
        self.trackers.close()
        self._held.close()

    def _unsaved(self, what: str) -> int:
        """Tell that the last checkpoint could not be written; returns the exit code."""
        tell(f"{what}. When there is room again, go on from the checkpoint before, if there is one:\n  "
             f"tinyrl train --resume {self.folder.path}")  # fmt: skip
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
            self.metrics = StepMetrics(self.metrics.values, seconds=self.state.seconds)
            self._finish_step()
        while self.state.step < self.until:
            optim = self.config.optim
            num_steps = self.config.run.num_steps
            factor = rate_factor(optim.schedule, self.state.step, num_steps=num_steps, warmup_steps=optim.warmup_steps)
            for role in self.optimizers.values():
                role.set_rate(factor)
            self.metrics = StepMetrics()
            self._start = StepStart(self._state_now(), (rng_tensors(), python_rng()), self.folder.lengths())
            yield self.state.step

    def fit_to_device(self, passes: Sequence[Pass]) -> None:
        """Choose what is still open on a GPU by the passes of a step, before anything is computed that a later pass is
        compared with: the budget of micro-batches, then the kernels.
        """
        self.updater.measure(passes)
        for note in self.kernel_trial.decide(passes):
            self.display.note(note)

    def start_update(self, **metrics: float) -> None:
        """Begin to change weights: copy them for a stop, or let it wait where they are large."""
        assert self._start is not None
        self.update = 0
        self.metrics.values = dict(metrics)
        self.metrics.sums = {}
        if 3 * sum(p.numel() * p.itemsize for p in self._trained()) > MOST_COPIED:  # weights and two moments
            self._held.enter_context(stop_held(self._note_wait))
            return
        with self.timed("update"):
            weights = [p.detach().to("cpu", copy=True) for p in self._trained()]
            moments = {key: tensor.to("cpu", copy=True) for key, tensor in optimizer_tensors(self.optimizers).items()}
        self._start.tensors = weights, moments

    def _trained(self) -> Iterator[Tensor]:
        return (p for role in self.optimizers.values() for p in role.parameters.values())

    def _note_wait(self, signal: str) -> None:
        waits = "the trained weights are large, so the stop waits for the end of the update"
        self.display.note(f"{signal}: {waits}; the last one took {self._update_seconds:.0f} s")

    def partition(self, samples: list[Sample], *, size: int | None) -> list[list[int]]:
        """Split samples into the minibatches of a step, places of samples each: all conversations of `size` episodes
        (None: of all), in an order shuffled by (seed, step).
        """
        count = num_episodes(samples)
        size = size or count
        order = list(range(count)) if size >= count else self._shuffled(count, epoch=0)
        minibatches = []
        for start in range(0, count, size):
            chosen = set(order[start : start + size])
            minibatches.append([row for row, sample in enumerate(samples) if sample.episode in chosen])
        return minibatches

    def minibatches(
        self, experience: Experience, partition: list[list[int]], *, num_epochs: int
    ) -> Iterator[Experience]:
        """Yield the minibatch of each optimizer step: those of the partition, in each epoch in another order.

        A minibatch is the same in all epochs, and so are its micro-batches: other ones would compute, in bfloat16,
        other log-probabilities of the same tokens, which the ratio would take for a change of the policy.
        """
        for epoch in range(num_epochs):
            order = self._shuffled(len(partition), epoch=epoch) if epoch else range(len(partition))
            for place in order:
                self.minibatch = experience.rows(partition[place])
                yield self.minibatch
                self.update += 1
        self.minibatch = None

    def _shuffled(self, count: int, *, epoch: int) -> list[int]:
        return seeded_permutation(f"minibatch {self.config.run.seed} {self.state.step} {epoch}", count)

    def end_step(self, **metrics: float) -> None:
        policy = self.optimizers.get("policy")
        rate = policy.optimizer.param_groups[0]["lr"] if policy is not None else 0.0
        optim = {"optim/learning_rate": rate, "optim/skipped_steps": self.updater.skipped}
        means = {key: total / count for key, (total, count) in self.metrics.sums.items()}
        self.metrics.values |= means | metrics | optim
        self.state.step += 1
        self.state.phase = "evaluation"
        self.state.seconds = {**self.metrics.seconds, "total": time.perf_counter() - self.metrics.began}
        self.state.peak_gb = peak_memory_gb(self.policy.device)
        self._start = None
        self._update_seconds = self.metrics.seconds.get("update", 0.0)
        self._held.close()
        self._finish_step()

    def evaluates_after(self, step: int) -> bool:
        run = self.config.run
        due = bool(run.eval_every) and step % run.eval_every == 0
        return run.eval_prompts > 0 and (due or step == 0 or step >= run.num_steps)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        self.display.phase(phase)
        start = time.perf_counter()
        seconds = self.metrics.seconds
        try:
            yield
        finally:
            seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start

    def _finish_step(self) -> None:
        """Evaluate where that is due, write the step's line, and save where that is due."""
        settings = self.config.run
        step = self.state.step
        last = step >= settings.num_steps
        evaluation = None
        if self.evaluates_after(step):
            with self.timed("evaluation"):
                evaluation = self.method.evaluate()
            found = evaluation.flat()
            if dropped := evaluation.dropped_warning():
                self.display.note(f"warning: held-out evaluation: {dropped}")
            self.metrics.values |= found
            self.folder.append(
                self.folder.samples,
                [{"step": step, **line} for line in evaluation.samples],
                most_bytes=room_for_samples(step, settings.num_steps),
            )
            value = found.get(BEST)
            best = self.state.best
            if isinstance(value, int | float) and math.isfinite(value) and (best is None or value > best.value):
                self.state.best = Best(step=step, value=float(value))
        peak = max(self.state.peak_gb, peak_memory_gb(self.policy.device))
        line = self.metrics.line(**{"memory/peak_gb": peak})
        self.folder.append_metrics(step, line)
        self.display.step(step, line)
        if evaluation is not None:
            self.display.sample(evaluation.samples)
        for warning in self.watch.look(step) if self.world.is_main else ():
            self.display.note(f"warning: {warning}")
        self.trackers.log(line, step)
        if evaluation is not None and self.config.run.log_completions:
            self.trackers.log_completions(evaluation.samples, step)
        self.metrics = StepMetrics()
        self.state.phase = "rollout"
        self.state.seconds = {}
        self.state.peak_gb = 0.0
        if step % CHECK_EVERY == 0:
            check_replicas(self.world, self.policy.parameters)
        if last or (settings.save_every and step % settings.save_every == 0):
            self.save()
        if self.on_step is not None and self.on_step({"step": step, **line}) == "stop":
            self.until = step

    # ---- checkpoints ----

    def save(self) -> None:
        """Write a checkpoint, on rank 0; when the disk refuses, warn and go on: older ones are intact.

        Raises FolderLost where the folder of the run is another one now.
        """
        if not self.world.is_main:
            return
        self.folder.lock.check()
        root = self.folder.checkpoints
        step = self.state.step
        best = self.state.best
        of_best = root / checkpoints.checkpoint_name(best.step if best else step)
        try:
            with stop_held():
                self._write_checkpoint(root, step, best=of_best)
            self.saved = True
            self._saved_step = step
            own = [root / checkpoints.checkpoint_name(at) for at in (step, self._resumed_step)]
            checkpoints.prune(root, keep=self.config.run.keep_checkpoints, protected=[*own, of_best])
        except OSError as error:
            self.folder.lock.check()
            self.display.note(f"warning: could not save step {step}: {error}. Older checkpoints are intact.")
            self.saved = False

    def _write_checkpoint(self, root: Path, step: int, *, best: Path) -> None:
        """Write a checkpoint; on a full disk an older one than the newest, but not the best, gives way once."""
        try:
            checkpoints.write_checkpoint(root, step, write=self._write_files)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            freed = checkpoints.free_oldest(root, best=best) if is_full else None
            if freed is None:
                raise
            self.display.note(f"warning: the disk is full, so {freed.name} was deleted to save step {step}")
            checkpoints.write_checkpoint(root, step, write=self._write_files)

    def _write_files(self, folder: Path) -> None:
        """Write the files of a checkpoint of the run as it is."""
        self.method.save(folder)
        save_file(optimizer_tensors(self.optimizers), folder / OPTIMIZER)
        save_file(rng_tensors(), folder / RANDOM)
        records = self.folder.lengths()
        self.folder.flush()  # all that was counted
        state = CheckpointState(
            run=self._state_now(),
            micro_batch_tokens=self.policy.micro_batches.tokens,
            micro_batch_device=None if self.policy.micro_batches.unmeasured else device_name(self.policy.device),
            max_rows=self.method.max_rows,
            engine=self.method.engine_name,
            kernels=self.kernel_trial.chosen,
            kernels_place=self.kernel_trial.place,
            sources=self._hashed_sources(),
            config=self.config.written(),
            given=self.config.written_given(),
            records=records,
            python_random=python_rng(),
            judge_requests=self.method.judge_requests(),
        )
        state.write(folder)
        self.folder.lock.check()

    def _hashed_sources(self) -> InputHashes:
        """Return the hashes of what the run reads; note once which files have none."""
        sources = self.sources()
        for name, why in sources.unread.items():
            if name not in self._unread:
                self.display.note(f"warning: {name}: {why}, so a resume cannot tell whether it is the same file")
        self._unread = sources.unread
        return sources

    def _state_now(self) -> RunState:
        """Copy the state, with that of metrics and updater."""
        skips = {"skipped": self.updater.skipped, "skipped_in_a_row": self.updater.skipped_in_a_row}
        own = {"values": {**self.metrics.values}, "loss_scale": self.updater.scaler.state_dict(), **skips}
        return self.state.model_copy(deep=True, update=own)

    def _put_back(self, start: StepStart) -> list[str]:
        """Restore a state and random numbers, and cut the records; returns a line for each that is not whole."""
        state = start.state
        self.state = state
        self._start = None
        self.metrics = StepMetrics({**state.values})
        self.updater.restore(
            skipped=state.skipped, skipped_in_a_row=state.skipped_in_a_row, loss_scale=state.loss_scale
        )
        restore_rng(*start.random)
        return self.folder.cut(start.records)

    def restore(self, folder: Path, kept: CheckpointState) -> list[str]:
        """Go on from a verified checkpoint, whose state.json is `kept`; returns lines on damaged records, on optimizer
        state that is dropped, and where another engine sampled.
        """
        self.method.load(folder)
        before = kept.config
        notes = list[str]()
        if before["optim"]["optimizer"] == self.config.optim.optimizer:  # another one has no such moments
            dropped = load_optimizers(self.optimizers, load_file(folder / OPTIMIZER))
            if dropped:
                what = f"warning: the optimizer state of {len(dropped)} parameters that are not trained now is dropped"
                notes.append(f"{what} (the first: {dropped[0]})")
        if before["run"]["micro_batch_tokens"] == self.config.run.micro_batch_tokens:
            self._restore_budget(kept)
        self._restore_max_rows(kept)
        notes += self.kernel_trial.restore(kept.kernels, place=kept.kernels_place)
        notes += self._put_back(StepStart(kept.run, (load_file(folder / RANDOM), kept.python_random), kept.records))
        engine = self.method.engine_name
        if kept.engine not in (None, engine):
            notes.append(f"warning: sampled by engine {kept.engine} before, by {engine} now: numbers round differently")
        self.watch.look(kept.run.step)  # these have been reported
        self._saved_step = self._resumed_step = self.state.step
        return notes

    def _restore_budget(self, kept: CheckpointState) -> None:
        """Go on with a checkpoint's budget of micro-batches where it was found on a device as this one; else it is
        found anew.
        """
        budget = self.policy.micro_batches
        here = device_name(self.policy.device)
        # An earlier version did not write the device. On a CPU a budget is never above its start, as a GPU's may be.
        may_be_of_cpu = kept.micro_batch_device is None and kept.micro_batch_tokens <= budget.tokens
        if kept.micro_batch_device == here or (here == "cpu" and may_be_of_cpu):
            budget.restore(kept.micro_batch_tokens)

    def _restore_max_rows(self, kept: CheckpointState) -> None:
        """Go on with a checkpoint's limit of rows that are sampled at a time, where its device was such a one, unless
        another limit is set now.
        """
        if kept.max_rows is None or kept.micro_batch_device != device_name(self.policy.device):
            return
        if kept.config["generation"]["max_rows"] == self.config.generation.max_rows:
            self.method.restore_max_rows(kept.max_rows)

    def _interrupted(self, reason: Interrupted) -> None:
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
            self._put_back(start)
        if self._saved_step != self.state.step or not self.saved:
            self.display.note(f"{reason}: saving step {self.state.step}")
            self.save()
        else:
            self.display.note(f"{reason}: step {self.state.step} is saved")

    def _dump_bad_batch(self, why: str) -> None:
        if not self.world.is_main:
            return
        folder = self.folder.path / "nonfinite"
        step = self.state.step
        facts = {"why": why, "samples": [] if self.minibatch is None else self.minibatch.plain()}
        with contextlib.suppress(OSError):  # a full disk
            folder.mkdir(exist_ok=True)
            write_atomic(folder / f"step-{step:06d}-{self.updater.skipped}.json", json.dumps(facts))
        self.display.note(f"warning: step {step}: {why}; no weight was changed, the batch is in {folder}")


@contextlib.contextmanager
def out_of_memory_stops(when: str) -> Iterator[None]:
    """End with exit code 4 and a sentence where memory runs out and nothing further inside could handle it."""
    try:
        with as_out_of_memory():
            yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(when, error) from error
