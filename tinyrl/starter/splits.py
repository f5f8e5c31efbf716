"""Splits by a hash of the prompt itself: no prompt can be in two splits.

Pre-training, training, the held-out rows that settings were chosen on ("dev") and the held-out rows that results
are reported on ("eval") never share a prompt, whatever seed drew them.
"""

import hashlib

SPLITS = ("pretrain", "train", "dev", "eval")
_SHARES = {"pretrain": 50, "train": 20, "dev": 5, "eval": 25}  # per cent


def split_of(prompt: str) -> str:
    """The split of one prompt: a function of its text alone."""
    point = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8]) % 100
    for split, share in _SHARES.items():
        if point < share:
            return split
        point -= share
    raise AssertionError("the shares sum to 100")


def check_split(split: str) -> None:
    """Refuse a split that does not exist."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} does not exist; the starter text has {', '.join(SPLITS)}")
