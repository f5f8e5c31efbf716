"""Recipes and key=value overrides: read into a `Config`, and written back to config.yaml.

A recipe is a YAML file, given by path or by its packaged name. Every problem is a `ValueError` of at most six lines,
or `UnknownSettings` with a line for each.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from tinyrl.config.effect import contradictions, given_settings, without_effect
from tinyrl.config.explain import UNKNOWN, explain
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, is_method
from tinyrl.config.removed import REMOVED, ignore_neutral
from tinyrl.config.schema import Config
from tinyrl.config.settings import fields_of
from tinyrl.config.yaml_reader import dump_plain, parse_inline, parse_plain, parse_with_lines, quoted
from tinyrl.process.errors import UnknownSettings
from tinyrl.text import decode_utf8, did_you_mean, truncate

NULLS = ("", "~", "null", "Null", "NULL")
METHODS_ELSEWHERE = {  # names of methods and presets in other libraries, and what to type here
    "rm": "reward", "reward_model": "reward", "rlhf": "ppo", "ipo": "dpo dpo.loss=ipo", "kto": "dpo dpo.loss=kto",
    "orpo": "dpo dpo.loss=orpo", "simpo": "dpo dpo.loss=simpo", "rloo": "grpo grpo.preset=rloo",
    "reinforce": "grpo grpo.preset=reinforce++", "reinforce++": "grpo grpo.preset=reinforce++",
    "dapo": "grpo grpo.preset=dapo", "gspo": "grpo grpo.preset=gspo", "cispo": "grpo grpo.preset=cispo",
    "dr_grpo": "grpo grpo.preset=dr_grpo", "a2c": "ppo ppo.preset=a2c", "gkd": "distill",
}  # fmt: skip
DATA_FILES = (".jsonl", ".csv", ".parquet")  # which no recipe is
OWN_MODEL_OR_DATA = ("model", "model.path", "task", "task.name", "task.data")  # overrides that ask for something else


@dataclass(frozen=True)
class Source:
    """Where settings were written: a file, or another name for messages, and the line of each."""

    name: str
    lines: dict[str, int] = field(default_factory=dict)

    def place(self, settings: Sequence[str]) -> str:
        """Return the name, and the line of the first of the settings (of the last part of it) that has one."""
        for setting in settings:
            part = setting
            while part:
                if part in self.lines:
                    return f"{self.name}:{self.lines[part]}"
                part = part[: max(part.rfind("."), part.rfind("["), 0)]
        return self.name


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
        raise ValueError(f"'{truncate(name)}' is no recipe: rows are given by {shlex.quote(f'task.data={name}')}")
    if key in METHODS_ELSEWHERE:
        raise ValueError(f"'{key}' is no recipe: it is `tinyrl train {METHODS_ELSEWHERE[key]}` here")
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
    values, lines = parse_with_lines(decode_utf8(raw, str(path)), str(path))
    if not isinstance(values, dict):
        found = "an empty file" if values is None else type(values).__name__
        raise ValueError(f"{path}: a recipe is a mapping of sections (model:, task:, grpo:, ...), not {found}")
    return values, lines


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `values` with `section.key=value` overrides laid over it; their values are parsed as YAML, but
    for those of text fields (override_value). Raises ValueError for invalid Unicode anywhere in the values.
    """
    values = deepcopy(values)
    for override in overrides:
        where = f"override '{truncate(override)}'"
        key, equals, text = override.partition("=")
        *parents, last = key.split(".")
        if not equals or not all((*parents, last)):
            raise ValueError(f"{where} is not of the form section.key=value")
        target = values
        for depth, parent in enumerate(parents, start=1):
            if target.get(parent) is None:
                target[parent] = {}
            if not isinstance(target[parent], dict):
                name = ".".join(parents[:depth])
                raise ValueError(
                    f"{where}: `{name}` is {truncate(repr(target[parent]))}, so give all of it: {name}=..."
                )
            target = target[parent]
        target[last] = override_value(key, text, where)
    _check_texts(values, "")
    return values


def override_value(key: str, text: str, where: str) -> Any:
    """Return the value of an override: of a text field the text as it was typed, or what is between quotes; null where
    the field may be that. Values of other fields, lists too, are YAML.
    """
    types = _types_of(key)
    is_null = text.strip() in NULLS and type(None) in types
    if str not in types or not types <= {str, type(None)} or is_null:
        return parse_inline(text, where)
    if text.strip()[:1] in ("'", '"'):
        with suppress(ValueError):
            value = parse_inline(text, where)
            return value if isinstance(value, str) else text
    return text


def _types_of(key: str) -> set[Any]:
    """Return the types that a setting may be of; none for a section, an unknown setting, or a part of one."""
    section, _, name = key.partition(".")
    fields = [Config.model_fields[section]] if section in Config.model_fields else []
    for of_section in _members(fields[0].annotation) if fields else []:
        if isinstance(of_section, type) and issubclass(of_section, BaseModel) and name in of_section.model_fields:
            return {*_members(of_section.model_fields[name].annotation)}
    return set()


def _members(annotation: Any) -> list[Any]:
    """Return the types of a union, without what annotates them."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        found = list[Any]()
        for member in get_args(annotation):
            found += _members(member)
        return found
    return [annotation]


def _check_texts(value: Any, setting: str) -> None:
    """Raise ValueError, naming the setting, for a text with half of a character, which no file can hold."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_texts(str(name), setting)
            _check_texts(inner, f"{setting}.{name}" if setting else str(name))
    elif isinstance(value, list):
        for inner in value:
            _check_texts(inner, setting)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{setting}: {truncate(value)!r} holds invalid Unicode (a lone surrogate)") from None


def as_override(key: str, value: Any) -> str:
    """Return the `section.key=value` that `apply_overrides` reads back as `value`."""
    try:
        plain = isinstance(value, str) and parse_plain(value, key) == value
    except ValueError:
        plain = False
    return f"{key}={value if plain else quoted(json.dumps(value, ensure_ascii=False))}"


def load_config(
    method: str, recipe: str | None, *, overrides: list[str], note: Callable[[str], object] | None = None
) -> Config:
    """Load the configuration of `tinyrl train METHOD [RECIPE] [overrides]`.

    Without a recipe the embedded default is used, unless an override names another model or other data: then the
    general defaults are. `note` is called with a sentence for each setting of the recipe that has no effect. Raises
    ValueError with a sentence for people.
    """
    if method not in METHODS:
        near = did_you_mean(method, list(METHODS))
        raise ValueError(f"unknown method '{truncate(method)}'.{near} Methods: {', '.join(METHODS)}")
    missing = list[str]()
    if recipe is None and not any(text.partition("=")[0] in OWN_MODEL_OR_DATA for text in overrides):
        recipe = METHODS[method].recipe
        missing = ["model.path", "task.data"]
        needs_reward = METHODS[method].samples and METHODS[method].rewarded
        if needs_reward and _override_of(["reward.functions"], overrides) is None:
            missing.append("reward.functions")
    path = None if recipe is None else find_recipe(recipe)
    values, lines = read_with_lines(path) if path else ({}, {})
    written = values.get("method", method)
    own = METHODS[method].section
    if is_method(written) and written != method and not isinstance(values.get(own), dict):
        raise ValueError(f"{path}: this recipe is for `tinyrl train {written}`, not {method}")
    for override in overrides:  # a recipe may hold sections of other methods, an override may not
        setting, _, text = override.partition("=")
        section, _, name = setting.partition(".")
        if section == "method" or (section in OPTIONAL_SECTIONS and section not in METHODS[method].sections):
            if setting in REMOVED:  # whatever is trained
                raise ValueError(f"override '{truncate(override)}': {REMOVED[setting].refusal(setting, text)}")
            meant = f" Did you mean `{own}.{name}`?" if name in fields_of(own) else ""
            raise ValueError(f"override '{truncate(override)}': `{section}` is no section of `train {method}`.{meant}")
    method_given = {"method": method} if is_method(written) else {}
    values |= method_given
    source = Source(str(path or "settings"), lines)
    config = build_config(values, overrides, source=source, new=True, missing=missing)
    for setting in given_settings(values):
        sentence = without_effect(config, setting, of_recipe=True)
        if sentence is not None and note is not None:
            note(f"{source.place([setting])}: {sentence}")
    return config


def build_config(
    values: dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    source: Source | None = None,
    new: bool = False,
    missing: Sequence[str] = (),
) -> Config:
    """Validate nested values with overrides laid over them. Raises ValueError with the first problems as sentences.

    An override that has no effect, or contradicts another setting, is refused. new: the values are somebody's, and not
    a run's config.yaml, so no two of them may contradict each other. missing: settings that a run of one's own needs
    besides, for the answer to unknown names.
    """
    source = source or Source("settings")

    def place(settings: Sequence[str]) -> str:
        override = _override_of(settings, overrides)
        return source.place(settings) if override is None else f"override '{truncate(override)}'"

    values = apply_overrides(values, overrides)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        model = values.get("model")
        has_adapter = isinstance(model, dict) and model.get("adapter") is not None
        sentences = explain(error, values.get("method"), place, missing=missing, has_adapter=has_adapter)
        has_unknown = any(one["type"] in UNKNOWN for one in error.errors(include_url=False))
        raise (UnknownSettings if has_unknown else ValueError)(sentences) from None
    typed = given_settings(apply_overrides({}, overrides))
    for setting in typed:
        if (sentence := without_effect(config, setting)) is not None:
            raise ValueError(f"{place([setting])}: {sentence}{_remedy(config, setting, overrides)}")
    for found in contradictions(config):
        if new or any(setting in typed for setting in found.settings):
            raise ValueError(f"{place(found.settings)}: {found.sentence}")
    return config


def _remedy(config: Config, setting: str, overrides: Sequence[str]) -> str:
    """Return what to type for an override that counts only where another setting is null; "" for other conditions."""
    section, _, name = setting.partition(".")
    unmet = config.unmet(section, name)
    override = _override_of([setting], overrides)
    other, _, rest = ("", "", "") if unmet is None else unmet.full(section).partition(" is null")
    if override is None or not other or " " in other or rest:
        return ""
    return f". To have it: {shlex.join([f'{other}=null', override])}"


def _override_of(settings: Sequence[str], overrides: Sequence[str]) -> str | None:
    """Return the last override that gives one of the settings, or a part of it."""
    for setting in settings:
        for override in reversed(overrides):
            key = override.partition("=")[0]
            if f"{setting}.".startswith((f"{key}.", f"{key}[")) or key.startswith(f"{setting}."):
                return override
    return None


def dump_config(config: Config) -> str:
    """Return the resolved configuration as YAML; `load_written_config` gives the same object back."""
    return dump_plain(config.written())


def load_written_config(path: Path, *, overrides: Sequence[str] = ()) -> Config:
    """Read a run's config.yaml, of this version or an earlier one, with overrides laid over it."""
    values, lines = read_with_lines(path)
    return build_config(ignore_neutral(values), overrides, source=Source(str(path), lines))
