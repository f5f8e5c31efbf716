"""What was given for a run: the values of a recipe, of the command line or of Python, each with its place.

`derive` makes the whole configuration of them. A setting that nobody gave has no value here, so that what follows from
others can be told from what was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from tinyrl.config.refusal import Places
from tinyrl.config.schema import Config
from tinyrl.config.yaml_reader import parse_inline, parse_plain, quoted
from tinyrl.text import truncate

NULLS = ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True)
class Given:
    """Nested values as they were given, and where. is_whole: they are all settings of a run of an earlier version,
    which did not keep what was given.
    """

    values: dict[str, Any]
    places: Places = field(default_factory=Places)
    is_whole: bool = False

    def over(self, overrides: Sequence[str], *, arguments: Mapping[str, str] | None = None) -> Given:
        """Return these values with overrides laid over them. arguments: those of the Python API that overrides were, by
        setting. Raises ValueError for an override that cannot be read.
        """
        places = replace(
            self.places,
            overrides=(*self.places.overrides, *overrides),
            arguments={**self.places.arguments, **(arguments or {})},
        )
        return replace(self, values=apply_overrides(self.values, overrides), places=places)

    def has(self, setting: str, *, null_counts: bool = False) -> bool:
        """Return whether a setting has a value; null_counts: also where that is null."""
        section, _, name = setting.partition(".")
        own = self.values.get(section)
        if not isinstance(own, dict) or name not in own:
            return False
        return null_counts or own[name] is not None

    @property
    def typed(self) -> list[str]:
        """Return the settings that overrides give."""
        return settings_in(apply_overrides({}, self.places.overrides))


def settings_in(values: Mapping[str, Any]) -> list[str]:
    """Return the settings of nested values, as section.name."""
    found: list[str] = []
    for section, own in values.items():
        if isinstance(own, dict):
            found += [f"{section}.{name}" for name in own]
    return found


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
