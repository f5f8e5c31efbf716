"""Settings in words: a page of all of them, and sentences for those that are wrong.

A sentence says the place, the value, what is allowed, and what was probably meant.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from tinyrl.config.aliases import find_alias
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, and_list, is_method, or_list
from tinyrl.config.schema import Config
from tinyrl.config.yaml_reader import KeyPath, Source, dump_plain
from tinyrl.text import did_you_mean, shortened

MOST_SENTENCES = 3
WIDTH = 80


# ---- what is wrong ----


def dotted(path: KeyPath) -> str:
    """A path as people write it: reward.functions[0].use."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return shortened("".join(parts).removeprefix("."))


def explain(error: ValidationError, source: Source) -> str:
    """The first problems pydantic found, a sentence each; a setting is named once."""
    found: dict[KeyPath, str] = {}
    for problem in error.errors(include_url=False):
        path, sentence = _sentence(problem, source)
        found.setdefault(path, sentence)
    shown = list(found.values())[:MOST_SENTENCES]
    more = len(found) - len(shown)
    return "\n".join(shown + ([f"(and {more} more)"] if more else []))


def _sentence(problem: Any, source: Source) -> tuple[KeyPath, str]:
    """The setting a pydantic problem is about, and its sentence: place, `key`, value, what is allowed, did you mean."""
    if problem["type"] == "value_error":
        sentence = str(problem["ctx"]["error"])
        named = re.search(r"\b([a-z_]+)\.([a-z_]+)", sentence)
        where = source.place(named.groups() if named else ())
        return (sentence,), sentence if where.startswith("override") else f"{where}: {sentence}"
    path, kind = _walk(problem["loc"])
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        unknown = (*path, str(problem["loc"][len(path)]))
        return unknown, _unknown(unknown, source)
    where, name = source.place(path), dotted(path)
    if problem["type"] == "missing":
        return path, f"{where}: `{name}` is missing; it must be {allowed(kind)}"
    value = source.value(path)
    hint = did_you_mean(value, _words(kind)) if isinstance(value, str) else ""
    if isinstance(value, bool | int | float) and "text" in _words(kind):
        hint = " Put it in quotes."
    shown = json.dumps(value) if isinstance(value, bool | None) else shortened(repr(value))
    return path, f"{where}: `{name}` is {shown}; it must be {allowed(kind)}.{hint}"


def _unknown(path: KeyPath, source: Source) -> str:
    """The sentence for an unknown key: its name in another library, the section that has it, or a near one."""
    *parents, key = path
    method: Any = source.values.get("method")
    unused = {*OPTIONAL_SECTIONS} - {*METHODS[method].sections} if is_method(method) else set[str]()
    for leaf in _leaves(source.value(path), path):  # of verl's names the end of a dotted one is known
        if found := find_alias(tuple(map(str, leaf)), method=method):
            name, answer = found
            start = f"{source.place(leaf)}: `{dotted(leaf)}` is not a setting: "
            if answer.startswith("!"):
                return start + answer[1:]
            section, _, rest = answer.partition(".")
            if {section, method} == {"grpo", "ppo"} and re.split(r"\W", rest)[0] in fields_of(method):
                answer = f"{method}.{rest}"
            setting = re.split(r"[^\w.-]", answer)[0]
            return f"{start}`{name}` is `{setting}` here{answer.removeprefix(setting)}"
    known = [*_fields(_walk(tuple(parents))[1])]
    homes = [home for home in SECTIONS if home not in unused and key in fields_of(home)]
    near = did_you_mean(str(key), known)
    if homes:
        meant = f" Did you mean `{homes[0]}.{key}`?"
    elif near:
        meant = near.replace("`", f"`{dotted(tuple(parents))}.", 1) if parents else near
    else:
        meant = f" `{dotted(tuple(parents))}` has: {', '.join(known)}" if parents else f" Sections: {', '.join(known)}"
    return f"{source.place(path)}: unknown key `{dotted(path)}`.{meant}"


def _leaves(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """The path of every value at `path` that is not a mapping with something in it."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path


# ---- what a setting may be, by the JSON schema that pydantic gives ----

Kind = dict[str, Any]
schema = cache(Config.model_json_schema)  # once there is something to say: it takes a while
SECTIONS = tuple(name for name in Config.model_fields if name != "method")
PLAIN = {"null": ["null"], "boolean": ["true", "false"], "string": ["text"]}
NUMBERS = {"integer": "a whole number", "number": "a number"}
LIMITS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "of at most", "exclusiveMaximum": "below"}


def fields_of(*path: str) -> dict[str, Kind]:
    """The fields of the section at `path`, of all settings without one, and what each may be; {} elsewhere."""
    walked, kind = _walk(path)
    return _fields(kind) if walked == path else {}


def _fields(kind: Kind) -> dict[str, Kind]:
    return _followed(kind).get("properties", {})


def _followed(kind: Kind) -> Kind:
    """What a schema refers to; an optional section, or list, is the section or the list."""
    options = [option for option in kind.get("anyOf", ()) if option.get("type") != "null"]
    kind = options[0] if len(options) == 1 else kind
    return schema()["$defs"][kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind


def _walk(loc: KeyPath) -> tuple[KeyPath, Kind]:
    """The part of an error's location that names a setting (no alternatives of a union), and what it may be."""
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
    """What a setting may be, in words: "auto or a whole number of at least 1"."""
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


def describe_settings(section: str | None = None, *, width: int = WIDTH) -> str:
    """One section, or all, as YAML that a recipe may hold, with what each setting does beside it."""
    if section is not None and section not in SECTIONS:
        homes = [name for name in SECTIONS if section in fields_of(name)]
        near = f" `{section}` is in {and_list(homes)}." if homes else did_you_mean(section, [*SECTIONS])
        raise ValueError(f"there is no section '{shortened(section)}'.{near} Sections: {', '.join(SECTIONS)}")
    return "\n\n".join(_page(name, width) for name in ([section] if section else SECTIONS))


def _page(section: str, width: int) -> str:
    """Name and default of each field beside what it means and may be; a list's items follow the list."""
    field = Config.model_fields[section]
    users = [name for name, method in METHODS.items() if section in method.sections]
    read_by = f" (read by {and_list(users)})" if section in OPTIONAL_SECTIONS else ""
    entries = [(f"{section}:", f"{field.description}{read_by}")]
    values: BaseModel = field.get_default(call_default_factory=True)
    for name, kind in fields_of(section).items():
        if name == "forked_from":  # written by `tinyrl train --from`, not set
            continue
        setting = dump_plain({name: getattr(values, name)}).strip()
        entries.append((f"  {setting}", f"{kind['description']} ({allowed(kind)})"))
        for inner, item in _fields(kind.get("items", {})).items():
            default = f" {item['default']}" if "default" in item else ""
            entries.append((f"  #   {inner}:{default}", f"{item['description']} ({allowed(item)})"))
    column = max(len(left) for left, _ in entries) + 2
    rest = f"{'':{column}}# "
    wrap = [(text, f"{left:{column}}# ") for left, text in entries]
    return "\n".join(textwrap.fill(text, width, initial_indent=left, subsequent_indent=rest) for text, left in wrap)
