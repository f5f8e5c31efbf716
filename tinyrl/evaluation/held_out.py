"""Numbers that a trainer measures on held-out rows: loss and perplexity of sft, pairs of dpo and of reward models."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from tinyrl.components import Options, settle_threads
from tinyrl.config.methods import METHODS
from tinyrl.config.schema import Config
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.weights_io import load_policy


class Trainer(Protocol):
    """What is asked here of a file in tinyrl/trainers. Its parts, or their `rows`, have rows `train` and `held_out`."""

    def load(self, config: Config, *, options: Options) -> Any:
        """The parts that `evaluate` takes."""
        ...

    def evaluate(self, parts: Any) -> Evaluation:
        """Its numbers on the first run.eval_prompts held-out rows."""
        ...


def measure(config: Config, checkpoint: Path | None, *, split: str, most: int, options: Options) -> dict[str, Any]:
    """The numbers of a method's trainer on at most so many rows of a split (eval or train), for the weights of a
    checkpoint; None: for what training starts from.
    """
    run = config.run.model_copy(update={"eval_prompts": most})
    method = METHODS[config.method]
    trainer = cast(Trainer, importlib.import_module(f"tinyrl.trainers.{method.trainer}"))
    parts = trainer.load(config.model_copy(update={"run": run}), options=options)
    try:
        if checkpoint is not None and method.policy:  # of any method: that of another run too
            load_policy(parts.roles, checkpoint)
        elif checkpoint is not None:
            parts.load_models(checkpoint)
        settle_threads(parts)
        return trainer.evaluate(parts if split == "eval" else _on_training_rows(parts)).metrics
    finally:
        parts.close()


def _on_training_rows(parts: Any) -> Any:
    """The parts with the rows that were trained on in place of the held-out ones."""
    if hasattr(parts, "rows"):
        return replace(parts, rows=replace(parts.rows, held_out=parts.rows.train))
    return replace(parts, held_out=parts.train)
