"""Completions of a run token by token, as tokens.jsonl holds them: read leniently, for the page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyrl.runs.lines import json_lines, number
from tinyrl.text import Excerpt, excerpt

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
