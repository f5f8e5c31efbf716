"""Describe the settings: what each may be, in words, and a page of all of them."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from pydantic import BaseModel

from tinyrl.config.marks import OnlyIf
from tinyrl.config.methods import METHODS, and_list, or_list
from tinyrl.config.schema import Config
from tinyrl.config.yaml_reader import dump_plain
from tinyrl.text import did_you_mean, hang, truncate

FAR = 1_000_000
KeyPath = tuple[str | int, ...]  # of a setting: ("reward", "functions", 0, "use")
Kind = dict[str, Any]  # what a setting may be: a part of the JSON schema that pydantic gives
schema = cache(Config.model_json_schema)  # takes a while, so only where it is needed
SECTIONS = tuple(name for name in Config.model_fields if name != "method")
PLAIN = {"null": ["null"], "boolean": ["true", "false"], "string": ["text"]}
NUMBERS = {"integer": "a whole number", "number": "a number"}
LIMITS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "of at most", "exclusiveMaximum": "below"}


def dotted_name(path: KeyPath) -> str:
    """Return a path as people write it: reward.functions[0].use."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return truncate("".join(parts).removeprefix("."))


# ---- what a setting may be ----


def fields_of(*path: str) -> dict[str, Kind]:
    """Return the fields of the section at `path` (of all settings without one), and what each may be; {} elsewhere."""
    walked, kind = walk(path)
    return fields_in(kind) if walked == path else {}


def fields_in(kind: Kind) -> dict[str, Kind]:
    """Return the fields of a kind, and what each may be; {} of one without fields."""
    return _followed(kind).get("properties", {})


def _followed(kind: Kind) -> Kind:
    """Return what a schema refers to; an optional section, or list, is the section or the list."""
    options = [option for option in kind.get("anyOf", ()) if option.get("type") != "null"]
    kind = options[0] if len(options) == 1 else kind
    return schema()["$defs"][kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind


def walk(loc: KeyPath) -> tuple[KeyPath, Kind]:
    """Return the part of an error's location that names a setting (no alternatives of a union), and its kind."""
    kind = schema()
    for depth, part in enumerate(loc):
        whole = _followed(kind)
        of_all = None if part == "[key]" else whole.get("items") or whole.get("additionalProperties")
        inner = whole.get("properties", {}).get(part) or of_all
        if not inner:
            return loc[:depth], kind
        kind = inner
    return loc, kind


def allowed(kind: Kind, *, brief: bool = False) -> str:
    """Return what a setting may be, in words: "auto or a whole number of at least 1". brief: without limits as far as
    FAR, which only keep out nonsense.
    """
    return or_list(words_of(kind, brief=brief))


def words_of(kind: Kind, *, brief: bool = False) -> list[str]:
    """Return the alternatives of `allowed`, each in words."""
    if fields := [*fields_in(kind)]:
        return [f"{{{', '.join(fields[:2])}{', ...' if len(fields) > 2 else ''}}}"]
    if "anyOf" in kind:
        return [word for option in kind["anyOf"] for word in words_of(option, brief=brief)]
    if "const" in kind or "enum" in kind:
        return kind.get("enum") or [kind["const"]]
    if kind["type"] == "object":
        return ["a mapping"]
    if kind["type"] == "array":
        item = allowed(kind["items"], brief=brief)
        items = "strings" if item == "text" else re.sub(r"^a (whole )?number", r"\1numbers", item)
        count = f"{kind['minItems']} " if "minItems" in kind and kind["minItems"] == kind.get("maxItems") else ""
        return [f"a list of {count}{items}"]
    bounds = [name for name in LIMITS if name in kind and not (brief and abs(kind[name]) >= FAR)]
    limits = " and ".join(f"{LIMITS[name]} {kind[name]}" for name in bounds)
    if bounds == ["minimum", "maximum"]:
        limits = f"from {kind['minimum']} to {kind['maximum']}"
    return PLAIN.get(kind["type"]) or [f"{NUMBERS[kind['type']]} {limits}".rstrip()]


# ---- the page ----


def describe(section: str) -> list[tuple[str, str, str]]:
    """Return (name, default, meaning) of each field of a section; the fields of a list's items follow the list."""
    values: BaseModel = Config.model_fields[section].get_default(call_default_factory=True)
    rows = []
    for key, kind in fields_of(section).items():
        value = getattr(values, key)
        default = json.dumps(value) if isinstance(value, list) else dump_plain({key: value}).partition(":")[2].strip()
        marks = type(values).model_fields[key].metadata
        conditions = " and ".join(mark.words for mark in marks if isinstance(mark, OnlyIf))
        only = f"; only if {conditions}" if conditions else ""
        rows.append((key, default, f"{kind['description']} ({allowed(kind, brief=True)}){only}"))
        rows += describe_items(key, kind)
    return rows


def describe_items(key: str, kind: Kind) -> list[tuple[str, str, str]]:
    """Return (name, default, meaning) of each field of a list's items, at any depth; [] of another kind."""
    rows = []
    for inner, item in fields_in(kind.get("items", {})).items():
        name = f"{key}[].{inner}"
        default = "" if item.get("default") is None else str(item["default"])
        rows += [(name, default, f"{item['description']} ({allowed(item, brief=True)})"), *describe_items(name, item)]
    return rows


def describe_settings(section: str | None = None, *, columns: int | None = None) -> str:
    """Return one section, or all, as YAML that a recipe may hold: name and default of each field, and its meaning, in
    lines of so many columns.
    """
    if section is not None and section not in SECTIONS:
        near = did_you_mean(section, [*SECTIONS])
        raise ValueError(f"there is no section '{truncate(section)}'.{near} Sections: {', '.join(SECTIONS)}")
    lines = []
    for name in [section] if section else SECTIONS:
        users = [method for method, its in METHODS.items() if name in its.sections]
        about = f"{Config.model_fields[name].description}{f' (read by {and_list(users)})' if users else ''}"
        lines.append(hang(about, columns, start=f"{name}:  # ", indent=" " * len(name) + "   # "))
        for key, default, meaning in describe(name):
            setting = f"{'# ' if '[]' in key else ''}{key}: {default}"
            lines.append(hang(meaning, columns, start=f"  {setting:30}  # ", indent=" " * 34 + "# "))
    return "\n".join(lines)
