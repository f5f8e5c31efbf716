"""Numbers that a trainer measures on held-out rows: loss and perplexity of sft, pairs of dpo and of reward models.

The protocol of tinyrl/trainers stands here, the lowest room that asks for one; training/launch.py trains by it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol, cast

from tinyrl.components import Options, settle_threads
from tinyrl.config.methods import METHODS
from tinyrl.config.schema import Config
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.weights_io import load_policy


class Trainer(Protocol):
    """The protocol of the files in tinyrl/trainers: load what a method needs, train, and evaluate during training."""

    def load(self, config: Config, *, options: Options) -> Any:
        """The parts that `train` and `evaluate` take. Raises ValueError for what a user can fix."""
        ...

    def train(self, session: Any, parts: Any) -> None:
        """Go on from the current step of a session (training/session.py) to the last."""
        ...

    def evaluate(self, parts: Any) -> Evaluation:
        """Its numbers on the first run.eval_prompts held-out rows."""
        ...


def trainer_of(config: Config) -> Trainer:
    """The trainer of a run's method; imported now, since others may need libraries that this one does not."""
    return cast(Trainer, importlib.import_module(f"tinyrl.trainers.{METHODS[config.method].trainer}"))


def measure(config: Config, checkpoint: Path | None, *, split: str, most: int, options: Options) -> dict[str, Any]:
    """The numbers of a method's trainer on at most so many rows of a split (eval or train), for the weights of a
    checkpoint; None: for what training starts from.
    """
    run = config.run.model_copy(update={"eval_prompts": most})
    trainer = trainer_of(config)
    parts = trainer.load(config.model_copy(update={"run": run}), options=options)
    try:
        if checkpoint is not None and METHODS[config.method].policy:  # of any method: that of another run too
            load_policy(parts.roles, checkpoint)
        elif checkpoint is not None:
            parts.load_models(checkpoint)
        settle_threads(parts)
        return trainer.evaluate(parts if split == "eval" else parts.on_training_rows()).metrics
    finally:
        parts.close()
