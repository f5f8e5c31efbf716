"""From where rows are to what a model reads: rows with the right column names, their order, and the rendered prompt.

Which rows a step uses is a function of (seed, step) and nothing else, so a resumed run needs no iterator to restore.
Torch and transformers are never imported here; a tokenizer is something a caller hands over.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from tinyrl.data.readers import Placed, Row, read_source
from tinyrl.text import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Placed",
    "Prompt",
    "Rendered",
    "Row",
    "batch_indices",
    "check_prompt",
    "fingerprint",
    "hold_out",
    "keyed_order",
    "placed_rows",
    "read_rows",
    "render_prompt",
    "token_ids",
]

Prompt = str | list[dict[str, str]]  # text, or chat messages, as the data has them

HELD_OUT_SHARE = 10  # one prompt in this many is held out for evaluation where a person gives no evaluation data
HELD_OUT_MOST = 512


@dataclass(frozen=True)
class Rendered:
    """A prompt as the model gets it."""

    text: str
    tokens: list[int]
    opened: str  # "<think>..." that the prompt opened at its end and did not close; "" otherwise


def read_rows(source: str, *, columns: dict[str, str] | None = None) -> list[Row]:
    """The rows of a .jsonl, .json, .csv or .parquet file, or of a hub data set "owner/name:config@split".

    `columns` {new: old} renames; a column `new` that was there before gives way. Raises ValueError naming the place.
    """
    return [row for _, row in placed_rows(source, columns=columns)]


def placed_rows(source: str, *, columns: dict[str, str] | None = None) -> Placed:
    """`read_rows`, each row with where it stands ("train.jsonl:12"), for errors found later."""
    return [(place, _renamed(row, columns, place)) if columns else (place, row) for place, row in read_source(source)]


def _renamed(row: Row, columns: dict[str, str], place: str) -> Row:
    for new, old in columns.items():
        if old not in row:
            meant = did_you_mean(old, list(row))
            raise ValueError(
                f"{place}: no column '{old}', which task.columns.{new} asks for.{meant} Columns: {', '.join(row)}"
            )
    kept = {name: value for name, value in row.items() if name not in columns and name not in columns.values()}
    return {**kept, **{new: row[old] for new, old in columns.items()}}


def fingerprint(rows: list[Row]) -> str:
    """SHA-256 over the rows as canonical JSON: a resumed run checks that its data did not change."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, separators=(",", ":"), default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def keyed_order(key: str, count: int) -> list[int]:
    """The numbers 0..count-1 in an order that only `key` decides, on every machine and Python."""
    return sorted(range(count), key=lambda i: hashlib.sha256(f"{key}:{i}".encode()).digest())


def hold_out(rows: list[Row], *, prompt: Callable[[Row], Any], seed: int) -> tuple[list[Row], list[Row]]:
    """(train, held-out) rows: a tenth of the different prompts (1 to 512) is held out, chosen by `seed`.

    Rows with the same prompt fall on the same side; a held-out prompt is held once. Both keep the order of `rows`.
    """
    keys = [fingerprint([{"prompt": prompt(row)}]) for row in rows]
    distinct = sorted(set(keys))
    count = min(max(len(distinct) // HELD_OUT_SHARE, 1), HELD_OUT_MOST)
    held = {distinct[i] for i in keyed_order(f"hold out {seed}", len(distinct))[:count]}
    train = [row for key, row in zip(keys, rows, strict=True) if key not in held]
    held_out = {key: row for key, row in zip(keys, rows, strict=True) if key in held}
    return train, list(held_out.values())


def batch_indices(seed: int, step: int, *, num_prompts: int, num_rows: int) -> list[int]:
    """The rows of a step (counted from 0): the next `num_prompts` of a stream of shuffled epochs.

    Every epoch is all rows once, in an order keyed by (seed, epoch). A step that crosses into the next epoch, or asks
    for more prompts than there are rows, can hold a row twice.
    """
    if num_rows < 1:
        raise ValueError("there are no rows to train on")
    positions = range(step * num_prompts, (step + 1) * num_prompts)
    return [_epoch_order(seed, at // num_rows, num_rows)[at % num_rows] for at in positions]


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, num_rows: int) -> tuple[int, ...]:
    return tuple(keyed_order(f"epoch {seed} {epoch}", num_rows))


def check_prompt(prompt: Any) -> None:
    """ValueError with a sentence unless `prompt` is text or a list of {"role": ..., "content": text} messages."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        return
    wanted = 'text, or a list of messages {"role": "user", "content": "..."}'
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"the prompt must be {wanted}, not {repr(prompt)[:60]}")
    for message in prompt:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"the prompt must be {wanted}; one message is {repr(message)[:60]}")


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    *,
    chat: Literal["auto"] | bool = "auto",
    system_prompt: str | None = None,
) -> Rendered:
    """The prompt as text and tokens, ready for the model to go on from.

    With the tokenizer's chat template (`chat` True, or "auto" where it has one) text becomes one user message, the
    system prompt replaces a system message of the data, and messages that end with the assistant are continued.
    Without it the text stays as it is, after the system prompt and an empty line; a BOS that the tokenizer adds stays,
    an EOS it appends does not, since nothing follows an EOS. Raises ValueError where that cannot be done.
    """
    check_prompt(prompt)
    has_template = bool(tokenizer.chat_template)
    if chat is True and not has_template:
        raise ValueError("task.chat=true, but this model's tokenizer has no chat template; use task.chat=auto or false")
    if chat is False or not has_template:
        if not isinstance(prompt, str):
            why = "task.chat=false" if has_template else "this model's tokenizer has no chat template"
            raise ValueError(f"the prompt is a list of chat messages, but {why}; give prompts as text")
        text = f"{system_prompt}\n\n{prompt}" if system_prompt else prompt
        opened = re.search(r"<think>\s*\Z", text[-200:])
        return Rendered(text, _plain_tokens(tokenizer, text), opened.group() if opened else "")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt is not None:
        messages = [{"role": "system", "content": system_prompt}, *(m for m in messages if m["role"] != "system")]
    text, added = _templated(tokenizer, messages)
    tokens = token_ids(tokenizer, text)
    start = added.rfind("<think>")
    return Rendered(text, tokens, added[start:] if start >= 0 and "</think>" not in added[start:] else "")


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of `text` as it stands, without the special tokens a tokenizer adds around it."""
    return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]  # pyright: ignore


def _templated(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> tuple[str, str]:
    """The rendered text, and its end that belongs to the assistant (what messages say is not the template's)."""
    from jinja2.exceptions import TemplateError

    going_on = messages[-1]["role"] == "assistant"
    before = messages[:-1] if going_on else messages
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not going_on, continue_final_message=going_on
        )
        asked = tokenizer.apply_chat_template(before, tokenize=False) if before else ""
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"the model's chat template refuses messages with the roles {roles}: {error}") from error
    assert isinstance(text, str)
    assert isinstance(asked, str)
    shared = next((i for i, (a, b) in enumerate(zip(text, asked, strict=False)) if a != b), min(len(text), len(asked)))
    return text, text[shared:]


def _plain_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    bare = token_ids(tokenizer, text)
    if not bare:
        raise ValueError(f"the prompt {text[:60]!r} has no tokens")
    if bare[0] == tokenizer.bos_token_id:  # the text brings its own BOS; a second one would be added
        return bare
    full = list(tokenizer(text, verbose=False)["input_ids"])
    starts = (at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare)
    start = next(starts, None)
    return bare if start is None else full[: start + len(bare)]
