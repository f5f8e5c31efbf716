"""Cells measured one by one within some minutes; each is on disk as soon as it is done, and the next slice goes on.

A cell that its slice has no time left for is tried first in the next one. What fails is kept with its reason and not
tried again (--again does). cells.jsonl has a line a cell; table.md is written anew after each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.gpu.cell import measured
from benchmarks.gpu.cells import FOUR_BIT, PACKAGE, Cell
from benchmarks.gpu.shapes import Shape

RESERVE_S = 15.0  # of a slice, to write and to end in
FULL = 0.8  # of a slice: a cell that had so much of one and was not done never will be


@dataclass
class Slice:
    """A slice that began at `start` and has `seconds`."""

    seconds: float
    start: float

    @property
    def left(self) -> float:
        """Seconds that a cell may still take."""
        return self.start + self.seconds - RESERVE_S - time.monotonic()


class Records:
    """cells.jsonl of a folder: what came of each cell, by name; the last line of a name counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.is_file() else []
        self.by_name: dict[str, dict[str, Any]] = {}
        for line in lines:
            record = json.loads(line)
            self.by_name[record["cell"]] = record

    def add(self, record: dict[str, Any]) -> None:
        """Append a line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.by_name[record["cell"]] = record

    def is_settled(self, cell: Cell, *, again: bool) -> bool:
        """Whether nothing is left to do for it."""
        record = self.by_name.get(cell.name)
        return record is not None and record["status"] in (("done",) if again else ("done", "failed", "too long"))


class Runner:
    """Measures cells: each in a process of its own, or (tiny ones) in this one."""

    def __init__(self, options: Namespace, records: Records, within: Slice) -> None:
        self.options, self.records, self.within = options, records, within
        self.in_here = options.shapes == ["tiny"]

    def run(self, cell: Cell) -> dict[str, Any]:
        """The record of a cell, which is on disk too."""
        start, had = time.monotonic(), self.within.left
        files: dict[str, str] = {}
        try:
            if cell.shape is not None:
                files = {"files": str(self.files(cell.shape, cell))}
            python = peer_python(cell, self.options)
            result = self.measure(f"{PACKAGE}.{cell.module}", {**cell.settings, **files}, python=python)
            record = {"status": "done", "result": result}
        except processes.Failed as failure:
            cut = failure.too_long and had < FULL * self.within.seconds
            status = "cut" if cut else "too long" if failure.too_long else "failed"
            record = {"status": status, "why": (failure.tail.strip().splitlines() or [str(failure)])[-1][:300]}
        record = {"cell": cell.name, **record, "seconds": round(time.monotonic() - start, 1)}
        self.records.add(record)
        return record

    def measure(self, module: str, settings: dict[str, Any], *, python: str = sys.executable) -> dict[str, Any]:
        """settings -> result of a module's `measure`."""
        if python != sys.executable or not self.in_here:
            question = {**settings, "module": module}
            left = max(1.0, self.within.left)
            return processes.attempt("gpu.cell", question, options=self.options, python=python, timeout=left)
        folder = self.options.out / "jobs" / f"{time.monotonic_ns()}"
        folder.mkdir(parents=True)
        return measured({**settings, "module": module, "folder": str(folder), "threads": self.options.threads})

    def files(self, shape: Shape, cell: Cell) -> Path:
        """The folder of a shape, made where it is not there yet."""
        folder = self.options.out / "models" / shape.name
        if not (folder / "done").is_file():
            print(f"building {shape.name} ...", flush=True)
            settings = {"shape": asdict(shape), "files": str(folder), "device": cell.settings["device"]}
            prompt = cell.settings["work"]["prompt"]
            more = {"prompt": prompt, "with_reward_model": shape.name not in FOUR_BIT}
            self.measure(f"{PACKAGE}.shapes", {**settings, **more})
        return folder


def peer_python(cell: Cell, options: Namespace) -> str:
    """The Python of a cell: for PPO that of another release of the peer, if one is named."""
    theirs = (options.ppo_peer_python if cell.section == "ppo" else None) or options.peer_python
    return theirs if cell.peer is not None and theirs else sys.executable


def has_package(python: str, package: str) -> bool:
    """Whether that Python can import a package."""
    command = [python, "-c", f"import {package}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run_slice(
    cells: list[Cell], records: Records, *, options: Namespace, after_each: Callable[[], None]
) -> tuple[int, int]:
    """Measure what is left, as far as the minutes go; (cells settled, cells in all)."""
    within = Slice(60.0 * options.minutes, time.monotonic())
    runner = Runner(options, records, within)
    cells = [cell for cell in cells if _can_run(cell, options)]
    left = [cell for cell in cells if not records.is_settled(cell, again=options.again)]
    left.sort(key=lambda cell: records.by_name.get(cell.name, {}).get("status") != "cut")  # those begin
    first = True
    for cell in left:
        if within.left < cell.seconds and not first and not runner.in_here:
            continue  # a shorter one may fit
        if within.left <= 0:
            break
        record = runner.run(cell)
        print(f"{record['status']:8} {record['seconds']:7.1f} s  {cell.name}  {record.get('why', '')}", flush=True)
        after_each()
        first = False
    return sum(records.is_settled(cell, again=False) for cell in cells), len(cells)


_asked: dict[tuple[str, str], bool] = {}


def _can_run(cell: Cell, options: Namespace) -> bool:
    """Peers need their package in the peer's Python, asked once."""
    if cell.peer is None:
        return True
    key = (peer_python(cell, options), cell.peer)
    if key not in _asked:
        _asked[key] = has_package(*key)
    return _asked[key]
