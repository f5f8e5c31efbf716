"""A run: its steps, and after each one evaluation, metrics, a checkpoint when due; how it stops, and goes on.

The trainer owns the order of a step; the run owns where the run stands (RunState), which state.json of a checkpoint
holds. A step is a transaction: random numbers are keyed by (seed, step, ...), so a step that is begun again is the same
step to the bit, and nothing of one under way is in a checkpoint. A stop puts back what the step has changed, from a
copy of the trained weights and optimizer state that its update starts with; where those are large, it waits for the end
of the update.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from tinyrl.config.schema import Config
from tinyrl.data.rows import seeded_permutation
from tinyrl.generation.sample import Sample, num_episodes
from tinyrl.models.device import as_out_of_memory, peak_memory_gb
from tinyrl.models.parallel import CHECK_EVERY, check_replicas
from tinyrl.process.errors import Interrupted, OutOfRoom, Stop, out_of_memory
from tinyrl.process.signals import stop_held
from tinyrl.rollout.records import room_for_samples
from tinyrl.runs.best import WITHOUT_GAIN, Gains, score_of
from tinyrl.runs.findings import Watch
from tinyrl.runs.folders import write_atomic
from tinyrl.runs.progress import Display, tell
from tinyrl.runs.run_dir import RunDir
from tinyrl.runs.show import summary
from tinyrl.runs.tracking import Trackers
from tinyrl.training.kernel_trial import KernelTrial
from tinyrl.training.method import Method, Pass
from tinyrl.training.policy_loss import Experience
from tinyrl.training.run_state import CheckpointState, InputHashes, RunState
from tinyrl.training.saver import RANDOM, Saver
from tinyrl.training.step import Updater, rate_factor, role_optimizers
from tinyrl.training.step_metrics import StepMetrics
from tinyrl.training.step_start import RandomState, StepStart, TrainedCopy, trained

if TYPE_CHECKING:
    from tinyrl.evaluation.evaluate import Evaluation

OnStep = Callable[[dict[str, Any]], object]  # gets a line of metrics.jsonl; "stop" ends the run
MOST_COPIED = 1 << 30  # bytes of weights and optimizer state that are copied at the start of an update


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
        self.optimizers = role_optimizers(self.config.optim, self.policy.parameters)
        self.updater = Updater(self.policy, self.optimizers, self.config.optim.max_grad_norm, self._dump_bad_batch)
        self.kernel_trial = KernelTrial(self.updater, setting=config.run.kernels)
        self.saver = Saver(
            method,
            folder,
            config=config,
            updater=self.updater,
            kernel_trial=self.kernel_trial,
            sources=sources,
            note=self.display.note,
        )
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
            if not self.saver.saved:
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
                if not self.finished and self.saver.saved_step != self.state.step:
                    self.save()
                if self.finished:
                    self.method.check_end(self)
            return None
        except Interrupted as reason:
            self._interrupted(reason)
            self.display.close()
            if not self.world.is_main:
                return reason.exit_code
            if not self.saver.saved:
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
        return self.state.phase == "rollout" and self._is_last_step

    @property
    def _is_last_step(self) -> bool:
        """Return whether no step comes after this one: all are done, or run.patience is over."""
        patience = self.config.run.patience
        is_over = patience is not None and self.state.gains.without_gain >= patience
        return is_over or self.state.step >= self.config.run.num_steps

    # ---- a step ----

    def steps(self) -> Iterator[int]:
        """Yield the steps still to do (0-based), with the learning rate of each."""
        check_replicas(self.world, self.policy.parameters)
        self.trackers.start(self.state.step + (self.state.phase != "evaluation"))
        if self.state.phase == "evaluation":
            self.metrics = StepMetrics(self.metrics.values, seconds=self.state.seconds)
            self._finish_step()
        while self.state.step < self.until and not self._is_last_step:
            optim = self.config.optim
            num_steps = self.config.run.num_steps
            factor = rate_factor(optim.schedule, self.state.step, num_steps=num_steps, warmup_steps=optim.warmup_steps)
            for role in self.optimizers.values():
                role.set_rate(factor)
            self.metrics = StepMetrics()
            self._start = StepStart(self._state_now(), RandomState.now(), self.folder.lengths())
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
        weights_and_moments = 3 * sum(p.numel() * p.itemsize for p in trained(self.optimizers))
        if weights_and_moments > MOST_COPIED:
            self._held.enter_context(stop_held(self._note_wait))
            return
        with self.timed("update"):
            self._start.trained = TrainedCopy.of(self.optimizers)

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
        evaluation = self._evaluate() if self.evaluates_after(step) else None
        peak = max(self.state.peak_gb, peak_memory_gb(self.policy.device))
        line = self.metrics.line(**{"memory/peak_gb": peak})
        self._publish(line, evaluation)
        self.metrics = StepMetrics()
        self.state.phase = "rollout"
        self.state.seconds = {}
        self.state.peak_gb = 0.0
        if step % CHECK_EVERY == 0:
            check_replicas(self.world, self.policy.parameters)
        if self._is_last_step or (settings.save_every and step % settings.save_every == 0):
            self.save()
        if self.on_step is not None and self.on_step({"step": step, **line}) == "stop":
            self.until = step

    def _evaluate(self) -> Evaluation:
        """Measure on held-out rows, write their samples, and note whether the score has gained."""
        step = self.state.step
        with self.timed("evaluation"):
            evaluation = self.method.evaluate()
        found = evaluation.flat()
        if dropped := evaluation.dropped_warning():
            self.display.note(f"warning: held-out evaluation: {dropped}")
        self.metrics.values |= found
        self.folder.append(
            self.folder.samples,
            [{"step": step, **line} for line in evaluation.samples],
            most_bytes=room_for_samples(step, self.config.run.num_steps),
        )
        gains = self.state.gains.after(score_of(found, step=step))
        self.state.gains = gains
        patience = self.config.run.patience
        if patience is not None:
            self.metrics.values[WITHOUT_GAIN] = gains.without_gain
            if gains.without_gain == 0 and evaluation.prompts_for_a_gain is not None:
                self.display.note(
                    f"warning: with {evaluation.num_prompts} held-out prompts no evaluation can gain on this one, so "
                    f"run.patience={patience} ends the run: the 95 % interval reaches the highest reward. At least "
                    f"{evaluation.prompts_for_a_gain} are needed (run.eval_prompts, rows in task.eval_data)"
                )
        return evaluation

    def _publish(self, line: dict[str, Any], evaluation: Evaluation | None) -> None:
        """Append the step's line to metrics.jsonl, show it with what the findings warn of, and hand it to trackers."""
        step = self.state.step
        self.folder.append_metrics(step, line)
        self.display.step(step, line)
        if evaluation is not None:
            self.display.sample(evaluation.samples)
        for warning in self.watch.look(step) if self.world.is_main else ():
            self.display.note(f"warning: {warning}")
        self.trackers.log(line, step)
        if evaluation is not None and self.config.run.log_completions:
            self.trackers.log_completions(evaluation.samples, step)

    # ---- checkpoints, and a stop inside a step ----

    def save(self) -> None:
        """Write a checkpoint of the run as it is; when the disk refuses, a note says so and older ones are intact. It
        is the best one if its step's score is the best of those that have a checkpoint.
        """
        before = self.state.best
        last = self.state.gains.last
        if last is not None and last.step == self.state.step and last.is_better_than(before):
            self.state.best = last
        self.saver.save(self._state_now())
        if not self.saver.saved:
            self.state.best = before

    def restore(self, folder: Path, kept: CheckpointState) -> list[str]:
        """Go on from a verified checkpoint, whose state.json is `kept`; returns lines on what is not as it was."""
        notes = self.saver.restore(folder, kept)
        random = RandomState(load_file(folder / RANDOM), kept.python_random)
        notes += self._put_back(StepStart(kept.run, random, kept.records))
        self.watch.look(kept.run.step)  # these have been reported
        return notes

    def forget_scores(self) -> None:
        """Count gains anew, and look for another best checkpoint: the reward is another one now."""
        self.state.gains = Gains()
        self.state.best = None

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
        start.random.restore()
        return self.folder.cut(start.records)

    def _interrupted(self, reason: Interrupted) -> None:
        """Tell other processes, put back what the step under way has changed, and save where the run then stands."""
        self.world.announce(str(reason))
        self._held.close()
        if (start := self._start) is not None:
            if start.trained is not None:
                start.trained.put_back(self.optimizers)
            self._put_back(start)
        if self.saver.saved_step != self.state.step or not self.saver.saved:
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
