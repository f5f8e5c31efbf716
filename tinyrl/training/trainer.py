"""Trainers: what a method says of itself, for the launch, the plan of memory and time, and several processes.

A method is a class below (tinyrl/trainers) and a line in config/methods.py, which needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tinyrl.config.schema import Config
from tinyrl.data.readers import Row
from tinyrl.data.rows import batch_indices, example_rows, few_held_out, fingerprints, prompt_key
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.loading import check_ids
from tinyrl.models.micro_batches import RowSizes
from tinyrl.rollout.components import Options, Parts
from tinyrl.tasks.prompts import marker_notes
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


class Batch(NamedTuple):
    """A step of a method that learns from rows: the loss of some of its `sizes`, and metrics of the step."""

    loss: LossFn
    sizes: RowSizes
    metrics: dict[str, float]


class RowTrainer(Trainer):
    """A method that learns from rows of task.data: it says what it makes of rows, and the loss of a batch of them.

    notes: what the rows were taken for, and which are left out.
    """

    train_rows: list[Any]
    held_out: list[Any]
    notes: list[str]

    def __init__(self, config: Config, *, options: Options) -> None:
        notes: list[str] = []
        rows, held_out = example_rows(config, notes)  # a bad row is reported before a weight is loaded
        super().__init__(config, options=options)
        self.notes = notes
        self.row_fingerprints = fingerprints(rows, held_out)
        self.evaluates_trained = {*map(id, held_out)} <= {*map(id, rows)}
        self.train_rows, self.held_out = self.read(rows, held_out)
        self.notes += marker_notes(self.tokenizer, rows + held_out, chat=config.task.chat)
        texts = (text for row in self.train_rows + self.held_out for text in self.texts(row))
        check_ids(texts, self.tokenizer, self.roles.causal)

    def read(self, rows: list[Row], held_out: list[Row]) -> tuple[list[Any], list[Any]]:
        """Both splits as tokens. Raises ValueError for rows that cannot be learnt from."""
        raise NotImplementedError

    def texts(self, row: Any) -> Sequence[list[int]]:
        """The tokens of a row, by texts."""
        raise NotImplementedError

    def batch(self, rows: list[int], session: Session | None = None) -> Batch:
        """What a step learns from some training rows; without a session one of this size, to plan by."""
        raise NotImplementedError

    @property
    def batch_size(self) -> int:
        """Rows of a step: at most all there are."""
        size: int = self.config.own.batch_size
        return min(size, len(self.train_rows))

    def train(self, session: Session) -> None:
        self.roles.lora_dropout = True
        seed, size, count = self.config.run.seed, self.batch_size, len(self.train_rows)
        for step in session.steps():
            rows = batch_indices(seed, step, num_prompts=size, num_rows=count)
            loss, sizes, metrics = self.batch(rows, session)
            session.start_update()
            with session.timed("update"):
                one_pass = Pass("policy", loss, range(len(sizes)), sizes)
                session.metrics.add(session.updater.step([one_pass], train=["policy"]))
            session.end_step(**metrics)

    def prompts(self) -> list[Any]:
        """What tells held-out rows apart."""
        return self.held_out

    def check(self) -> list[str]:
        count = len({prompt_key(prompt) for prompt in self.prompts()})
        few = few_held_out(count, trained_on=self.evaluates_trained) if self.config.run.eval_prompts else []
        return [*self.notes, *(self.template_warnings() if self.config.trains.policy else []), *few]

    def shown(self, row: Any) -> list[str]:
        """A row in a preview."""
        return []
