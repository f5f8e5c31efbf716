"""Rows: column renames, the held-out split, the order of use, the fingerprint.

Which rows a step uses is a function of (seed, step) and nothing else, so a resumed run needs no iterator to restore.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tinyrl.data.readers import Placed, Row, read_source
from tinyrl.runs.signals import watched
from tinyrl.text import did_you_mean, listed, shortened

HELD_OUT_SHARE = 10  # one prompt in this many is held out for evaluation where no evaluation data is given
HELD_OUT_MOST = 512
FEW = 30  # prompts; a score of fewer says little


def read_rows(source: str, *, columns: dict[str, str] | None = None) -> list[Row]:
    """The rows of a .jsonl, .json, .csv or .parquet file, or of a hub data set "owner/name:config@split".

    `columns` {new: old} renames, replacing a column `new` that was there. Raises ValueError naming the place.
    """
    return [row for _, row in placed_rows(source, columns=columns)]


def placed_rows(source: str, *, columns: dict[str, str] | None = None) -> Placed:
    """`read_rows`, each row with its place ("train.jsonl:12"), for errors found later."""
    return [(place, _renamed(row, columns, place)) if columns else (place, row) for place, row in read_source(source)]


def _renamed(row: Row, columns: dict[str, str], place: str) -> Row:
    for new, old in columns.items():
        if old not in row:
            meant = did_you_mean(old, list(row))
            raise ValueError(
                f"{place}: no column '{shortened(old)}', which task.columns.{shortened(new)} asks for.{meant} "
                f"Columns: {listed(row)}"
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


def prompt_key(prompt: Any) -> str:
    """The same for the same prompt (text or messages), whatever else its row holds."""
    return fingerprint([{"prompt": prompt}])


def few_held_out(prompts: list[Any]) -> list[str]:
    """A warning where there are few different held-out prompts."""
    count = len({prompt_key(prompt) for prompt in prompts})
    if count >= FEW:
        return []
    held_out = f"only {count} different prompt{'s are' if count > 1 else ' is'} held out"
    return [f"warning: {held_out}, so held-out scores say little; give more rows, or task.eval_data"]


def fingerprints(train: list[Row], held_out: list[Row]) -> dict[str, str]:
    """Of both splits, by name."""
    return {"training": fingerprint(train), "held-out": fingerprint(held_out)}


def keyed_order(key: str, count: int) -> list[int]:
    """The numbers 0..count-1 in an order that only `key` decides, on every machine and Python."""
    return sorted(range(count), key=lambda i: hashlib.sha256(f"{key}:{i}".encode()).digest())


def hold_out(rows: list[Row], *, prompt: Callable[[Row], Any], seed: int) -> tuple[list[Row], list[Row]]:
    """(train, held-out) rows: a tenth of the different prompts (1 to 512) is held out, chosen by `seed`.

    Rows with the same prompt fall on the same side; a held-out prompt is kept once. Both keep the order of `rows`.
    """
    keys = [prompt_key(prompt(row)) for row in rows]
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
    return [_epoch_order(seed, at // num_rows, num_rows)[at % num_rows] for at in watched(positions)]


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, num_rows: int) -> tuple[int, ...]:
    return tuple(keyed_order(f"epoch {seed} {epoch}", num_rows))
