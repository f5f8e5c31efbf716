"""The embedded models (a language model, an adapter that sorts, a reward model, one that looks up), their tasks (sort,
reviews, lookup), and the splits of their text.

A split is a hash of the prompt itself, so no prompt is in two: pre-training, training, the held-out rows that settings
were chosen on ("dev") and those that results are reported on ("eval") never share one, whatever seed drew them.
"""

import hashlib

from tinyrl.config.sections import starter_path  # exported model cards have it from here

__all__ = ["SPLITS", "split_of", "starter_path", "words"]

SPLITS = {"pretrain": 50, "train": 20, "dev": 5, "eval": 25}  # per cent


def split_of(prompt: str) -> str:
    """Return the split of a prompt, by its hash, so that no prompt is in two."""
    point = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8]) % 100
    for split, share in SPLITS.items():
        if point < share:
            return split
        point -= share
    raise AssertionError("the shares sum to 100")


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())
