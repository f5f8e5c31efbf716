"""Explain what is wrong with settings: a sentence for each problem that pydantic found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tinyrl.config.aliases import ALIASES
from tinyrl.config.foreign_names import alias_of, answer_of, home_of, meant_by
from tinyrl.config.foreign_values import FUNCTION, Copy, ForeignNames
from tinyrl.config.given import Given, apply_overrides, settings_in
from tinyrl.config.line_to_copy import copy_of, lines_to_copy
from tinyrl.config.refusal import Refusal
from tinyrl.config.removed import REMOVED, RENAMED
from tinyrl.config.settings import SECTIONS, KeyPath, allowed, dotted_name, fields_in, walk, words_of
from tinyrl.text import did_you_mean, join_truncated, nearest, truncate

MOST_SENTENCES = 3
UNKNOWN = ("extra_forbidden", "invalid_key")  # pydantic's names of problems
MOST_NAMES = 60  # unknown ones that are answered, one per line
OF_ANYTHING = ("enabled", "kind", "name", "path")  # keys that say nothing without their section


@dataclass(frozen=True)
class Problem:
    """What is wrong. answer: of an unknown setting, in a few words; copy: what to write in its place."""

    refusal: Refusal
    answer: str = ""
    copy: Copy | None = None

    @property
    def name(self) -> str:
        """Return the first of the settings that it is about."""
        return self.refusal.settings[0]


def explain(error: ValidationError, values: dict[str, Any], given: Given, *, missing: Sequence[str] = ()) -> str:
    """Return sentences about the problems that pydantic found: all unknown names, and the first of the others, at most
    one for a setting. A sentence has a place, `key`, the value, what is allowed, and what was probably meant. The last
    line has what to write in place of the unknown names, where that is known. given: of which the values are, with
    what follows from it; `missing` are settings that a run of one's own needs besides, where values are of the built-in
    example but for the overrides.
    """
    found: dict[str, Problem] = {}
    problems = error.errors(include_url=False)
    places = given.places
    method = values.get("method")
    typed = apply_overrides({"method": method}, places.overrides)
    beside = typed if missing else values
    ours = settings_in(_without_unknown(typed if missing else given.values, problems))
    names = ForeignNames(method, _foreign(problems), frozenset(ours))
    for problem in problems:
        for one in _problems(problem, names):
            found.setdefault(one.name, one)
    unknown = [one for one in found.values() if one.answer]
    others = [one for one in found.values() if not one.answer]
    if len(unknown) > MOST_SENTENCES:
        first = places.of(unknown[0].refusal.settings) or unknown[0].name
        lines = [f"{len(unknown)} unknown settings (the first: {first})"]
        lines += [f"  {one.answer}" for one in unknown[:MOST_NAMES]]
        lines += ["  ..."] if len(unknown) > MOST_NAMES else []
        most = MOST_SENTENCES
    else:
        lines = [places.sentence(one.refusal) for one in unknown]
        most = MOST_SENTENCES - (len(lines) == MOST_SENTENCES)
    lines += [places.sentence(one.refusal) for one in others[:most]]
    copies = {one.name: one.copy for one in unknown if one.copy is not None}
    return "\n".join(lines + lines_to_copy(copies, names, values=_without_unknown(beside, problems), missing=missing))


def is_foreign(problem: Any) -> bool:
    """Return whether a problem is a name that there is not, or a section that is given as a value (`model=NAME`)."""
    name = problem["loc"][0]
    is_value = len(problem["loc"]) == 1 and not isinstance(problem["input"], dict | list | None)
    return problem["type"] in UNKNOWN or (is_value and name in ALIASES and name in SECTIONS)


def _foreign(problems: Sequence[Any]) -> dict[str, Any]:
    """Return the unknown names with their values; a dotted one by the end that another library has."""
    found = dict[str, Any]()
    for problem in problems:
        if not is_foreign(problem):
            continue
        path, _ = walk(problem["loc"])
        key = path if len(path) == len(problem["loc"]) else (*path, str(problem["loc"][len(path)]))
        for whole, value in _leaves(key, problem["input"]):
            found[alias_of(whole) or dotted_name(whole)] = value
    return found


def _without_unknown(values: dict[str, Any], problems: Sequence[Any]) -> dict[str, Any]:
    """Return a copy of nested values without the names that there are not."""
    known = deepcopy(values)
    for problem in problems:
        *parents, last = problem["loc"]
        inner: Any = known
        for part in parents:
            inner = inner.get(part) if isinstance(inner, dict) else None
        if is_foreign(problem) and isinstance(inner, dict):
            inner.pop(last, None)
    return known


def _problems(problem: Any, given: ForeignNames) -> list[Problem]:
    path, kind = walk(problem["loc"])
    name = dotted_name(path)
    value = problem["input"]
    if problem["type"] == "value_error":  # of our own rules
        error = problem["ctx"]["error"]
        return [Problem(error if isinstance(error, Refusal) else Refusal((name,), f"`{name}`: {error}"))]
    if is_foreign(problem):
        key = path if len(path) == len(problem["loc"]) else (*path, str(problem["loc"][len(path)]))
        name = dotted_name(key)
        if removed := REMOVED.get(name):
            return [Problem(removed.refusal(name, value), f"`{name}` was removed")]
        if name in RENAMED:
            new = RENAMED[name]
            return [Problem(Refusal((name,), f"`{name}` is `{new}` now"), f"`{name}` is `{new}`")]
        return [_unknown(key, whole, inner, given) for whole, inner in _leaves(key, value)]
    if problem["type"] == "missing":
        return [Problem(Refusal((name,), f"`{name}` is missing; it must be {allowed(kind)}"))]
    shown = json.dumps(value) if isinstance(value, bool | None) else truncate(repr(value))
    near = did_you_mean(value, words_of(kind)) if isinstance(value, str) else ""
    fields = [*fields_in(kind["items"])] if "items" in kind else []
    if fields[:1] == ["use"] and isinstance(value, str) and FUNCTION.fullmatch(value):
        near = f" Type '{name}=[{{use: {value}}}]'"
    return [Problem(Refusal((name,), f"`{name}` is {shown}; it must be {allowed(kind)}.{near}"))]


def _leaves(path: KeyPath, value: Any) -> list[tuple[KeyPath, Any]]:
    """Return the whole names below an unknown key, and the value of each: verl's names have several dots."""
    if not isinstance(value, dict) or not value or (path[-1] in ALIASES and path[-1] not in SECTIONS):
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
    alias = None if in_item else alias_of(whole)
    if alias is not None:
        answer = answer_of(alias, given.method)
        sentence = answer.as_sentence(dotted, alias, given.method)
        in_words = answer.in_words(dotted, alias, given.method)
        return Problem(Refusal((dotted,), sentence), in_words, copy_of(alias, value, given))
    last = str(whole[-1] if not parents else key)  # verl's actor_rollout_ref.actor.optim.weight_decay
    is_of_anything = len(whole) > 1 and last in OF_ANYTHING
    home = None if in_item or is_of_anything else home_of(last, given.method)
    known = [*fields_in(walk(tuple(parents))[1])]
    name = dotted_name(path)
    copy = None
    if home is not None:
        near = f" Did you mean `{home}`?"
        copy = copy_of(last, value, given)
    else:
        of_section = did_you_mean(str(key), known).replace("`", f"`{name.removesuffix(str(key))}", 1)
        is_of_section = bool(parents) and nearest(str(key), known, cutoff=0.8) != ""
        elsewhere = "" if in_item or is_of_section or is_of_anything else meant_by(last, given.method)
        near = elsewhere or of_section
    sentence = f"unknown key `{name}`.{near or f' Known: {join_truncated(known, most=40)}'}"
    return Problem(
        Refusal((dotted,), sentence), f"`{dotted}` is unknown.{near}" if near else f"`{dotted}` is unknown", copy
    )
