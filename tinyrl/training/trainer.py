"""Trainers: what a method says of itself, for the launch, the plan of memory and time, and several processes.

A method is a class below (tinyrl/trainers) and a line in config/methods.py, which needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor

from tinyrl.data.rows import batch_indices
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.batches import SequenceBatch
from tinyrl.models.micro_batches import RowSizes, StepRows
from tinyrl.models.roles import Role, Roles
from tinyrl.rollout.components import Parts
from tinyrl.training.session import Session
from tinyrl.training.update import LossFn, Pass


class Trainer(Parts):
    """A method: what it loads, its loop, its numbers on held-out rows, what a checkpoint holds of it."""

    row_fingerprints: dict[str, str]  # of both splits
    learns = True
    has_prompts = True  # whether another method finds prompts in the rows of task.data

    def train(self, session: Session) -> None:
        raise NotImplementedError

    def evaluate(self) -> Evaluation:
        """Its numbers on the first run.eval_prompts held-out rows."""
        raise NotImplementedError

    # ---- what memory and time are planned by ----

    scores_answers: ClassVar[bool] = False  # one number for each answer, read from its last token; no logits

    @property
    def num_epochs(self) -> int:
        """Passes over the rows of a step."""
        return 1

    @property
    def readings(self) -> int:
        """Passes without gradient in a step."""
        return 0

    @property
    def passes(self) -> list[Role]:
        """The roles that act in an optimizer step, in order."""
        return ["policy"]

    def step_rows(self) -> StepRows:
        """What a step learns from where rows are longest."""
        raise NotImplementedError

    def planned_loss(self, roles: Roles, role: Role, batch: SequenceBatch) -> Tensor:
        """A number whose backward pass takes the memory of the role's loss; `roles` may have no weights."""
        return roles.logprobs("policy", batch, temperature=1.0, states=roles.policy_states(batch))[0].sum()


class RowTrainer(Trainer):
    """A method that learns from rows of task.data, as it reads them. notes: what they were taken for."""

    train_rows: list[Any]
    held_out: list[Any]
    notes: list[str]

    @property
    def batch_size(self) -> int:
        """Rows of a step: at most all there are."""
        size: int = self.config.own.batch_size
        return min(size, len(self.train_rows))

    def batches(self, session: Session) -> Iterator[list[int]]:
        """The places of the training rows of each step to do: a function of (seed, step)."""
        self.roles.use_lora_dropout()
        seed, size, count = self.config.run.seed, self.batch_size, len(self.train_rows)
        for step in session.steps():
            yield batch_indices(seed, step, num_prompts=size, num_rows=count)

    def learn(self, session: Session, loss: LossFn, sizes: RowSizes, **metrics: float) -> None:
        """The optimizer step of a batch whose rows are `sizes`, which ends the step."""
        session.start_update()
        with session.timed("update"):
            one_pass = Pass("policy", loss, range(len(sizes)), sizes)
            session.metrics.add(session.updater.step([one_pass], train=["policy"]))
        session.end_step(**metrics)
