"""The embedded models (a language model, an adapter that sorts, a reward model, one that looks up), and the splits of
their text.

A split is a hash of the prompt itself, so no prompt is in two: pre-training, training, the held-out rows that settings
were chosen on ("dev") and those that results are reported on ("eval") never share one, whatever seed drew them.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tinyrl.config.sections import starter_path  # exported model cards have it from here

__all__ = ["SPLITS", "split_of", "starter_path", "words", "write_command", "write_rows"]

SPLITS = {"pretrain": 50, "train": 20, "dev": 5, "eval": 25}  # per cent


def split_of(prompt: str) -> str:
    point = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8]) % 100
    for split, share in SPLITS.items():
        if point < share:
            return split
        point -= share
    raise AssertionError("the shares sum to 100")


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_command(module: str, write: Callable[[Path], list[Path]]) -> None:
    """`python -m MODULE OUT`: write files, and name them."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {module} OUT")
    for path in write(Path(sys.argv[1])):
        print(path)
