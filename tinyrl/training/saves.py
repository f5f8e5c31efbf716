"""Write once, before step 1, what a checkpoint and an export write besides weights: what fails then fails in time."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tinyrl.models.reading import reading
from tinyrl.training.method import Method
from tinyrl.training.model_card import model_card


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
