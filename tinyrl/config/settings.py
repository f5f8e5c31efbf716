"""Settings in words: a page of all of them, and sentences for those that are wrong.

A sentence says the place, the value, what is allowed, and what was probably meant.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tinyrl.config.familiar import UNNEEDED, familiar, known_elsewhere, remark
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, and_list, is_method
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


def check_familiar(source: Source) -> None:
    """ValueError for a setting that has another name elsewhere: `beta` is `grpo.kl_coef` here."""
    method = source.values.get("method")
    used = {name: section for name, section in source.values.items() if name not in _unused(method)}
    for path in _leaves(used):
        walked, kind = _walk(path)
        name = known_elsewhere(tuple(map(str, path)), method=method)
        if walked == path or not fields_of(_bare(kind)) or not name:
            continue
        start = f"{source.place(path)}: `{dotted(path)}` is not a setting: "
        setting = familiar(name, method=method)
        if setting is None:
            raise ValueError(f"{start}{UNNEEDED[name]}")
        raise ValueError(f"{start}`{name}` is `{_for_method(setting, method)}` here{remark(name, method=method)}")


def _leaves(values: dict[Any, Any], within: KeyPath = ()) -> Iterator[KeyPath]:
    """The path of every value that is not a mapping with something in it."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*within, key))
        else:
            yield (*within, key)


def _unused(method: Any) -> set[str]:
    return {*OPTIONAL_SECTIONS} - {*METHODS[method].sections} if is_method(method) else set()


def _for_method(name: str, method: Any) -> str:
    """The same setting in the method's own section: `grpo.kl_coef` is `ppo.kl_coef` under PPO."""
    section, _, key = name.partition(".")
    if section in ("grpo", "ppo") and method in ("grpo", "ppo") and key in fields_of(_kind_at((method,))):
        return f"{method}.{key}"
    return name


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
        meant = _meant(path, unknown[-1], method=source.values.get("method"))
        return unknown, f"{source.place(unknown)}: unknown key `{dotted(unknown)}`.{meant}"
    where, name = source.place(path), dotted(path)
    if problem["type"] == "missing":
        return path, f"{where}: `{name}` is missing; it must be {allowed(kind)}"
    value = source.value(path)
    hint = did_you_mean(value, [str(literal) for literal in _literals(kind)]) if isinstance(value, str) else ""
    if value in ("", []):
        hint = " It is empty."
    elif isinstance(value, bool | int | float) and any(_bare(option) is str for option in _options(kind)):
        hint = " Put it in quotes."
    return path, f"{where}: `{name}` is {_shown(value)}; it must be {allowed(kind)}.{hint}"


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | None) else shortened(repr(value))


def _meant(path: KeyPath, key: str | int, *, method: Any) -> str:
    """What an unknown key was probably meant to be; the keys of its section where there is no guess."""
    known = list(fields_of(_kind_at(path)))
    key = str(key)
    homes = (
        name for name in Config.model_fields if name not in _unused(method) and key in fields_of(_kind_at((name,)))
    )
    home = next(homes, None)
    if home:
        return f" Did you mean `{home}.{key}`?"
    near = did_you_mean(key, known)
    if near:
        return near.replace("`", f"`{dotted(path)}.", 1) if path else near
    return f" `{dotted(path)}` has: {', '.join(known)}" if path else f" Sections: {', '.join(known)}"


@cache
def fields_of(kind: Any) -> dict[str, Any]:
    """The fields of a section and what each allows; {} for what is not a section."""
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return {}
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.model_fields}


def section_class(name: str) -> Any:
    """The class of a section of `Config`; None where there is no section of that name."""
    return _kind_at((name,))


SECTIONS = tuple(name for name, kind in fields_of(Config).items() if fields_of(kind))


def _walk(loc: KeyPath) -> tuple[KeyPath, Any]:
    """The part of an error's location that names a setting (no alternatives of a union), and what it allows."""
    path: list[str | int] = []
    kind: Any = Config
    for part in loc:
        inner = _inside(kind, part)
        if inner is None:
            break
        path.append(part)
        kind = inner
    return tuple(path), kind


def _kind_at(path: KeyPath) -> Any:
    """What the setting at `path` may be, or None. An optional section gives the section itself."""
    walked, kind = _walk(path)
    return _bare(kind) if walked == path else None


def _inside(kind: Any, part: str | int) -> Any:
    kind = _bare(kind)
    if get_origin(kind) is list and isinstance(part, int):
        return get_args(kind)[0]
    if get_origin(kind) is dict and part != "[key]":
        return get_args(kind)[1]
    return fields_of(kind).get(str(part))


def _bare(kind: Any) -> Any:
    """A type without its constraints and without None."""
    if get_origin(kind) is Annotated:
        return _bare(get_args(kind)[0])
    options = [option for option in _options(kind) if option is not NoneType]
    return _bare(options[0]) if len(options) == 1 and options[0] is not kind else kind


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _literals(kind: Any) -> list[Any]:
    return [value for option in _options(kind) if get_origin(option) is Literal for value in get_args(option)]


def allowed(kind: Any) -> str:
    """What a setting may be, in words: "auto or a whole number of at least 1"."""
    if fields_of(_bare(kind)):
        return f"a section ({', '.join(list(fields_of(_bare(kind)))[:4])}, ...)"
    words = [word for option in _options(kind) for word in _words(option)]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _words(kind: Any) -> list[str]:
    limits = ""
    if get_origin(kind) is Annotated:
        kind, *rules = get_args(kind)
        limits = " and ".join(filter(None, (_limit(rule) for each in rules for rule in _rules(each))))
        limits = f" {limits}" if limits else ""
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if get_origin(kind) is dict:
        plain = get_args(kind)[1] is not str
        return ["a mapping of names to plain values" if plain else "a mapping of text to text, {new: old}"]
    if get_origin(kind) is list:
        inner = get_args(kind)[0]
        names = [*fields_of(inner)]
        named = ", ".join([*names[:2], *(["..."] if len(names) > 2 else [])])
        return [f"a list of {{{named}}}" if names else f"a list of {allowed(inner)}"]
    if kind is bool:
        return ["true", "false"]
    return [{NoneType: "null", str: "text", int: "a whole number", float: "a number"}[kind] + limits]


def _rules(rule: Any) -> list[Any]:
    return list(rule.metadata) if isinstance(rule, FieldInfo) else [rule]


def _limit(rule: Any) -> str:
    words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    return next((f"{text} {getattr(rule, name)}" for name, text in words.items() if hasattr(rule, name)), "")


# ---- the page ----


def describe_settings(section: str | None = None, *, width: int = WIDTH) -> str:
    """One section, or all, as YAML that a recipe may hold, with what each setting does beside it."""
    if section is not None and section not in SECTIONS:
        homes = [name for name in SECTIONS if section in fields_of(section_class(name))]
        near = f" `{section}` is in {and_list(homes)}." if homes else did_you_mean(section, [*SECTIONS])
        raise ValueError(f"there is no section '{shortened(section)}'.{near} Sections: {', '.join(SECTIONS)}")
    pages = [_page(name, width) for name in ([section] if section else SECTIONS)]
    return "\n\n".join("\n".join(lines) for lines in pages)


def _page(section: str, width: int) -> list[str]:
    users = [name for name, method in METHODS.items() if section in method.sections]
    read_by = f"read by {and_list(users)}" if section in OPTIONAL_SECTIONS else ""
    heading = (f"{section}:", f"{Config.model_fields[section].description}", read_by)
    entries = list(
        _entries(section_class(section), Config.model_fields[section].get_default(call_default_factory=True))
    )
    column = max(len(left) for left, *_ in entries) + 2
    return [line for left, *texts in [heading, *entries] for line in _beside(left, *texts, column=column, width=width)]


def _entries(kind: Any, values: BaseModel) -> Iterator[tuple[str, str, str]]:
    """Name and default of each field, what it means, and what it may be; a list's items follow the list."""
    for name, allows in fields_of(kind).items():
        setting = dump_plain({name: getattr(values, name)}).strip()
        yield f"  {setting}", str(kind.model_fields[name].description), allowed(allows)
        for item in get_args(allows):
            for inner, field in getattr(item, "model_fields", {}).items():
                default = "" if field.default is PydanticUndefined else f" {field.default}"
                yield f"  #   {inner}:{default}", str(field.description), allowed(fields_of(item)[inner])


def _beside(left: str, meaning: str, allows: str, *, column: int, width: int) -> Iterator[str]:
    """Comment lines to the right of a setting; what is allowed is broken off only where it does not fit behind."""
    room = width - column - len("# ")
    lines, aside = textwrap.wrap(meaning, room), f"({allows})" if allows else ""
    if aside and len(lines[-1]) + 1 + len(aside) <= room:
        lines[-1] += f" {aside}"
    else:
        lines += textwrap.wrap(aside, room)
    for line in lines:
        yield f"{left:{column}}# {line}"
        left = ""
