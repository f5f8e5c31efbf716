"""Lines of a run's records, read leniently: JSON objects with a step, numbers that may be none, messages of an episode.

A last line without its line break is being written, so it is left out when it does not parse; any other line that does
not parse is counted and reported. A line with LOST in the place of lines that a resume did not find any more is
reported too, and read by nobody else.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPEAKERS = {"assistant": "policy"}  # all else that an episode holds was read
LARGEST = 1e100
LOST = "lost_bytes"
MOST_OF_A_MARK = 1 << 20  # bytes


def number(value: Any) -> float:
    """A JSON value as a float; NaN for what is not a finite number, or so large that an axis cannot hold it."""
    if type(value) is float:
        return value if abs(value) < LARGEST else math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        result = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.nan
    return result if abs(result) < LARGEST else math.nan


def json_lines(path: Path, notes: list[str], *, containing: bytes = b"") -> Iterator[dict[str, Any]]:
    """The lines of a record that hold a step. Others are left out and, but for a cut-off last one, noted at the end, as
    is what was lost.
    """
    broken, lost, mark = 0, dict[int, int](), LOST.encode()
    with path.open("rb") as file:
        for line in file:
            if (containing not in line and mark not in line[:64]) or not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                broken += line.endswith(b"\n")
                continue
            step = row.get("step") if isinstance(row, dict) else None
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
                broken += 1
            elif isinstance(row.get(LOST), int):
                lost[step] = lost.get(step, 0) + row[LOST]
            else:
                yield row
    if broken:
        notes.append(f"{path.name}: {broken} line{'s' * (broken > 1)} could not be read and are left out.")
    for step, size in lost.items():
        notes.append(f"{path.name}: {size:,} bytes of up to step {step} were lost before a resume: a gap.")


def lost_lines(step: int, size: int) -> Iterator[bytes]:
    """Lines of `size` bytes together that say that as many, of up to `step`, are lost. Being as long as what they stand
    for, they leave the lengths true that checkpoints have of a record.
    """
    while size:
        now = size if size < 2 * MOST_OF_A_MARK else MOST_OF_A_MARK
        line = json.dumps({"step": step, LOST: now}).encode()
        yield (line if len(line) < now else b"").ljust(now - 1) + b"\n"
        size -= now


def messages_of(row: dict[str, Any]) -> list[tuple[str, str]]:
    """What a line of samples.jsonl holds after the prompt, by turns: who said it, and the text. Without an environment
    that is the completion.
    """
    episode = row.get("episode")
    if not isinstance(episode, list):
        return [("policy", str(row.get("completion", "")))]
    found = [message for message in episode if isinstance(message, dict)]
    return [(SPEAKERS.get(str(m.get("role")), "environment"), str(m.get("content", ""))) for m in found]
