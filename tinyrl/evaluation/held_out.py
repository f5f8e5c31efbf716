"""Numbers that a trainer measures on held-out rows: loss and perplexity of sft, pairs of dpo and of reward models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tinyrl.components import Options, settle_threads, trainer_of
from tinyrl.config.schema import Config
from tinyrl.models.weights_io import load_policy


def measure(config: Config, checkpoint: Path | None, *, split: str, most: int, options: Options) -> dict[str, Any]:
    """The numbers of a method's trainer on at most so many rows of a split (eval or train), for the weights of a
    checkpoint; None: for what training starts from.
    """
    run = config.run.model_copy(update={"eval_prompts": most})
    trainer = trainer_of(config.method)(config.model_copy(update={"run": run}), options=options)
    try:
        if checkpoint is not None and config.trains.policy:  # of any method: that of another run too
            load_policy(trainer.roles, checkpoint)
        elif checkpoint is not None:
            trainer.load_models(checkpoint)
        settle_threads(trainer)
        if split == "train":
            trainer.held_out = trainer.train_rows
            trainer.forget()
        return trainer.evaluate().metrics
    finally:
        trainer.close()
