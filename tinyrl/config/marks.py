"""Marks of a setting, written beside its type: what its text names, when it counts, and whether numbers depend on it.

    data: Annotated[Text | None, Names("rows")] = Field(...)
    r: Annotated[int, FRESH] = Field(...)
    save_every: Annotated[int, OnlyKeeps()] = Field(...)

    FRESH = OnlyIf(lambda config: config.model.adapter is None, "model.adapter is null", why="the adapter has its own")

Absolute paths, the checks before torch is imported, the hashes that a resume compares and the masking of URLs are each
one loop over the values that `find_named` and `replace_named` yield.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from tinyrl.urls import is_address

if TYPE_CHECKING:
    from tinyrl.config.schema import Config

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

    holds: the condition; words: the same for people; why: what is so where it does not hold. of_method: it is about the
    method, so a recipe for several methods may have the setting. remedy: an override under which it holds.
    """

    holds: Callable[[Config], bool]
    words: str
    why: str
    of_method: bool = False
    remedy: str | None = None


class OnlyKeeps:
    """Mark a field of what a run keeps, or of when it ends: no number of a step depends on it, so a resume may give
    another value.
    """


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
