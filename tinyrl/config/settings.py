"""Describe the settings: a page of all of them, and a sentence for each that is wrong."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from tinyrl.config.aliases import ALIASES, LINES, OF_METHOD, OPTIMIZER_STEPS, OPTIONS, OTHER_UNITS
from tinyrl.config.marks import OnlyIf
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, and_list, is_method, or_list
from tinyrl.config.removed import REMOVED, RENAMED
from tinyrl.config.schema import Config
from tinyrl.config.yaml_reader import dump_plain, quoted
from tinyrl.text import did_you_mean, hang, join_truncated, truncate

MOST_SENTENCES = 3
FAR = 1_000_000
FUNCTION = re.compile(r"[\w./-]+:\w+")  # FILE.py:FUNCTION, where YAML needs no quotes
KeyPath = tuple[str | int, ...]  # of a setting: ("reward", "functions", 0, "use")
Kind = dict[str, Any]  # what a setting may be: a part of the JSON schema that pydantic gives
schema = cache(Config.model_json_schema)  # takes a while, so only where it is needed
SECTIONS = tuple(name for name in Config.model_fields if name != "method")
PLAIN = {"null": ["null"], "boolean": ["true", "false"], "string": ["text"]}
NUMBERS = {"integer": "a whole number", "number": "a number"}
LIMITS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "of at most", "exclusiveMaximum": "below"}


# ---- errors ----


@dataclass(frozen=True)
class Problem:
    """What is wrong. settings: those that it is about, the first by name; answer: of an unknown one, in a few words;
    line: what to write in place of an unknown one, as words of the command line.
    """

    settings: list[str]
    sentence: str
    answer: str = ""
    line: str = ""


def explain(error: ValidationError, method: object, place: Callable[[Sequence[str]], str]) -> str:
    """Return sentences about the problems that pydantic found: all unknown names, and the first of the others, at most
    one for a setting. A sentence has a place, `key`, the value, what is allowed, and what was probably meant. `place`
    returns where settings were written. The last line has what to write in place of the unknown names, where that is
    known.
    """
    found: dict[str, Problem] = {}
    problems = error.errors(include_url=False)
    updates = next((one["input"] for one in problems if one["loc"][-1:] == ("num_iterations",)), 1)
    for problem in problems:
        for one in _problems(problem, method, updates):
            found.setdefault(one.settings[0], one)
    unknown = [one for one in found.values() if one.answer]
    others = [one for one in found.values() if not one.answer]
    if len(unknown) > MOST_SENTENCES:
        answers = "; ".join(one.answer for one in unknown)
        lines = [f"{place(unknown[0].settings)}: {len(unknown)} unknown settings: {answers}"]
    else:
        lines = [f"{place(one.settings)}: {one.sentence}" for one in unknown]
    to_copy = [one.line for one in unknown if one.line]
    most = MOST_SENTENCES - (len(lines) == MOST_SENTENCES and bool(to_copy))
    lines += [f"{place(one.settings)}: {one.sentence}" for one in others[:most]]
    if to_copy:
        lines.append(f"to copy: {' '.join(dict.fromkeys(to_copy))}")
    return "\n".join(lines)


def _problems(problem: Any, method: object, updates: object) -> list[Problem]:
    path, kind = _walk(problem["loc"])
    name = _dotted(path)
    value = problem["input"]
    if problem["type"] == "value_error":  # of our own rules
        sentence = str(problem["ctx"]["error"])
        named = re.findall(r"\b[a-z_]+\.[a-z_]+", sentence)
        if path:
            return [Problem([name, *named], f"`{name}`: {sentence}")]
        return [Problem(named or [""], sentence)]
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        key = (*path, str(problem["loc"][len(path)]))
        name = _dotted(key)
        if removed := REMOVED.get(name):
            return [Problem([name], removed.refusal(name, value), f"`{name}` was removed")]
        if name in RENAMED:
            return [Problem([name], f"`{name}` is `{RENAMED[name]}` now", f"`{name}` is `{RENAMED[name]}`")]
        return [_unknown(key, whole, inner, method, updates) for whole, inner in _leaves(key, value)]
    if problem["type"] == "missing":
        return [Problem([name], f"`{name}` is missing; it must be {allowed(kind)}")]
    shown = json.dumps(value) if isinstance(value, bool | None) else truncate(repr(value))
    near = did_you_mean(value, _words(kind)) if isinstance(value, str) else ""
    fields = [*_fields(kind["items"])] if "items" in kind else []
    if fields[:1] == ["use"] and isinstance(value, str) and FUNCTION.fullmatch(value):
        near = f" Type '{name}=[{{use: {value}}}]'"
    return [Problem([name], f"`{name}` is {shown}; it must be {allowed(kind)}.{near}")]


def _leaves(path: KeyPath, value: Any) -> list[tuple[KeyPath, Any]]:
    """Return the whole names below an unknown key, and the value of each: verl's names have several dots."""
    if not isinstance(value, dict) or not value or path[-1] in ALIASES:
        return [(path, value)]
    found: list[tuple[KeyPath, Any]] = []
    for name, inner in value.items():
        found += _leaves((*path, name), inner)
    return found


def _unknown(path: KeyPath, whole: KeyPath, value: Any, method: object, updates: object) -> Problem:
    """Answer an unknown key with its name here if another library has it, the section that has it, or a near one.

    path: the part of its whole name up to the first part that is unknown. updates: the num_iterations that were given.
    """
    *parents, key = path
    dotted = _dotted(whole)
    in_item = any(isinstance(part, int) for part in parents)  # of a list, which has its own fields
    ends = (dotted.split(".", depth)[-1] for depth in range(len(whole)))
    alias = next((end for end in ends if end in ALIASES and not in_item), None)
    if alias is not None:
        answer = ALIASES[alias]
        if answer.startswith("!"):
            sentence = f"`{dotted}` is not a setting: {answer[1:]}"
            return Problem([dotted], sentence, f"`{dotted}` is not needed: {answer[1:]}")
        setting = re.split(r"[^\w.-]", answer)[0]
        remark = answer.removeprefix(setting)
        setting = OF_METHOD.get(alias, {}).get(str(method)) or _for_method(setting, method) or setting
        sentence = f"`{dotted}` is not a setting: `{alias}` is `{setting}` here{remark}"
        line = _line_of(alias, setting, value, method, updates)
        return Problem([dotted], sentence, f"`{dotted}` is `{setting}`", line)
    unused = {*OPTIONAL_SECTIONS} - {*METHODS[str(method)].sections} if is_method(method) else set[str]()
    home = next((section for section in SECTIONS if section not in unused and key in fields_of(section)), None)
    known = [*_fields(_walk(tuple(parents))[1])]
    name = _dotted(path)
    if home and not in_item:
        near = f" Did you mean `{home}.{key}`?"
        line = _line(f"{home}.{key}", _in_steps(str(key), value, updates))
    else:
        line = ""
        near = did_you_mean(str(key), known).replace("`", f"`{name.removesuffix(str(key))}", 1)
    sentence = f"unknown key `{name}`.{near or f' Known: {join_truncated(known, most=40)}'}"
    return Problem([dotted], sentence, f"`{dotted}` is unknown.{near}" if near else f"`{dotted}` is unknown", line)


# ---- the line to copy ----


def _line_of(alias: str, setting: str, value: Any, method: object, updates: object) -> str:
    """Return what to write in place of another library's name with its value, as words of the command line; "" where
    that depends on more than the value.
    """
    if alias in OPTIONS:
        return shlex.join([OPTIONS[alias], value]) if isinstance(value, str) else ""
    if alias in OTHER_UNITS:
        return ""
    if alias in LINES:
        text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, bool) else ""
        line = LINES[alias].get(text.removeprefix("torch."), "")
        setting, _, text = line.partition("=")
        setting = _for_method(setting, method)
        return shlex.quote(f"{setting}={text}") if setting else ""
    setting = _for_method(setting, method)
    return _line(setting, _in_steps(alias, value, updates)) if setting else ""


def _for_method(setting: str, method: object) -> str:
    """Return a setting, or that of the same name in the method's own section; "" where the method has none."""
    section, _, key = setting.partition(".")
    if section not in OPTIONAL_SECTIONS or not is_method(method):
        return setting
    its = METHODS[str(method)]
    if section in its.sections:
        return setting
    return f"{its.section}.{key}" if key in fields_of(its.section) else ""


def _in_steps(name: str, value: Any, updates: object) -> Any:
    """Convert a count of optimizer steps to steps, of which each has `updates` optimizer steps."""
    if name not in OPTIMIZER_STEPS or type(value) is not int or type(updates) is not int or updates < 1:
        return value
    return -(-value // updates)


def _line(setting: str, value: Any) -> str:
    """Return section.key=value as a word of the command line; "" for a value that no setting has."""
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    try:
        text = value if isinstance(value, str) else quoted(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError):
        return ""
    return shlex.quote(f"{setting}={text}")


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


def allowed(kind: Kind, *, brief: bool = False) -> str:
    """Return what a setting may be, in words: "auto or a whole number of at least 1". brief: without limits as far as
    FAR, which only keep out nonsense.
    """
    return or_list(_words(kind, brief=brief))


def _words(kind: Kind, *, brief: bool = False) -> list[str]:
    if fields := [*_fields(kind)]:
        return [f"{{{', '.join(fields[:2])}{', ...' if len(fields) > 2 else ''}}}"]
    if "anyOf" in kind:
        return [word for option in kind["anyOf"] for word in _words(option, brief=brief)]
    if "const" in kind or "enum" in kind:
        return kind.get("enum") or [kind["const"]]
    if kind["type"] == "object":
        return ["a mapping"]
    if kind["type"] == "array":
        item = allowed(kind["items"], brief=brief)
        items = re.sub(r"^a (whole )?number", r"\1numbers", item)
        return [f"a list of {items}"]
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
        default = dump_plain({key: getattr(values, key)}).partition(":")[2].strip()
        marks = type(values).model_fields[key].metadata
        conditions = " and ".join(mark.full(section) for mark in marks if isinstance(mark, OnlyIf))
        only = f"; only if {conditions}" if conditions else ""
        rows.append((key, default, f"{kind['description']} ({allowed(kind, brief=True)}){only}"))
        for inner, item in _fields(kind.get("items", {})).items():
            default = "" if item.get("default") is None else str(item["default"])
            rows.append((f"{key}[].{inner}", default, f"{item['description']} ({allowed(item, brief=True)})"))
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
