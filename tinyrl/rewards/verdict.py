"""Read the verdict in a judge's reply: one JSON object whose reason stands before its score, or its order.

What the judge quotes of an answer is inside a string of that object. Where a reply has two different verdicts, one of
them may be the answer's own, so it has none.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from tinyrl.text import truncate

MOST_VERDICT = 1 << 16  # characters of a reply, behind its thoughts, that are read
MOST_OBJECTS = 256  # places in them where an object may begin
NUMBER = re.compile(r"\s*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*")  # a score that is text
MOST_SHOWN = 200  # characters of a reply in a message

Verdict = TypeVar("Verdict")


def only_verdict(reply: str, name: str, parse: Callable[[Any], Verdict | None], *, what: str) -> Verdict:
    """Return the one verdict of a reply. parse: makes it of a value of `name`, None of a wrong one. Raises ValueError
    where there is none, a wrong one, or two that differ: what follows the first may be it, and what stands before the
    last may be quoted from an answer.
    """
    said = f"{truncate(reply.strip(), MOST_SHOWN)!r}"
    found = [parse(value) for value in verdict_values(reply, name)]
    if not found or found[0] is None or None in found:
        raise ValueError(f"gave no {what}: {said}")
    if any(one != found[0] for one in found):
        raise ValueError(f"gave more than one {what}, which differ: {said}")
    return found[0]


def verdict_values(reply: str, name: str) -> list[Any]:
    """Return the values of `name` in the JSON objects of a reply, and besides these any value behind the name as a key,
    as in an object that is broken. Empty where no whole object has it, and for a reply that is too long.

    What a judge thinks is not read: nothing before </think> (which a reason may quote), and nothing of a thought that
    was cut off.
    """
    thinks = reply.lstrip().startswith("<think>")
    thought, closed, behind = reply.partition("</think>")
    if thinks and not closed:
        return []
    try:
        first = next(objects_with(reply[:MOST_VERDICT], name), None) if closed and not thinks else None
        quotes = first is not None and first.start < len(thought) < first.end
        text = behind if closed and not quotes else reply
        if len(text) > MOST_VERDICT or text.count("{") > MOST_OBJECTS:
            return []
        found = [*objects_with(text, name)]
    except KeyTwice:
        return []
    values = [one.value for one in found]
    ends = [0, *(one.end for one in found)]
    starts = [*(one.start for one in found), len(text)]
    for start, end in zip(ends, starts, strict=True):
        values += values_behind(text[start:end], name)
    return values if found else []


@dataclass(frozen=True)
class FoundObject:
    """Where a JSON object stands in a text, and its value of the name that was asked for."""

    start: int
    end: int
    value: Any


class KeyTwice(ValueError):
    """A JSON object with one key twice, of which readers take either."""


def with_single_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise KeyTwice
    return found


DECODER = json.JSONDecoder(object_pairs_hook=with_single_keys)


def objects_with(text: str, name: str) -> Iterator[FoundObject]:
    """Yield the complete JSON objects that have `name`; one inside another counts if that has none. Raises KeyTwice."""
    end = 0
    for match in itertools.islice(re.finditer(r"\{", text), MOST_OBJECTS):
        if match.start() < end:
            continue
        try:
            found, behind = DECODER.raw_decode(text, match.start())
        except KeyTwice:
            raise
        except (ValueError, RecursionError):
            continue
        if name in found:
            end = behind
            yield FoundObject(match.start(), end, found[name])


def values_behind(text: str, name: str) -> list[Any]:
    """Return the JSON values that stand behind `name` as a key. Raises KeyTwice."""
    values = list[Any]()
    for match in re.finditer(rf'"{name}"\s*:\s*', text):
        with suppress(ValueError, RecursionError):
            values.append(DECODER.raw_decode(text, match.end())[0])
    return values


def score_within(value: Any, *, low: float, high: float) -> float | None:
    """Return a number, or a text that is one, as a float if it is on the scale."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_text = isinstance(value, str) and NUMBER.fullmatch(value) is not None
    if not is_number and not is_text:
        return None
    try:
        score = float(value)
    except OverflowError:
        return None
    return score if low <= score <= high else None


def scores_within(value: Any, *, scales: Mapping[str, tuple[float, float]]) -> dict[str, float] | None:
    """Return the score of each criterion, if an object has all of them, each on its scale."""
    if not isinstance(value, dict):
        return None
    found = dict[str, float]()
    for name, (low, high) in scales.items():
        score = score_within(value.get(name), low=low, high=high)
        if score is None:
            return None
        found[name] = score
    return found


def order_of(value: Any, *, count: int) -> list[int] | None:
    """Return an order of the numbers from 1 to `count`, some of which may be text."""
    numbers = [*map(str, value)] if isinstance(value, list) else []
    wanted = [str(number) for number in range(1, count + 1)]
    return [*map(int, numbers)] if sorted(numbers) == sorted(wanted) else None
