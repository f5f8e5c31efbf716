"""Packaged recipes: each loads with its method, and its header says what running it takes."""

import re
from pathlib import Path

import pytest

from tinyrl.config.errors import FAMILIAR
from tinyrl.config.methods import METHODS
from tinyrl.config.recipe import dump_config, load_config, load_written_config, packaged_recipes, read_recipe
from tinyrl.tasks import load_task

RECIPES = packaged_recipes()
named = pytest.mark.parametrize("name", RECIPES)


def header(path: Path) -> list[str]:
    """The comment lines a recipe begins with, without their #."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").strip() for line in lines[:end]]


def test_the_embedded_defaults_are_there():
    assert {method.recipe for method in METHODS.values() if method.recipe} <= set(RECIPES)


@named
def test_loads_with_its_method(name: str):
    method = read_recipe(RECIPES[name]).values["method"]
    config = load_config(method, name, overrides=[])
    assert config.method == method
    assert config.task.name is not None
    assert load_task(config.task.name).name == config.task.name


@named
def test_every_section_is_a_method_that_loads(name: str):
    """Switching is one word: a recipe with grpo: and ppo: is one for both."""
    written = read_recipe(RECIPES[name]).values
    for method in {"grpo", "ppo"} & set(written):
        assert load_config(method, name, overrides=[]).method == method


@named
def test_is_the_same_after_it_was_written_to_a_run(name: str, tmp_path: Path):
    config = load_config(read_recipe(RECIPES[name]).values["method"], name, overrides=[])
    (tmp_path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_written_config(tmp_path / "config.yaml") == config


@named
def test_the_header_says_what_running_it_takes(name: str):
    first, *rest = header(RECIPES[name])
    assert 20 <= len(first) <= 140
    assert first.endswith(".")
    facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in rest if re.match(r"[a-z]+\s{2,}\S", line))
    assert {"command", "hardware", "measured"} <= set(facts)
    assert "@" not in facts["measured"], "a placeholder was left"
    method = re.search(r"tinyrl train ([a-z]+)", facts["command"])
    if method:
        assert method[1] in METHODS
        assert name in facts["command"] or METHODS[method[1]].recipe == name
    else:
        assert re.match(r"python -m tinyrl\.", facts["command"])


@named
def test_uses_the_names_of_this_house(name: str):
    words = set(re.findall(r"[A-Za-z_]+(?=:)", RECIPES[name].read_text(encoding="utf-8")))
    assert not words & (set(FAMILIAR) - {"seed", "temperature", "top_p", "top_k"})
