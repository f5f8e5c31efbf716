"""`python -m benchmarks gpu`: the next slice of the table."""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from benchmarks.gpu.cells import cells, profile_of
from benchmarks.gpu.shapes import QWEN
from benchmarks.gpu.slices import Records, run_slice
from benchmarks.gpu.table import Results, table

NAMES = [shape.name for shape in QWEN]
ORDER = ("1.5b", "0.5b", "3b", "7b")  # of worth


def device_of(shapes: list[str]) -> str | None:
    """Where the shapes are measured; None where there is no GPU for them."""
    import torch

    if shapes == ["tiny"]:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else None


def main(options: Namespace) -> None:
    device = device_of(options.shapes)
    if device is None:
        print("torch sees no CUDA device here; --shapes tiny tries all of it out on a CPU", file=sys.stderr)
        raise SystemExit(2)
    folder, options.out = options.out, Path(tempfile.gettempdir()) / "tinyrl-gpu-benchmark"
    if options.shapes == ["tiny"]:
        options.out = folder / "work"
    profile = profile_of([name for name in (*ORDER, "tiny") if name in options.shapes], device=device)
    records, every = Records(folder / "cells.jsonl"), cells(profile)

    def write() -> None:
        (folder / "table.md").write_text(table(Results(profile, every, records.by_name)))

    settled, count = run_slice(every, records, options=options, after_each=write)
    write()
    print(f"{settled} of {count} cells are done ({folder / 'table.md'}); the same command again goes on with the rest")
