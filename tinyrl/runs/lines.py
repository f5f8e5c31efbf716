"""Lines of a run's records, read leniently: JSON objects with a step, numbers that may be none, messages of an episode.

A last line without its line break is being written, so it is left out when it does not parse; any other line that does
not parse is counted and reported. A line with LOST in the place of lines that a resume did not find any more is
reported too, and read by nobody else.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyrl.text import Excerpt, excerpt

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


# ---- Completions of a run token by token, as tokens.jsonl holds them ----


MOST_COMPLETIONS = 8
MOST_TOKENS = 400  # of a completion; of longer ones, the start and the end
PIECE_CHARACTERS = 200
PROMPT_CHARACTERS = 500
NUMBERS = ("advantage", "old", "new", "ref", "value", "reward")


@dataclass(frozen=True)
class Token:
    """A piece of text; `chosen`: by the policy, else it was read. numbers: those of NUMBERS, NaN where unknown."""

    piece: Excerpt
    chosen: bool
    numbers: dict[str, float]


@dataclass(frozen=True)
class TokenSample:
    """A completion; `omitted` tokens are left out after the first `len(tokens) // 2`. reward: of all of it, NaN where
    unknown.
    """

    step: int
    kind: str
    prompt_index: int
    sample: int
    reward: float
    prompt: Excerpt
    tokens: tuple[Token, ...]
    omitted: int


def read_last_tokens(path: Path, notes: list[str]) -> list[TokenSample]:
    """The completions of the last step that has any, at most MOST_COMPLETIONS; none where there is no such file."""
    step, kept = -1, list[TokenSample]()
    for row in json_lines(path, notes) if path.is_file() else ():
        tokens = row.get("tokens")
        if not isinstance(tokens, list) or row["step"] < step:
            continue
        if row["step"] > step:
            step, kept = row["step"], []
        if len(kept) < MOST_COMPLETIONS:
            kept.append(_sample(row, [one for one in tokens if isinstance(one, dict)]))
    return kept


def _sample(row: dict[str, Any], tokens: list[dict[str, Any]]) -> TokenSample:
    omitted = max(0, len(tokens) - MOST_TOKENS)
    if omitted:
        tokens = [*tokens[: MOST_TOKENS // 2], *tokens[-MOST_TOKENS // 2 :]]
    places = [row.get(name) for name in ("prompt_index", "sample")]
    index, sample = (place if isinstance(place, int) else 0 for place in places)
    prompt = excerpt(str(row.get("prompt", "")), PROMPT_CHARACTERS)
    return TokenSample(
        step=row["step"],
        kind=str(row.get("kind", "")),
        prompt_index=index,
        sample=sample,
        reward=number(row.get("reward")),
        prompt=prompt,
        tokens=tuple(map(_token, tokens)),
        omitted=omitted,
    )


def _token(token: dict[str, Any]) -> Token:
    piece = excerpt(str(token.get("piece", "")), PIECE_CHARACTERS)
    return Token(piece, token.get("chosen") is not False, {name: number(token.get(name)) for name in NUMBERS})
