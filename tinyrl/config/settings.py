"""Describe the settings: a page of all of them, and a sentence for each that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from tinyrl.config.aliases import ALIASES
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, and_list, is_method, or_list
from tinyrl.config.removed import REMOVED
from tinyrl.config.schema import Config
from tinyrl.config.yaml_reader import dump_plain
from tinyrl.text import did_you_mean, truncate

MOST_SENTENCES = 3
KeyPath = tuple[str | int, ...]  # of a setting: ("reward", "functions", 0, "use")
Kind = dict[str, Any]  # what a setting may be: a part of the JSON schema that pydantic gives
schema = cache(Config.model_json_schema)  # takes a while, so only where it is needed
SECTIONS = tuple(name for name in Config.model_fields if name != "method")
PLAIN = {"null": ["null"], "boolean": ["true", "false"], "string": ["text"]}
NUMBERS = {"integer": "a whole number", "number": "a number"}
LIMITS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "of at most", "exclusiveMaximum": "below"}


# ---- errors ----


def explain(error: ValidationError, method: object, place: Callable[[str], str]) -> str:
    """Return a sentence for each of the first problems pydantic found, at most one for a setting: place, `key`, value,
    what is allowed, what was probably meant. `place` returns where a setting was written.
    """
    found: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        name, sentence = _sentence(problem, method)
        found.setdefault(name, f"{place(name)}: {sentence}")
    return "\n".join([*found.values()][:MOST_SENTENCES])


def _sentence(problem: Any, method: object) -> tuple[str, str]:
    """Return the setting that a problem is about, and a sentence."""
    if problem["type"] == "value_error":  # of our own rules: the first setting they name
        sentence = str(problem["ctx"]["error"])
        named = re.search(r"\b[a-z_]+\.[a-z_]+", sentence)
        return named[0] if named else "", sentence
    path, kind = _walk(problem["loc"])
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        return _unknown((*path, str(problem["loc"][len(path)])), problem["input"], method)
    name, value = _dotted(path), problem["input"]
    if problem["type"] == "missing":
        return name, f"`{name}` is missing; it must be {allowed(kind)}"
    shown = json.dumps(value) if isinstance(value, bool | None) else truncate(repr(value))
    near = did_you_mean(value, _words(kind)) if isinstance(value, str) else ""
    return name, f"`{name}` is {shown}; it must be {allowed(kind)}.{near}"


def _unknown(path: KeyPath, value: Any, method: object) -> tuple[str, str]:
    """Answer an unknown key with what replaced it if it was removed, its name here if another library has it, the
    section that has it, or a near one.
    """
    *parents, key = path
    if removed := REMOVED.get(_dotted(path)):
        name = _dotted(path)
        return name, f"`{name}` is {truncate(repr(value))}, and this setting was removed: {removed.instead}"
    whole = path
    while isinstance(value, dict) and value:  # of verl's dotted names the end is known
        name, value = next(iter(value.items()))
        whole = (*whole, name)
    dotted = _dotted(whole)
    ends = (dotted.split(".", depth)[-1] for depth in range(len(whole)))
    if alias := next((end for end in ends if end in ALIASES), None):
        answer = ALIASES[alias]
        setting = re.split(r"[^\w.-]", answer)[0]
        here = answer[1:] if answer[0] == "!" else f"`{alias}` is `{setting}` here{answer.removeprefix(setting)}"
        return dotted, f"`{dotted}` is not a setting: {here}"
    unused = {*OPTIONAL_SECTIONS} - {*METHODS[str(method)].sections} if is_method(method) else set[str]()
    home = next((section for section in SECTIONS if section not in unused and key in fields_of(section)), None)
    known, name = [*_fields(_walk(tuple(parents))[1])], _dotted(path)
    if home and not any(isinstance(part, int) for part in parents):  # a list has its own fields
        near = f" Did you mean `{home}.{key}`?"
    else:
        near = did_you_mean(str(key), known).replace("`", f"`{name.removesuffix(str(key))}", 1)
        near = near or f" Known: {', '.join(known)}"
    return name, f"unknown key `{name}`.{near}"


def _dotted(path: KeyPath) -> str:
    """Return a path as people write it: reward.functions[0].use."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return truncate("".join(parts).removeprefix("."))


# ---- what a setting may be ----


def fields_of(*path: str) -> dict[str, Kind]:
    """Return the fields of the section at `path` (of all settings without one), and what each may be; {} elsewhere."""
    walked, kind = _walk(path)
    return _fields(kind) if walked == path else {}


def _fields(kind: Kind) -> dict[str, Kind]:
    return _followed(kind).get("properties", {})


def _followed(kind: Kind) -> Kind:
    """Return what a schema refers to; an optional section, or list, is the section or the list."""
    options = [option for option in kind.get("anyOf", ()) if option.get("type") != "null"]
    kind = options[0] if len(options) == 1 else kind
    return schema()["$defs"][kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind


def _walk(loc: KeyPath) -> tuple[KeyPath, Kind]:
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


def allowed(kind: Kind) -> str:
    """Return what a setting may be, in words: "auto or a whole number of at least 1"."""
    return or_list(_words(kind))


def _words(kind: Kind) -> list[str]:
    if fields := [*_fields(kind)]:
        return [f"{{{', '.join(fields[:2])}{', ...' if len(fields) > 2 else ''}}}"]
    if "anyOf" in kind:
        return [word for option in kind["anyOf"] for word in _words(option)]
    if "const" in kind or "enum" in kind:
        return kind.get("enum") or [kind["const"]]
    if kind["type"] == "object":
        return ["a mapping"]
    if kind["type"] == "array":
        return [f"a list of {allowed(kind['items'])}"]
    limits = " and ".join(f"{words} {kind[name]}" for name, words in LIMITS.items() if name in kind)
    return PLAIN.get(kind["type"]) or [f"{NUMBERS[kind['type']]} {limits}".rstrip()]


# ---- the page ----


def describe(section: str) -> list[tuple[str, str, str]]:
    """Return (name, default, meaning) of each field of a section; the fields of a list's items follow the list."""
    values: BaseModel = Config.model_fields[section].get_default(call_default_factory=True)
    rows = []
    for key, kind in fields_of(section).items():
        default = dump_plain({key: getattr(values, key)}).partition(":")[2].strip()
        rows.append((key, default, f"{kind['description']} ({allowed(kind)})"))
        for inner, item in _fields(kind.get("items", {})).items():
            default = "" if item.get("default") is None else str(item["default"])
            rows.append((f"{key}[].{inner}", default, f"{item['description']} ({allowed(item)})"))
    return rows


def describe_settings(section: str | None = None) -> str:
    """Return one section, or all, as YAML that a recipe may hold: name and default of each field, and its meaning."""
    if section is not None and section not in SECTIONS:
        near = did_you_mean(section, [*SECTIONS])
        raise ValueError(f"there is no section '{truncate(section)}'.{near} Sections: {', '.join(SECTIONS)}")
    lines = []
    for name in [section] if section else SECTIONS:
        users = [method for method, its in METHODS.items() if name in its.sections]
        about = f"{Config.model_fields[name].description}{f' (read by {and_list(users)})' if users else ''}"
        lines.append(f"{name}:  # {about}")
        for key, default, meaning in describe(name):
            setting = f"{'# ' if '[]' in key else ''}{key}: {default}"
            lines.append(f"  {setting:30}  # {meaning}")
    return "\n".join(lines)
