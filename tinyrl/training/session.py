"""A run as it goes on: open or restore it, and after each step log, evaluate, save, and stop when asked to.

The trainer owns the order of a step; the session owns where the run stands: the step, the phase inside it, the
minibatch inside an update, counters, controllers and the best evaluation. All of that goes into state.json of a
checkpoint, so a run that is stopped anywhere goes on as if it had not been. Random numbers are keyed by (seed,
step, ...), so there is no stream to restore for sampling.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tinyrl.components import Base
from tinyrl.data.rows import keyed_order
from tinyrl.errors import Interrupted
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.device import peak_memory_gb
from tinyrl.models.memory import checkpoint_bytes
from tinyrl.rollout import Rollout
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.progress import Display
from tinyrl.runs.rng_state import python_rng, restore_rng, rng_tensors
from tinyrl.runs.run_dir import RunDir
from tinyrl.runs.signals import stop_held
from tinyrl.runs.tracking import Trackers
from tinyrl.training.metrics import StepMetrics
from tinyrl.training.optim import rate_factor, role_optimizers
from tinyrl.training.update import Updater

Phase = Literal["evaluation", "rollout", "update"]
STATE, OPTIMIZER, ROLLOUT, RANDOM = "state.json", "optimizer.safetensors", "rollout.safetensors", "random.safetensors"


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of a verified checkpoint: where the run stood."""
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


class Session:
    """One run between its first step and its last. `controllers` holds what a trainer must carry from step to step
    (JSON values).
    """

    def __init__(
        self,
        base: Base,
        run: RunDir,
        *,
        evaluate: Callable[[], Evaluation],
        display: Display,
        fingerprint: str,
    ) -> None:
        self.base, self.config, self.run = base, base.config, run
        self.display, self.fingerprint = display, fingerprint
        self._evaluate = evaluate
        self.step = 0
        self.phase: Phase = "evaluation"  # of step 0: the held-out score before training
        self.controllers: dict[str, Any] = {}
        self.counters: dict[str, float] = {"completions": 0, "tokens": 0}
        self.best: dict[str, Any] | None = None
        self.rollout: Rollout | None = None
        self.epoch, self.minibatch = 0, 0
        self.metrics = StepMetrics()
        self.trackers = Trackers(self.config.run.trackers, run.path, config=self.config.written(), note=display.note)
        self.last_checkpoint: Path | None = None
        self.resumed_from: Path | None = None
        optim = self.config.optim
        self.optimizers = role_optimizers(optim, base.roles.parameters)
        self.updater = Updater(
            base.accelerator,
            base.roles,
            self.optimizers,
            base.micro_batches,
            max_grad_norm=optim.max_grad_norm,
            gradient_checkpointing=self.config.model.gradient_checkpointing,
            keep_batch=self._keep_batch,
        )

    def steps(self) -> Iterator[int]:
        """The steps still to do (0-based); the learning rate of each is set before it is handed out."""
        if self.phase == "evaluation":
            self._finish_step()
        while self.step < self.config.run.num_steps:
            optim = self.config.optim
            factor = rate_factor(
                optim.schedule, self.step, num_steps=self.config.run.num_steps, warmup_steps=optim.warmup_steps
            )
            for role in self.optimizers.values():
                role.set_rate(factor)
            yield self.step

    def start_update(self, rollout: Rollout | None = None, **metrics: float) -> None:
        """Sampling is over: from here on a stop keeps `rollout`, and a resume goes on with its minibatches."""
        self.rollout, self.phase = rollout, "update"
        self.epoch = self.minibatch = 0
        self.metrics.start_update(metrics)

    def minibatches(self, num_rows: int, *, num_epochs: int, size: int | None) -> Iterator[list[int]]:
        """Rows of each optimizer step: every epoch all rows once, shuffled by (seed, step, epoch). Goes on where a
        resumed run stopped.
        """
        size = size or num_rows
        while self.epoch < num_epochs:
            order = (
                list(range(num_rows))
                if size >= num_rows
                else keyed_order(f"minibatch {self.config.run.seed} {self.step} {self.epoch}", num_rows)
            )
            parts = [order[i : i + size] for i in range(0, num_rows, size)]
            while self.minibatch < len(parts):
                yield parts[self.minibatch]
                self.minibatch += 1
            self.epoch, self.minibatch = self.epoch + 1, 0

    def end_step(self, **metrics: float) -> None:
        """The step is done: evaluate and save when due, write its line."""
        optim = {"optim/learning_rate": self._rate(), "optim/skipped_steps": self.updater.skipped}
        self.metrics.end_update(metrics | optim)
        self.step += 1
        self.phase, self.rollout = "evaluation", None
        self._finish_step()

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a block to `time/<phase>` of this step."""
        self.display.phase(phase)
        with self.metrics.timed(phase):
            yield

    def _finish_step(self) -> None:
        settings = self.config.run
        last = self.step >= settings.num_steps
        due = settings.eval_every and self.step % settings.eval_every == 0
        if due or self.step == 0 or last:
            with self.timed("evaluation"):
                evaluation = self._evaluate()
            self.metrics.values |= evaluation.flat()
            self.run.append_samples([{"step": self.step, **line} for line in evaluation.samples])
            self._note_best(evaluation)
        line = self.metrics.line(**{"memory/peak_gb": peak_memory_gb(self.base.accelerator.device)})
        self.run.append_metrics(self.step, line)
        self.display.step(self.step, line)
        self.trackers.log(line, self.step)
        self.metrics, self.phase = StepMetrics(), "rollout"
        if last or (settings.save_every and self.step % settings.save_every == 0):
            self.save()

    def _rate(self) -> float:
        return self.optimizers["policy"].optimizer.param_groups[0]["lr"] if "policy" in self.optimizers else 0.0

    def _note_best(self, evaluation: Evaluation) -> None:
        value = evaluation.flat().get(self.config.run.best_metric)
        if (
            isinstance(value, int | float)
            and math.isfinite(value)
            and (self.best is None or value > self.best["value"])
        ):
            self.best = {"step": self.step, "value": value}

    def save(self) -> Path | None:
        """Write a checkpoint; when the disk refuses, say so and go on: the older ones are intact."""
        try:
            checkpoints.check_room(self.run.checkpoints, needed=checkpoint_bytes(self.base.roles))
            with stop_held():
                self.last_checkpoint = checkpoints.write_checkpoint(self.run.checkpoints, self.step, write=self._write)
            protected = [p for p in (self.last_checkpoint, self.resumed_from) if p is not None]
            if self.best is not None:
                protected.append(self.run.checkpoints / checkpoints.checkpoint_name(self.best["step"]))
            checkpoints.prune(self.run.checkpoints, keep=self.config.run.keep_checkpoints, protected=protected)
        except OSError as error:
            self.display.note(
                f"warning: could not save step {self.step}: {error}. Older checkpoints are intact; training goes on."
            )
            return None
        return self.last_checkpoint

    def _write(self, folder: Path) -> None:
        self.base.save_models(folder)
        tensors = {
            f"{role}|{k}": v.contiguous() for role, o in self.optimizers.items() for k, v in o.state_tensors().items()
        }
        save_file(tensors, folder / OPTIMIZER)
        save_file(rng_tensors(), folder / RANDOM)
        if self.rollout is not None:
            save_file(self.rollout.to_tensors(), folder / ROLLOUT)
        (folder / STATE).write_text(json.dumps(self._state(), indent=1))

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "phase": self.phase,
            "epoch": self.epoch,
            "minibatch": self.minibatch,
            "sums": self.metrics.sums,
            "pending": self.metrics.values,
            "controllers": self.controllers,
            "counters": self.counters,
            "best": self.best,
            "skipped": self.updater.skipped,
            "skipped_in_a_row": self.updater.skipped_in_a_row,
            "micro_batch_tokens": self.base.micro_batches.tokens,
            "threads": torch.get_num_threads(),
            "data": self.fingerprint,
            "config": self.config.written(),
            "records": self.run.lengths(),
            "python_random": python_rng(),
        }

    def restore(self, folder: Path) -> None:
        """Go on from a verified checkpoint. Raises ValueError when the data is not the data it was trained on."""
        state = read_state(folder)
        if state["data"] != self.fingerprint:
            raise ValueError(
                f"the training data has changed since {folder.name} was written (its fingerprint "
                "differs), so this run cannot go on exactly"
            )
        self.base.load_models(folder)
        tensors = load_file(folder / OPTIMIZER)
        for role, optimizer in self.optimizers.items():
            optimizer.load_state_tensors(
                {k.removeprefix(f"{role}|"): v for k, v in tensors.items() if k.startswith(f"{role}|")}
            )
        for name in ("step", "phase", "epoch", "minibatch", "controllers", "counters", "best"):
            setattr(self, name, state[name])
        self.metrics.sums, self.metrics.values = state["sums"], state["pending"]
        for name in ("skipped", "skipped_in_a_row"):
            setattr(self.updater, name, state[name])
        if state["config"]["run"]["micro_batch_tokens"] == self.config.run.micro_batch_tokens:
            self.base.micro_batches.tokens = state["micro_batch_tokens"]  # what `auto` came to
        if (folder / ROLLOUT).exists():
            self.rollout = Rollout.from_tensors(load_file(folder / ROLLOUT))
        wanted = self.config.run.threads
        torch.set_num_threads(state["threads"] if wanted == "auto" else wanted)
        restore_rng(load_file(folder / RANDOM), state["python_random"])
        self.run.cut(state["records"])
        self.last_checkpoint = self.resumed_from = folder

    def interrupted(self, reason: Interrupted) -> Path | None:
        """Keep everything done so far. Work inside an optimizer step or a rollout is repeated by the resume,
        nothing else is.
        """
        self.display.note(f"{reason}: saving step {self.step} ({self.phase})")
        return self.save()

    def _keep_batch(self, rows: list[int], why: str) -> None:
        """Write the samples of a step that gave non-finite numbers, for inspection."""
        folder = self.run.path / "nonfinite"
        name = f"step-{self.step:06d}"
        where = f"the batch is in {folder}"
        try:
            folder.mkdir(exist_ok=True)
            facts = {"why": why, "rows": rows}
            (folder / f"{name}-{self.updater.skipped}.json").write_text(json.dumps(facts), encoding="utf-8")
            if self.rollout is not None:
                save_file(self.rollout.to_tensors(), folder / f"{name}.safetensors")
        except (OSError, SafetensorError) as error:
            where = f"the batch could not be written to {folder}: {error}"
        self.display.note(f"warning: step {self.step}: {why}; no weight was changed, {where}")
