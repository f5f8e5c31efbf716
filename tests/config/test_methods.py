"""The table of methods: every line names a section, a recipe and a trainer that exist."""

import pytest

from tinyrl.config.methods import METHODS
from tinyrl.config.recipe import packaged_recipes
from tinyrl.config.schema import Config
from tinyrl.rollout.components import trainer_of
from tinyrl.training.session import Trainer

named = pytest.mark.parametrize("name", METHODS)


@named
def test_sections_and_recipes_are_there(name: str) -> None:
    method = METHODS[name]
    assert {*method.sections} <= {*Config.model_fields}
    assert method.own not in {
        section for other in METHODS.values() if other is not method for section in other.sections
    }
    assert method.recipe is None or method.recipe in packaged_recipes()


@named
def test_a_trainer_trains_and_evaluates(name: str) -> None:
    trainer = trainer_of(name)
    assert issubclass(trainer, Trainer)
    for what in ("train", "evaluate"):
        assert getattr(trainer, what) is not getattr(Trainer, what)
