"""Recipes: found and read, with overrides laid over them; and config.yaml and given.yaml of a run.

A recipe is a YAML file, given by path or by its packaged name. Every problem is a `ValueError` of at most six lines,
or `UnknownSettings` with a line for each.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from tinyrl.config.derive import check_overrides, derive, kept_against, read_written, without_derived
from tinyrl.config.effect import given_settings, without_effect
from tinyrl.config.given import Given
from tinyrl.config.methods import METHODS, is_method
from tinyrl.config.refusal import Places, Refusal, Source, refusals_at
from tinyrl.config.removed import ignore_neutral
from tinyrl.config.rules import FactsOf, no_facts
from tinyrl.config.schema import Config
from tinyrl.config.yaml_reader import dump_plain, parse_with_lines
from tinyrl.text import decode_utf8, did_you_mean, truncate

CONFIG = "config.yaml"
GIVEN = "given.yaml"
METHODS_ELSEWHERE = {  # names of methods and presets in other libraries, and what to type here
    "rm": "reward", "reward_model": "reward", "rlhf": "ppo", "ipo": "dpo dpo.loss=ipo", "kto": "dpo dpo.loss=kto",
    "orpo": "dpo dpo.loss=orpo", "simpo": "dpo dpo.loss=simpo", "rloo": "grpo grpo.preset=rloo",
    "reinforce": "grpo grpo.preset=reinforce++", "reinforce++": "grpo grpo.preset=reinforce++",
    "dapo": "grpo grpo.preset=dapo", "gspo": "grpo grpo.preset=gspo", "cispo": "grpo grpo.preset=cispo",
    "dr_grpo": "grpo grpo.preset=dr_grpo", "dr.grpo": "grpo grpo.preset=dr_grpo", "a2c": "ppo ppo.preset=a2c",
    "gkd": "distill",
    **{name: name for name in METHODS},  # GRPO
}  # fmt: skip
DATA_FILES = (".jsonl", ".csv", ".parquet")  # which no recipe is
OWN_MODEL_OR_DATA = ("model.path=", "task.name=", "task.data=", "model={", "task={")  # overrides of something else


def packaged_recipes() -> dict[str, Path]:
    """Return the packaged recipes by name: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).parent.parent
    folder = next(folder for folder in (package / "recipes", package.parent / "recipes") if folder.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """Return the path of a YAML file, or of a packaged recipe by name. Raises ValueError if there is none."""
    packaged = packaged_recipes()
    key = name.removesuffix(".yaml")
    is_data = Path(name).suffix in DATA_FILES
    if os.path.isfile(name) and not is_data:  # unlike Path.is_file it never raises
        return Path(name)
    if key in packaged:
        return packaged[key]
    if is_data:
        raise ValueError(f"'{truncate(name)}' is not a recipe: rows are given by {shlex.quote(f'task.data={name}')}")
    if key.lower() in METHODS_ELSEWHERE:
        raise ValueError(
            f"'{truncate(key)}' is not a recipe: it is `tinyrl train {METHODS_ELSEWHERE[key.lower()]}` here"
        )
    near = did_you_mean(key, [*packaged, *METHODS])
    raise ValueError(
        f"recipe '{truncate(name)}' is neither a file nor a packaged recipe.{near} See: tinyrl list recipes"
    )


def method_of(words: list[str]) -> tuple[str, list[str]]:
    """Return (method, what follows it) of words that begin with a method, or with a recipe that names its own."""
    if not words or "=" in words[0]:
        raise ValueError(f"which method? Methods: {', '.join(METHODS)}")
    if words[0] in METHODS:
        return words[0], words[1:]
    written = read_recipe(find_recipe(words[0])).get("method")
    if not is_method(written):
        raise ValueError(f"{words[0]} names no method; give it first, as in: grpo {words[0]}")
    return str(written), words


def read_recipe(path: Path) -> dict[str, Any]:
    """Parse one YAML file into nested values. Raises ValueError naming the file, and the line of broken YAML."""
    return read_with_lines(path)[0]


def read_with_lines(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Parse one YAML file into nested values, and the line of each key."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read recipe {path}: {error.strerror}") from error
    values, lines = deepcopy(_parsed(decode_utf8(raw, str(path)), str(path)))
    if not isinstance(values, dict):
        found = "an empty file" if values is None else type(values).__name__
        raise ValueError(f"{path}: a recipe is a mapping of sections (model:, task:, grpo:, ...), not {found}")
    return values, lines


@lru_cache(maxsize=8)
def _parsed(text: str, source: str) -> tuple[Any, dict[str, int]]:
    """Parse the text of a file. Commands read the same few again, and a copy takes a hundredth of the time."""
    return parse_with_lines(text, source)


def load_config(
    method: str,
    recipe: str | None,
    *,
    overrides: list[str],
    arguments: dict[str, str] | None = None,
    note: Callable[[str], object] | None = None,
    facts: FactsOf = no_facts,
) -> Config:
    """Load the configuration of `tinyrl train METHOD [RECIPE] [overrides]`.

    Without a recipe the embedded default is used, unless an override names another model or other data: then the
    general defaults are. arguments: those of the Python API that overrides were, by setting. `note` is called with a
    sentence for each setting of the recipe that has no effect, or that stays where an override would give it another
    value. Raises ValueError with a sentence for people.
    """
    if method not in METHODS:
        near = did_you_mean(method, list(METHODS))
        raise ValueError(f"unknown method '{truncate(method)}'.{near} Methods: {', '.join(METHODS)}")
    is_default = recipe is None and not names_own(overrides)
    missing = missing_of_own(method, overrides) if is_default else []
    if is_default:
        recipe = METHODS[method].recipe
    written = Given({"method": method})
    if recipe is not None:
        path = find_recipe(recipe)
        written = given_in(path, method, facts, name=f"default recipe {path.name}" if is_default else str(path))
    given = written.over(overrides, arguments=arguments)
    with refusals_at(given.places):
        check_overrides(method, overrides)
    config = derive(given, facts, missing=missing)
    if note is not None:
        for sentence in _notes(config, written, facts):
            note(sentence)
    return config


def names_own(overrides: Sequence[str]) -> bool:
    """Return whether an override names another model or other data than the built-in example's."""
    return any(text.startswith(OWN_MODEL_OR_DATA) for text in overrides)


def missing_of_own(method: str, overrides: Sequence[str]) -> list[str]:
    """Return the settings that a run of one's own needs besides."""
    missing = ["model.path", "task.data"]
    needs_reward = METHODS[method].samples and METHODS[method].rewarded
    if needs_reward and Places(overrides=tuple(overrides)).override_of("reward.functions") is None:
        missing.append("reward.functions")
    return missing


def given_in(path: Path, method: str, facts: FactsOf, *, name: str) -> Given:
    """Return what a recipe, which messages call `name`, gives to a method. Of a run's config.yaml those values count
    that do not follow from others. Raises ValueError for a recipe of another method.
    """
    values, lines = read_with_lines(path)
    places = Places(Source(name, lines))
    written = values.get("method", method)
    own = METHODS[method].section
    if is_method(written) and written != method and not isinstance(values.get(own), dict):
        refusal = Refusal(("method",), f"this recipe is for `tinyrl train {written}`, not {method}")
        raise ValueError(places.sentence(refusal))
    if not is_method(written):
        return Given(values, places)
    values = {**values, "method": method}
    if is_of_a_run(path):
        values = without_derived(ignore_neutral(values), facts)
    return Given(values, places)


def is_of_a_run(path: Path) -> bool:
    """Return whether a recipe is the config.yaml of a run, which holds all settings, whoever gave them."""
    return path.name == CONFIG and os.path.isfile(path.with_name("env.json"))


def _notes(config: Config, written: Given, facts: FactsOf) -> Iterator[str]:
    """Yield a sentence for each setting of a recipe that has no effect, or that stays where an override would give it
    another value. A run's config.yaml has every setting, and nobody asked for those.
    """
    if not is_of_a_run(Path(written.places.source.name)):
        for setting in given_settings(written.values):
            ineffective = without_effect(config, setting, of_recipe=True)
            if ineffective is not None:
                yield written.places.sentence(ineffective)
    yield from kept_against(config, facts)


# ---- config.yaml and given.yaml of a run ----


def dump_config(config: Config) -> str:
    """Return the resolved configuration as YAML; `load_written_config` gives the same object back."""
    return dump_plain(config.written())


def dump_given(config: Config) -> str | None:
    """Return what was given, as YAML; None of a run of an earlier version, which did not keep it."""
    given = config.written_given()
    return None if given is None else dump_plain(given)


def load_written_config(path: Path) -> Config:
    """Read a run's config.yaml, of this version or an earlier one, and what was given to the run, in given.yaml."""
    values, lines = read_with_lines(path)
    beside = path.with_name(GIVEN)
    given = read_recipe(beside) if beside.is_file() else None
    return read_written(ignore_neutral(values), Source(str(path), lines), given)
