"""`python -m benchmarks gpu`: the next slice of the table, what is left of it, or its results in a page."""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from benchmarks.gpu.cells import Cell, Profile, cells, profile_of
from benchmarks.gpu.shapes import QWEN
from benchmarks.gpu.slices import SETTLED, Records, run_slice
from benchmarks.gpu.table import Results, table

NAMES = [shape.name for shape in QWEN]
ORDER = ("1.5b", "0.5b", "3b", "7b")  # of worth
RESULTS = "gpu-results"  # ignored by git
BEGIN, END = "<!-- gpu: written by `python -m benchmarks gpu --into` -->", "<!-- gpu: end -->"


def machine_of(shapes: list[str]) -> tuple[str, str] | None:
    """(device, its name) on which the shapes are measured; None where there is no GPU for them."""
    import torch

    if shapes == ["tiny"]:
        return "cpu", "CPU"
    return ("cuda", torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def main(options: Namespace) -> None:
    folder, tiny = options.out, options.shapes == ["tiny"]
    options.real_model = options.real_model and options.real_model.resolve()
    device = "cpu" if tiny else "cuda"
    profile = profile_of([name for name in (*ORDER, "tiny") if name in options.shapes], device=device)
    every = cells(profile)
    if options.into is not None:
        write_into(options.into, tables(profile, every, Records(folder / "cells.jsonl", "")))
        return
    found = machine_of(options.shapes)
    if found is None and not options.list:
        print("torch sees no CUDA device here; --shapes tiny tries all of it out on a CPU", file=sys.stderr)
        raise SystemExit(2)
    records = Records(folder / "cells.jsonl", "" if found is None else found[1])
    chosen = [cell for cell in every if any(part in cell.name for part in options.only)] if options.only else every
    if options.list:
        show(records.left(chosen, again=options.again), records)
        return
    options.out = folder / "work" if tiny else Path(tempfile.gettempdir()) / "tinyrl-gpu-benchmark"

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "table.md").write_text(tables(profile, every, records))

    went_on = run_slice(chosen, records, options=options, after_each=write)
    write()
    say_what_is_left(chosen, records, where=folder)
    if not went_on:
        print("stopped: cell after cell failed for one reason, which is above", file=sys.stderr)
        raise SystemExit(1)


def show(left: list[Cell], records: Records) -> None:
    """Cells in the order in which they will be tried, with about how many minutes there will have been after each."""
    seconds = 0.0
    for cell in left:
        seconds += cell.seconds
        print(f"{seconds / 60:6.1f} min  {cell.name}  {records.status(cell)}")


def say_what_is_left(chosen: list[Cell], records: Records, *, where: Path) -> None:
    statuses = [records.status(cell) for cell in chosen]
    counts = {status: statuses.count(status) for status in dict.fromkeys(statuses) if status not in ("done", "")}
    others = "".join(f", {count} {status}" for status, count in counts.items())
    print(f"{statuses.count('done')} of {len(chosen)} cells are done{others} ({where / 'table.md'})")
    if any(status not in (*SETTLED, "skipped") for status in statuses):
        print("the same command goes on with the rest")


def tables(profile: Profile, every: list[Cell], records: Records) -> str:
    """One for each machine."""
    measured = {name: of for name, of in records.machines.items() if of}
    return "\n".join(table(Results(profile, every, of)) for of in measured.values())


def write_into(page: Path, text: str) -> None:
    """Put the tables between their marks in a page, or at its end."""
    own = f"{BEGIN}\n\n{text.strip()}\n\n{END}\n"
    page_text = page.read_text(encoding="utf-8")
    before, begin, rest = page_text.partition(BEGIN)
    after = rest.partition(END)[2].removeprefix("\n") if begin else ""
    page.write_text(f"{before.rstrip()}\n\n{own}{after}", encoding="utf-8")
