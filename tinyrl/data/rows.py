"""Rows: the held-out split, the order of use, hashes.

The rows of a step are a function of (seed, step) and nothing else, so a resumed run has no iterator to restore.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from tinyrl.data.images import without_paths
from tinyrl.data.messages import as_messages, messages_of
from tinyrl.data.readers import Row

SPLIT_SEED = 0  # of the rows that are held out, whatever run.seed is
HELD_OUT_SHARE = 10  # one prompt in this many is held out if no evaluation data is given; of fewer prompts none
HELD_OUT_MOST = 512
CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str)
PASS_RATE = "pass_rate"  # column of rows that were probed
FEW = 30  # prompts; a score of fewer says little


def solved_from(solved_reward: float) -> float:
    """Return the least reward that counts as solved, by task.solved_reward: weighted sums of float32 miss it by
    rounding.
    """
    return solved_reward - 1e-6


def rows_needed(max_samples: int | None, *, split: bool) -> int | None:
    """Return how many rows to read for at most `max_samples` in each split (None: all). split: held-out rows are taken
    from the same rows.
    """
    if max_samples is None or not split:
        return max_samples
    return min(HELD_OUT_SHARE * max_samples, max_samples + HELD_OUT_SHARE * HELD_OUT_MOST)


def fingerprint(rows: list[Row]) -> str:
    """Return the SHA-256 of the rows as canonical JSON: a resumed run checks that its data did not change. Of an image
    the hash counts, and not where its file is.
    """
    digest = hashlib.sha256()
    for row in rows:
        text = CANONICAL.encode(row)
        if '"sha256":' in text:  # of an image, as a rule
            text = CANONICAL.encode(without_paths(row))
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()


def fingerprints(train: list[Row], held_out: list[Row]) -> dict[str, str]:
    """Return the fingerprints that a resume compares: of both splits, and once more of the images in them."""
    found = dict[str, str]()
    for split, rows in (("training", train), ("held-out", held_out)):
        found[split] = fingerprint(rows)
        images = [{"images": row["images"]} for row in rows if row.get("images")]
        if images:
            found[f"images of the {split}"] = fingerprint(images)
    return found


def row_key(row: Row) -> str:
    """Return a short hash of a row, wherever it is in the data."""
    return fingerprint([row])[:16]


def prompt_key(prompt: Any, *, system_prompt: str | None = None) -> str:
    """Return a hash of a prompt as it is read, whatever the other columns of its row: text is one message of the
    user's, and system messages tell no prompts apart where a `system_prompt` replaces them.
    """
    if isinstance(prompt, str):
        prompt = as_messages(prompt)
    elif isinstance(prompt, list) and prompt:
        prompt = messages_of(prompt, "prompt")
        if system_prompt is not None:
            prompt = [message for message in prompt if message["role"] != "system"]
    return fingerprint([{"prompt": prompt}])


def prompt_keys(prompt: Any, *, system_prompt: str | None) -> set[str]:
    """Return the keys that a prompt is known by in other runs, which may have another system prompt, or none."""
    return {prompt_key(prompt), prompt_key(prompt, system_prompt=system_prompt)}


def few_held_out(keys: Iterable[Any]) -> list[str]:
    """Warn if evaluation has few different prompts. keys: theirs."""
    count = len({*keys})
    where = "few prompts are held out, or none"
    more = "so held-out scores say little; give more rows, or task.eval_data"
    return [f"warning: {where} (evaluation has {count}), {more}"] if count < FEW else []


def trained_on_too(train: Iterable[str], held_out: Iterable[str], *, what: str = "prompts") -> list[str]:
    """Warn if held-out prompts are among those to train on, by their keys. what: their plural, where rows are told
    apart otherwise.
    """
    held = {*held_out}
    shared = held & {*train}
    if not shared:
        return []
    counts = f"held-out {what} that are trained on too: {len(shared):,} of {len(held):,}"
    return [f"warning: {counts}; held-out scores say nothing of new {what}"]


def seeded_permutation(key: str, count: int) -> list[int]:
    """Permute 0..count-1 by `key` alone, the same on every machine and Python."""
    return sorted(range(count), key=lambda i: hashlib.sha256(f"{key}:{i}".encode()).digest())


def shuffled(rows: list[Row]) -> list[Row]:
    """Return rows in an order that depends on their number alone."""
    return [rows[i] for i in seeded_permutation(f"graded {SPLIT_SEED}", len(rows))]


def train_eval_split(
    rows: list[Row],
    *,
    prompt: Callable[[Row], Any],
    seed: int,
    repeat: bool = False,
    system_prompt: str | None = None,
) -> tuple[list[Row], list[Row]]:
    """Split rows into (train, held-out): a tenth of the different prompts (1 to 512) is held out, chosen by `seed`.
    With fewer than ten prompts none is held out: all rows are trained on, and evaluation has them too, equal ones once.

    Rows with the same prompt, in whatever form (`prompt_key`), fall on the same side; of a held-out prompt only the
    last row is kept unless `repeat`. Both keep the order of `rows`.
    """
    forms = dict[str, str]()  # by the key of a prompt: the hash of its first form, which the choice is made by
    keys = list[str]()
    for row in rows:
        asked = prompt(row)
        form = fingerprint([{"prompt": asked}])
        keys.append(forms.setdefault(prompt_key(asked, system_prompt=system_prompt), form))
    distinct = sorted(set(keys))
    count = min(len(distinct) // HELD_OUT_SHARE, HELD_OUT_MOST)
    held = {distinct[i] for i in seeded_permutation(f"hold out {seed}", len(distinct))[:count]}
    train = [row for key, row in zip(keys, rows, strict=True) if key not in held]
    if held:
        held_out = [(key, row) for key, row in zip(keys, rows, strict=True) if key in held]
    else:
        held_out = [(row_key(row), row) for row in rows]
    return train, [row for _, row in held_out] if repeat else list(dict(held_out).values())


def batch_indices(seed: int, step: int, *, num_prompts: int, num_rows: int) -> list[int]:
    """Return the rows of a step (counted from 0): the next `num_prompts` of a stream of shuffled epochs.

    Every epoch is all rows once, in an order keyed by (seed, epoch). A step that crosses into the next epoch, or asks
    for more prompts than there are rows, can hold a row twice.
    """
    positions = range(step * num_prompts, (step + 1) * num_prompts)
    return [_epoch_order(seed, at // num_rows, num_rows)[at % num_rows] for at in positions]


@lru_cache(maxsize=32)
def _epoch_order(seed: int, epoch: int, num_rows: int) -> tuple[int, ...]:
    return tuple(seeded_permutation(f"epoch {seed} {epoch}", num_rows))
