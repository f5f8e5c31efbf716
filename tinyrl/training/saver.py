"""Checkpoints of a run: what is written after a step, and restored on a resume."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from safetensors.torch import load_file, save_file

from tinyrl.config.schema import Config
from tinyrl.models.device import device_name, python_rng, rng_tensors
from tinyrl.models.reading import reading
from tinyrl.process.signals import stop_held
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.run_dir import RunDir
from tinyrl.training.kernel_trial import KernelTrial
from tinyrl.training.method import Method
from tinyrl.training.model_card import model_card
from tinyrl.training.run_state import STATE, CheckpointState, InputHashes, RunState
from tinyrl.training.step import Updater, load_optimizers, optimizer_tensors

OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"
OF_A_RUN = (checkpoints.MANIFEST, STATE, OPTIMIZER, RANDOM)  # files of a checkpoint that no other run reads


class Saver:
    """Write and read the checkpoints of a run. State: `saved`, whether the last save succeeded; saved_step: of the
    newest checkpoint, -1 before there is one.

    sources: returns the hashes of what the run reads; note: called with lines for the log.
    """

    def __init__(
        self,
        method: Method,
        folder: RunDir,
        *,
        config: Config,
        updater: Updater,
        kernel_trial: KernelTrial,
        sources: Callable[[], InputHashes],
        note: Callable[[str], None],
    ) -> None:
        self.method = method
        self.policy = method.policy
        self.world = method.world
        self.folder = folder
        self.config = config
        self.updater = updater
        self.kernel_trial = kernel_trial
        self.sources = sources
        self.note = note
        self.saved = True
        self.saved_step = -1
        self._resumed_step = -1
        self._unread = dict[str, str]()  # inputs that have no hash, as a note has said

    def save(self, state: RunState) -> None:
        """Write a checkpoint of `state`, on rank 0; when the disk refuses, warn and go on: older ones are intact.

        Raises FolderLost where the folder of the run is another one now.
        """
        if not self.world.is_main:
            return
        self.folder.lock.check()
        root = self.folder.checkpoints
        step = state.step
        best = state.best
        of_best = root / checkpoints.checkpoint_name(best.step if best else step)
        try:
            with stop_held():
                self._write_checkpoint(root, state, best=of_best)
            self.saved = True
            self.saved_step = step
            own = [root / checkpoints.checkpoint_name(at) for at in (step, self._resumed_step)]
            checkpoints.prune(root, keep=self.config.run.keep_checkpoints, protected=[*own, of_best])
        except OSError as error:
            self.folder.lock.check()
            self.note(f"warning: could not save step {step}: {error}. Older checkpoints are intact.")
            self.saved = False

    def _write_checkpoint(self, root: Path, state: RunState, *, best: Path) -> None:
        """Write a checkpoint; on a full disk an older one than the newest, but not the best, gives way once."""
        write = partial(self._write_files, state)
        try:
            checkpoints.write_checkpoint(root, state.step, write=write)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            freed = checkpoints.free_oldest(root, best=best) if is_full else None
            if freed is None:
                raise
            self.note(f"warning: the disk is full, so {freed.name} was deleted to save step {state.step}")
            checkpoints.write_checkpoint(root, state.step, write=write)

    def _write_files(self, state: RunState, folder: Path) -> None:
        """Write the files of a checkpoint of a run in `state`."""
        self.method.save(folder)
        save_file(optimizer_tensors(self.updater.optimizers), folder / OPTIMIZER)
        save_file(rng_tensors(), folder / RANDOM)
        records = self.folder.lengths()
        self.folder.flush()  # all that was counted
        written = CheckpointState(
            run=state,
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
        written.write(folder)
        self.folder.lock.check()

    def _hashed_sources(self) -> InputHashes:
        """Return the hashes of what the run reads; note once which files have none."""
        sources = self.sources()
        for name, why in sources.unread.items():
            if name not in self._unread:
                self.note(f"warning: {name}: {why}, so a resume cannot tell whether it is the same file")
        self._unread = sources.unread
        return sources

    def restore(self, folder: Path, kept: CheckpointState) -> list[str]:
        """Load models, optimizers and what was found for this device from a verified checkpoint, whose state.json is
        `kept`; returns lines on optimizer state that is dropped, and where another engine sampled.
        """
        self.method.load(folder)
        before = kept.config
        notes = list[str]()
        if before["optim"]["optimizer"] == self.config.optim.optimizer:  # another one has no such moments
            dropped = load_optimizers(self.updater.optimizers, load_file(folder / OPTIMIZER))
            if dropped:
                what = f"warning: the optimizer state of {len(dropped)} parameters that are not trained now is dropped"
                notes.append(f"{what} (the first: {dropped[0]})")
        if before["run"]["micro_batch_tokens"] == self.config.run.micro_batch_tokens:
            self._restore_budget(kept)
        self._restore_max_rows(kept)
        notes += self.kernel_trial.restore(kept.kernels, place=kept.kernels_place)
        engine = self.method.engine_name
        if kept.engine not in (None, engine):
            notes.append(f"warning: sampled by engine {kept.engine} before, by {engine} now: numbers round differently")
        self.saved_step = kept.run.step
        self._resumed_step = kept.run.step
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


# ---- before step 1 ----


def check_saves(method: Method) -> None:
    """Raise ValueError where the configuration, the generation configuration or the tokenizer of a model, or the card
    of its export, cannot be written.
    """
    config = method.config
    what = f"what a checkpoint or an export of model.path={config.model.path} has besides weights cannot be written"
    with tempfile.TemporaryDirectory(prefix="tinyrl-save-") as folder, reading(what):
        method.save_without_weights(Path(folder))
        if config.trains.policy:
            model_card(config, {}, name="run", step=0, dtype=None, notes=[], picture=False)
