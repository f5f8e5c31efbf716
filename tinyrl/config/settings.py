"""Describe the settings: a page of all of them, and a sentence for each that is wrong."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from tinyrl.config.aliases import ALIASES, ALIASES_OF_DPO
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, and_list, is_method, or_list
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


def explain(error: ValidationError, values: dict[str, Any], place: Callable[[str], str]) -> str:
    """Return a sentence for each of the first problems pydantic found, at most one for a setting: place, `key`, value,
    what is allowed, what was probably meant. `place` returns where a setting was written.
    """
    found: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        name, sentence = _sentence(problem, values)
        found.setdefault(name, f"{place(name)}: {sentence}")
    shown, more = [*found.values()][:MOST_SENTENCES], len(found) - MOST_SENTENCES
    return "\n".join(shown + ([f"(and {more} more)"] if more > 0 else []))


def _sentence(problem: Any, values: dict[str, Any]) -> tuple[str, str]:
    """Return the setting that a problem is about, and a sentence."""
    if problem["type"] == "value_error":  # of our own rules: the first setting they name
        sentence = str(problem["ctx"]["error"])
        named = re.search(r"\b[a-z_]+\.[a-z_]+", sentence)
        return named[0] if named else "", sentence
    path, kind = _walk(problem["loc"])
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        return _unknown((*path, str(problem["loc"][len(path)])), values)
    name, value = _dotted(path), _value(values, path)
    if problem["type"] == "missing":
        return name, f"`{name}` is missing; it must be {allowed(kind)}"
    shown = json.dumps(value) if isinstance(value, bool | None) else truncate(repr(value))
    near = did_you_mean(value, _words(kind)) if isinstance(value, str) else ""
    return name, f"`{name}` is {shown}; it must be {allowed(kind)}.{near}"


def _unknown(path: KeyPath, values: dict[str, Any]) -> tuple[str, str]:
    """Answer an unknown key with its name here if another library has it, the section that has it, or a near one."""
    *parents, key = path
    method: Any = values.get("method")
    inner = _value(values, path)
    while isinstance(inner, dict) and inner:  # of verl's dotted names the end is known
        name, inner = next(iter(inner.items()))
        path = (*path, name)
    dotted, aliases = _dotted(path), ALIASES_OF_DPO if method == "dpo" else ALIASES
    ends = (dotted.lstrip("+").split(".", depth)[-1] for depth in range(len(path)))
    if alias := next((end for end in ends if end in aliases), None):
        start, answer = f"`{dotted}` is not a setting: ", aliases[alias]
        if answer.startswith("!"):
            return dotted, start + answer[1:]
        section, _, rest = answer.partition(".")
        if {section, method} == {"grpo", "ppo"} and re.split(r"\W", rest)[0] in fields_of(str(method)):
            answer = f"{method}.{rest}"
        setting = re.split(r"[^\w.-]", answer)[0]
        return dotted, f"{start}`{alias}` is `{setting}` here{answer.removeprefix(setting)}"
    path, inside = (*parents, key), f"{_dotted(tuple(parents))}." if parents else ""
    unused = {*OPTIONAL_SECTIONS} - {*METHODS[method].sections} if is_method(method) else set[str]()
    home = next((section for section in SECTIONS if section not in unused and key in fields_of(section)), None)
    home = None if any(isinstance(part, int) for part in parents) else home  # a list has its own fields
    known = [*_fields(_walk(tuple(parents))[1])]
    near = f" Did you mean `{home}.{key}`?" if home else did_you_mean(str(key), known).replace("`", f"`{inside}", 1)
    return _dotted(path), f"unknown key `{_dotted(path)}`.{near or ' Known: ' + ', '.join(known)}"


def _value(values: Any, path: KeyPath) -> Any:
    """Return the value at `path`; None where there is none."""
    for part in path:
        inside: Any = dict(enumerate(values)) if isinstance(values, list) else values
        values = inside.get(part) if isinstance(inside, dict) else None
    return values


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
        return [f"a section ({', '.join(fields[:4])}, ...)"]
    if "anyOf" in kind:
        return [word for option in kind["anyOf"] for word in _words(option)]
    if "const" in kind or "enum" in kind:
        return kind.get("enum") or [kind["const"]]
    if kind["type"] == "object":
        as_text = kind["additionalProperties"] == {"type": "string"}
        return [f"a mapping of {'text to text, {new: old}' if as_text else 'names to plain values'}"]
    if kind["type"] == "array":
        names = [*_fields(kind["items"])]
        named = ", ".join([*names[:2], *(["..."] if len(names) > 2 else [])])
        return [f"a list of {{{named}}}" if names else f"a list of {allowed(kind['items'])}"]
    limits = " and ".join(f"{words} {kind[name]}" for name, words in LIMITS.items() if name in kind)
    return PLAIN.get(kind["type"]) or [f"{NUMBERS[kind['type']]} {limits}".rstrip()]


# ---- the page ----


def describe_settings(section: str | None = None, *, width: int = 80) -> str:
    """Return one section, or all, as YAML that a recipe may hold: name and default of each field beside what it means
    and may be; the fields of a list's items follow the list.
    """
    if section is not None and section not in SECTIONS:
        homes = [name for name in SECTIONS if section in fields_of(name)]
        near = f" `{section}` is in {and_list(homes)}." if homes else did_you_mean(section, [*SECTIONS])
        raise ValueError(f"there is no section '{truncate(section)}'.{near} Sections: {', '.join(SECTIONS)}")
    pages = []
    for name in [section] if section else SECTIONS:
        field = Config.model_fields[name]
        users = [method for method, its in METHODS.items() if name in its.sections]
        entries = [(f"{name}:", f"{field.description}{f' (read by {and_list(users)})' if users else ''}")]
        values: BaseModel = field.get_default(call_default_factory=True)
        for key, kind in fields_of(name).items():
            if key == "forked_from":  # written by `tinyrl train --from`, not set
                continue
            default = dump_plain({key: getattr(values, key)}).strip()
            entries.append((f"  {default}", f"{kind['description']} ({allowed(kind)})"))
            for inner, item in _fields(kind.get("items", {})).items():
                default = f" {item['default']}" if "default" in item else ""
                entries.append((f"  #   {inner}:{default}", f"{item['description']} ({allowed(item)})"))
        column = max(len(left) for left, _ in entries) + 2
        rest = f"{'':{column}}# "
        wrapped = [
            textwrap.fill(text, width, initial_indent=f"{left:{column}}# ", subsequent_indent=rest)
            for left, text in entries
        ]
        pages.append("\n".join(wrapped))
    return "\n\n".join(pages)
