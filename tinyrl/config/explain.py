"""Explain what is wrong with settings: a sentence for each problem that pydantic found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tinyrl.config.aliases import ALIASES
from tinyrl.config.foreign_names import answer_of, copy_of, copy_of_own, home_of, lines_to_copy
from tinyrl.config.foreign_values import Copy, ForeignNames
from tinyrl.config.removed import REMOVED, RENAMED
from tinyrl.config.settings import KeyPath, allowed, dotted_name, fields_in, walk, words_of
from tinyrl.text import did_you_mean, join_truncated, truncate

MOST_SENTENCES = 3
UNKNOWN = ("extra_forbidden", "invalid_key")  # pydantic's names of problems
MOST_NAMES = 60  # unknown ones that are answered, one a line
FUNCTION = re.compile(r"[\w./-]+:\w+")  # FILE.py:FUNCTION, where YAML needs no quotes


@dataclass(frozen=True)
class Problem:
    """What is wrong. settings: those that it is about, the first by name; answer: of an unknown one, in a few words;
    copy: what to write in its place.
    """

    settings: list[str]
    sentence: str
    answer: str = ""
    copy: Copy | None = None


def explain(
    error: ValidationError,
    method: object,
    place: Callable[[Sequence[str]], str],
    *,
    missing: Sequence[str] = (),
    has_adapter: bool = False,
) -> str:
    """Return sentences about the problems that pydantic found: all unknown names, and the first of the others, at most
    one for a setting. A sentence has a place, `key`, the value, what is allowed, and what was probably meant. `place`
    returns where settings were written. The last line has what to write in place of the unknown names, where that is
    known; `missing` are settings that a run of one's own needs besides; has_adapter: model.adapter is given.
    """
    found: dict[str, Problem] = {}
    problems = error.errors(include_url=False)
    names = {str(one["loc"][0]): one["input"] for one in problems if len(one["loc"]) == 1}
    given = ForeignNames(method, names, has_adapter=has_adapter)
    for problem in problems:
        for one in _problems(problem, given):
            found.setdefault(one.settings[0], one)
    unknown = [one for one in found.values() if one.answer]
    others = [one for one in found.values() if not one.answer]
    if len(unknown) > MOST_SENTENCES:
        lines = [f"{len(unknown)} unknown settings (the first: {place(unknown[0].settings)})"]
        lines += [f"  {one.answer}" for one in unknown[:MOST_NAMES]]
        lines += ["  ..."] if len(unknown) > MOST_NAMES else []
        most = MOST_SENTENCES
    else:
        lines = [f"{place(one.settings)}: {one.sentence}" for one in unknown]
        most = MOST_SENTENCES - (len(lines) == MOST_SENTENCES)
    lines += [f"{place(one.settings)}: {one.sentence}" for one in others[:most]]
    copies = {one.settings[0]: one.copy for one in unknown if one.copy is not None}
    return "\n".join(lines + lines_to_copy(copies, given, missing))


def _problems(problem: Any, given: ForeignNames) -> list[Problem]:
    path, kind = walk(problem["loc"])
    name = dotted_name(path)
    value = problem["input"]
    if problem["type"] == "value_error":  # of our own rules
        sentence = str(problem["ctx"]["error"])
        named = re.findall(r"\b[a-z_]+\.[a-z_]+", sentence)
        if path:
            return [Problem([name, *named], f"`{name}`: {sentence}")]
        return [Problem(named or [""], sentence)]
    if problem["type"] in UNKNOWN:
        key = (*path, str(problem["loc"][len(path)]))
        name = dotted_name(key)
        if removed := REMOVED.get(name):
            return [Problem([name], removed.refusal(name, value), f"`{name}` was removed")]
        if name in RENAMED:
            return [Problem([name], f"`{name}` is `{RENAMED[name]}` now", f"`{name}` is `{RENAMED[name]}`")]
        return [_unknown(key, whole, inner, given) for whole, inner in _leaves(key, value)]
    if problem["type"] == "missing":
        return [Problem([name], f"`{name}` is missing; it must be {allowed(kind)}")]
    shown = json.dumps(value) if isinstance(value, bool | None) else truncate(repr(value))
    near = did_you_mean(value, words_of(kind)) if isinstance(value, str) else ""
    fields = [*fields_in(kind["items"])] if "items" in kind else []
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


def _unknown(path: KeyPath, whole: KeyPath, value: Any, given: ForeignNames) -> Problem:
    """Answer an unknown key with its name here if another library has it, the section that has it, or a near one.

    path: the part of its whole name up to the first part that is unknown.
    """
    *parents, key = path
    dotted = dotted_name(whole)
    in_item = any(isinstance(part, int) for part in parents)  # of a list, which has its own fields
    ends = (dotted.split(".", depth)[-1] for depth in range(len(whole)))
    alias = next((end for end in ends if end in ALIASES and not in_item), None)
    if alias is not None:
        answer = answer_of(alias, given.method)
        copy = Copy(without=answer.without_line(given.method))
        if answer.setting:
            copy = copy_of(alias, answer.setting, value, given)
        sentence = answer.as_sentence(dotted, alias, given.method)
        return Problem([dotted], sentence, answer.in_words(dotted, alias, given.method), copy)
    home = None if in_item else home_of(str(key), given.method)
    known = [*fields_in(walk(tuple(parents))[1])]
    name = dotted_name(path)
    copy = None
    if home is not None:
        near = f" Did you mean `{home}`?"
        copy = copy_of_own(str(key), home, value, given)
    else:
        near = did_you_mean(str(key), known).replace("`", f"`{name.removesuffix(str(key))}", 1)
    sentence = f"unknown key `{name}`.{near or f' Known: {join_truncated(known, most=40)}'}"
    return Problem([dotted], sentence, f"`{dotted}` is unknown.{near}" if near else f"`{dotted}` is unknown", copy)
