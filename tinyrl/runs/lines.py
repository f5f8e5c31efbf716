"""Lines of a run's records, read leniently: JSON objects with a step, numbers that may be none, messages of an episode.

A last line without its line break is being written, so it is left out when it does not parse; any other line that does
not parse is counted and reported.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPEAKERS = {"assistant": "policy"}  # all else that an episode holds was read
LARGEST = 1e100


def number(value: Any) -> float:
    """A JSON value as a float; NaN for what is not a finite number, or so large that an axis cannot hold it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        result = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.nan
    return result if abs(result) < LARGEST else math.nan


def json_lines(path: Path, notes: list[str], *, containing: bytes = b"") -> Iterator[dict[str, Any]]:
    """The lines of a record that hold a step. Others are left out and, but for a cut-off last one, noted at the end."""
    broken = 0
    with path.open("rb") as file:
        for line in file:
            if containing not in line or not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                broken += line.endswith(b"\n")
                continue
            step = row.get("step") if isinstance(row, dict) else None
            if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53:
                yield row
            else:
                broken += 1
    if broken:
        notes.append(f"{path.name}: {broken} line{'s' * (broken > 1)} could not be read and are left out.")


def messages_of(row: dict[str, Any]) -> list[tuple[str, str]]:
    """What a line of samples.jsonl holds after the prompt, by turns: who said it, and the text. Without an environment
    that is the completion.
    """
    episode = row.get("episode")
    if not isinstance(episode, list):
        return [("policy", str(row.get("completion", "")))]
    found = [message for message in episode if isinstance(message, dict)]
    return [(SPEAKERS.get(str(m.get("role")), "environment"), str(m.get("content", ""))) for m in found]
