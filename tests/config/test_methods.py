"""The table of methods: every line names a section, a recipe and a trainer that exist."""

from typing import get_args

import pytest

from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, MethodName, and_list, or_list
from tinyrl.config.recipe import packaged_recipes
from tinyrl.config.schema import Config
from tinyrl.rollout.components import trainer_of
from tinyrl.training.trainer import Trainer

named = pytest.mark.parametrize("name", METHODS)


def test_the_names_are_those_a_configuration_takes() -> None:
    assert get_args(MethodName) == tuple(METHODS)


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


def test_sections_that_only_some_methods_have() -> None:
    assert OPTIONAL_SECTIONS == (
        "reference",
        "teacher",
        "reward",
        "environment",
        "generation",
        "grpo",
        "critic",
        "ppo",
        "distill",
        "sft",
        "reward_model",
        "dpo",
    )


def test_lists_in_sentences() -> None:
    assert (or_list(["a"]), or_list(["a", "b"]), or_list(["a", "b", "c"])) == ("a", "a or b", "a, b or c")
    assert (and_list([]), and_list(["a"]), and_list(["a", "b", "c"])) == ("", "a", "a, b and c")
