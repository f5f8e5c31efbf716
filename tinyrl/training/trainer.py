"""A method: a class in tinyrl/trainers and a line in config/methods.py, which needs no torch."""

from __future__ import annotations

from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.rollout.components import Parts
from tinyrl.training.session import Session


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
