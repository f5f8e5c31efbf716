"""Marks of a setting, written beside its type: what its text names, when it counts, and whether numbers depend on it.

    data: Annotated[Text | None, Names("rows")] = Field(...)
    r: Annotated[int, OnlyIf("model.adapter is null", why="the adapter has its own rank")] = Field(...)
    save_every: Annotated[int, OnlyKeeps()] = Field(...)

Absolute paths, the checks before torch is imported, the hashes that a resume compares and the masking of URLs are each
one loop over the values that `find_named` and `replace_named` yield.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from tinyrl.config.task_files import has_turns, searches
from tinyrl.text import is_address

CONSTANTS: dict[str, Any] = {"null": None, "true": True, "false": False, "[]": []}  # of conditions; else text
KINDS_OF_TASKS = {"a task with turns": has_turns, "a task that searches": searches}  # of conditions
KINDS = ("model", "rows", "code", "server", "file")


@dataclass(frozen=True)
class RunKind:
    """The runs that a setting takes in place of a model: in words, and a predicate of a run's configuration."""

    words: str
    fits: Callable[[Any], bool]


class Names:
    """Mark a field whose text names something. A text that is none of the other kinds is of the first.

    model: a folder, a hub name, or a run that `run` takes. rows: a file, a folder of save_to_disk or a hub name. code:
    FILE.py:NAME or MODULE:NAME. server: an http address. file: a path; `made`: the run makes it, so it need not exist.
    Any other kind is a word with a meaning of its own (self, start, judge).
    """

    def __init__(self, *kinds: str, run: RunKind | None = None, made: bool = False) -> None:
        self.kinds = kinds
        self.run = run
        self.made = made

    def kind_of(self, text: str) -> str:
        if "server" in self.kinds and is_address(text):
            return "server"
        if "code" in self.kinds and ":" in text:
            return "code"
        is_word = text in self.kinds and text not in KINDS
        return text if is_word else self.kinds[0]


@dataclass(frozen=True)
class Named:
    """A value that names something. place: its section, its name and, in a list of sections, the item's field."""

    place: tuple[str, ...]
    names: Names
    value: str

    @property
    def kind(self) -> str:
        return self.names.kind_of(self.value)

    @property
    def setting(self) -> str:
        return ".".join(self.place[:2])

    @property
    def label(self) -> str:
        """Return the setting as messages show it: "reward.functions: rubric" for a field of an item."""
        return f"{self.setting}: {self.place[2]}" if len(self.place) > 2 else self.setting


@dataclass(frozen=True)
class OnlyIf:
    """Mark a field that counts only where a condition on other settings holds.

    condition: clauses "SETTING is VALUE", "SETTING is not VALUE" or "SETTING > NUMBER", joined by "and", and these by
    "or"; SETTING is section.name, `method`, or a name in the field's own section; VALUE may be one of KINDS_OF_TASKS.
    why: what is so where it does not hold, for people.
    """

    condition: str
    why: str

    def full(self, section: str) -> str:
        """Return the condition of a field of `section` with the whole names of settings."""
        return re.sub(r"(?:^|(?<= or )|(?<= and ))(?!method )(\w+)(?= (?:is|>) )", rf"{section}.\1", self.condition)

    def holds(self, config: Any, section: str) -> bool:
        alternatives = self.full(section).split(" or ")
        return any(all(_clause_holds(one, config) for one in each.split(" and ")) for each in alternatives)


class OnlyKeeps:
    """Mark a field of what a run keeps: no weight and no metric depends on it, so a resume may give another value."""


def _clause_holds(clause: str, config: Any) -> bool:
    match = re.fullmatch(r"(\S+) (is not|is|>) (.+)", clause)
    assert match, f"no condition: {clause!r}"
    setting, relation, text = match.groups()
    value = attrgetter(setting)(config)
    if relation == ">":
        return value > float(text)
    is_of_kind = KINDS_OF_TASKS.get(text)
    equal = value == CONSTANTS.get(text, text) if is_of_kind is None else is_of_kind(value)
    return equal is (relation == "is")


def replace_named(values: dict[str, Any], change: Callable[[Named], str], *, schema: type[BaseModel]) -> dict[str, Any]:
    """Return a copy of nested settings, with `change` applied to each value that names something.

    What the schema does not know, and values of another type than their field has, stay as they are.
    """
    return _replaced(values, schema, (), change, ())


def find_named(values: dict[str, Any], *, schema: type[BaseModel]) -> list[Named]:
    """Return each value of nested settings that names something."""
    found: list[Named] = []

    def record(named: Named) -> str:
        found.append(named)
        return named.value

    replace_named(values, record, schema=schema)
    return found


def _replaced(
    value: Any, kind: Any, marks: Sequence[Any], change: Callable[[Named], str], place: tuple[str, ...]
) -> Any:
    if isinstance(value, str):
        names = next((mark for mark in marks if isinstance(mark, Names)), None)
        return value if names is None else change(Named(place=place, names=names, value=value))
    if isinstance(value, list) and get_origin(kind) is list:
        (item,) = get_args(kind)
        of_item = item.__metadata__ if get_origin(item) is Annotated else ()
        return [_replaced(one, item, of_item, change, place) for one in value]
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, BaseModel):
        copy = dict(value)
        for name, field in kind.model_fields.items():
            if name in value:
                copy[name] = _replaced(value[name], field.annotation, field.metadata, change, (*place, name))
        return copy
    return value
