"""Recipes and key=value overrides: read into a `Config`, and written back to config.yaml.

A recipe is a YAML file, given by path or by its packaged name. Every problem is a `ValueError` of at most six lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, is_method
from tinyrl.config.schema import Config
from tinyrl.config.settings import explain, fields_of
from tinyrl.config.yaml_reader import Source, dump_plain, parse_plain
from tinyrl.text import decode_utf8, did_you_mean, shortened

MAX_RECIPE_BYTES = 100_000
OWN_MODEL_OR_DATA = ("model", "model.path", "task", "task.name", "task.data")  # overrides that ask for something else


def recipe_folder() -> Path:
    """The folder of packaged recipes: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).parent.parent
    return next(folder for folder in (package / "recipes", package.parent / "recipes") if folder.is_dir())


def packaged_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(recipe_folder().glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """A path to a YAML file, or the name of a packaged recipe."""
    packaged = packaged_recipes()
    path = Path(name)
    if os.path.isfile(name):  # unlike Path.is_file it never raises
        return path
    key = path.name.removesuffix(".yaml") if path.parent.name in ("", "recipes") else name
    if key in packaged:
        return packaged[key]
    what = "is a folder" if os.path.isdir(name) else "is neither a file nor a packaged recipe"
    raise ValueError(
        f"recipe '{shortened(name)}' {what}.{did_you_mean(key, list(packaged))}\n"
        "`tinyrl list recipes` lists the packaged ones"
    )


def split_settings(settings: list[str]) -> tuple[str | None, list[str]]:
    """What follows the method on the command line, as (recipe, overrides)."""
    if not settings:
        return None, []
    first, *rest = settings
    recipe, overrides = (first, rest) if "=" not in first or os.path.isfile(first) else (None, settings)
    for text in overrides:
        if "=" not in text and (os.path.isfile(text) or text.endswith(".yaml") or text in packaged_recipes()):
            problem = f"one recipe is enough, and {recipe!r} is one" if recipe else "the recipe comes before overrides"
            raise ValueError(f"{text!r}: {problem}: tinyrl train METHOD {text} section.key=value ...")
    return recipe, overrides


def read_recipe(path: Path, *, max_bytes: int = MAX_RECIPE_BYTES) -> Source:
    """Parse one YAML file into nested values with the line of every key. Raises ValueError naming file and line."""
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"cannot read recipe {path}: {error.strerror}") from error
    if len(raw) > max_bytes:
        raise ValueError(f"recipe {path} is too large: a recipe has at most {max_bytes:,} bytes")
    text = decode_utf8(raw, str(path))
    values, places = parse_plain(text, lambda line: f"{path}:{line}" if line else str(path))
    if values is None:
        raise ValueError(f"recipe {path} is empty")
    if not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else f"{shortened(repr(values))}"
        raise ValueError(f"{path}:1: a recipe is a mapping of sections (model:, task:, grpo:, ...), not {kind}")
    return Source(name=str(path), values=values, places=places)


def apply_overrides(source: Source, overrides: Sequence[str]) -> Source:
    """Return `source` with `section.key=value` overrides laid over it; values are read as YAML."""
    values, places = deepcopy(source.values), dict(source.places)
    for override in overrides:
        where = f"override '{shortened(override)}'"
        key, equals, text = override.partition("=")
        *parents, last = key.split(".")
        if not equals or not all((*parents, last)):
            raise ValueError(f"{where} is not of the form section.key=value")
        target = values
        for depth, parent in enumerate(parents, start=1):
            if target.get(parent) is None:
                target[parent] = {}
            inner, name = target[parent], ".".join(parents[:depth])
            if not isinstance(inner, dict):
                stands = f"{shortened(repr(inner))} ({places.get(name, source.name)})"
                raise ValueError(f"{where}: `{name}` is {stands}, so give all of it: {name}=...")
            target = inner
        target[last], inside = parse_plain(text, lambda line, where=where: where)
        for old in [place for place in places if place.startswith(f"{key}.")]:
            del places[old]
        places |= {key: where, **{f"{key}.{name}": where for name in inside}}
    return Source(source.name, values, places)


def as_override(key: str, value: Any) -> str:
    """`section.key=value` that `apply_overrides` reads back as `value`: text, a number, a flag, a list or a mapping."""
    try:
        plain = isinstance(value, str) and parse_plain(value, lambda line: key)[0] == value
    except ValueError:
        plain = False
    return f"{key}={value if plain else json.dumps(value, ensure_ascii=False)}"


def load_config(method: str, recipe: str | None, *, overrides: list[str]) -> Config:
    """The configuration of `tinyrl train METHOD [RECIPE] [overrides]`.

    Without a recipe the embedded default is used, unless an override names another model or other data: then the
    general defaults are. Raises ValueError with a sentence for people.
    """
    if method not in METHODS:
        if os.path.isfile(method) or method in packaged_recipes() or "=" in method:
            raise ValueError(f"which method? Say it first, as in `tinyrl train grpo {shortened(method)}`")
        meant = did_you_mean(method, list(METHODS))
        raise ValueError(f"unknown method '{shortened(method)}'.{meant} Methods: {', '.join(METHODS)}")
    if recipe is None and not any(text.partition("=")[0] in OWN_MODEL_OR_DATA for text in overrides):
        recipe = METHODS[method].recipe
    source = read_recipe(find_recipe(recipe)) if recipe else Source("overrides", {})
    written = source.values.get("method", method)
    own = METHODS[method].own
    if is_method(written) and written != method and not isinstance(source.values.get(own), dict):
        place = source.place(("method",))
        raise ValueError(f"{place}: this recipe is for `tinyrl train {written}`, not {method}")
    for override in overrides:  # a recipe may hold sections for several methods; an override that nothing reads may not
        section, _, name = override.partition("=")[0].partition(".")
        if section in OPTIONAL_SECTIONS and section not in METHODS[method].sections:
            users = " and ".join(name for name, other in METHODS.items() if section in other.sections)
            meant = f" Did you mean `{own}.{name}`?" if name in fields_of(own) else ""
            raise ValueError(f"override '{shortened(override)}': `{section}` is for {users}, not for {method}.{meant}")
        if section == "method" and override != f"method={method}":
            raise ValueError(f"override '{shortened(override)}': the method is given once: tinyrl train {method}")
    source = apply_overrides(source, overrides)
    if is_method(written):
        source.values["method"] = method
    return build_config(source)


def method_of(words: list[str]) -> tuple[str | None, list[str]]:
    """(method, what follows it) of words that begin with a method, or with a recipe, which must say its own."""
    if not words or "=" in words[0]:
        return None, words
    if words[0] in METHODS:
        return words[0], words[1:]
    source = read_recipe(find_recipe(words[0]))
    written = source.values.get("method")
    if not isinstance(written, str) or not is_method(written):
        raise ValueError(f"{source.name} says no method; say it first, as in `tinyrl check grpo {shortened(words[0])}`")
    return written, words


def build_config(settings: Source | dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Validate nested values with overrides laid over them; ValueError puts the first problems into sentences."""
    source = apply_overrides(settings if isinstance(settings, Source) else Source("settings", settings), overrides)
    try:
        return Config.model_validate(source.values)
    except ValidationError as error:
        raise ValueError(explain(error, source)) from None


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML; `load_written_config` gives the same object back."""
    return dump_plain(config.written())


def load_written_config(path: Path, *, overrides: Sequence[str] = ()) -> Config:
    """Read a run's config.yaml. Written out in full, it may be larger than the recipe it comes from."""
    return build_config(read_recipe(path, max_bytes=20 * MAX_RECIPE_BYTES), overrides)
