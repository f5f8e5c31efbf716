"""Cells measured one by one within some minutes; each is on disk as soon as it is done, and the next slice goes on.

A cell that its slice has no time left for is tried first in the next one. What failed is tried again, after what was
never tried and at most once a slice; what a whole slice was too short for is not (--again does). What needs a peer or a
folder that is not there is skipped, and measured once it is. cells.jsonl has a line a cell, with the machine: another
GPU begins anew. table.md is written after each.
"""

from __future__ import annotations

import json
import os
import shutil
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
ALIKE = 3  # cells that fail one after the other for one reason: then it is the machine's, and the slice ends
SETTLED = ("done", "too long")


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
    """cells.jsonl of a folder: what came of each cell on each machine. The last line of a name counts, but what is done
    stays done. `by_name`: of `machine`.
    """

    def __init__(self, path: Path, machine: str) -> None:
        self.path, self.machine = path, machine
        self.machines: dict[str, dict[str, dict[str, Any]]] = {machine: {}}
        for line in path.read_text().splitlines() if path.is_file() else []:
            self._take(json.loads(line))

    @property
    def by_name(self) -> dict[str, dict[str, Any]]:
        return self.machines[self.machine]

    def add(self, record: dict[str, Any]) -> None:
        """Append a line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"machine": self.machine, **record}) + "\n")
        self._take({"machine": self.machine, **record})

    def _take(self, record: dict[str, Any]) -> None:
        known = self.machines.setdefault(record["machine"], {})
        before = known.get(record["cell"], {"status": "", "tries": 0})
        if record["status"] == "done" or before["status"] != "done":
            known[record["cell"]] = {**record, "tries": before["tries"] + 1}

    def status(self, cell: Cell) -> str:
        """Of a cell that was never tried: nothing."""
        return self.by_name.get(cell.name, {"status": ""})["status"]

    def left(self, cells: list[Cell], *, again: bool) -> list[Cell]:
        """What is to be tried, in its order: what was cut, then what is new, then what failed, least often first."""
        settled = ("done",) if again else SETTLED
        left = [cell for cell in cells if self.status(cell) not in settled]

        def place(cell: Cell) -> int:
            tries = self.by_name.get(cell.name, {"tries": 0})["tries"]
            return {"cut": -1, "failed": tries, "too long": tries}.get(self.status(cell), 0)

        return sorted(left, key=place)


class Runner:
    """Measures cells: each in a process of its own, or (tiny ones) in this one."""

    def __init__(self, options: Namespace, records: Records, within: Slice) -> None:
        self.options, self.records, self.within = options, records, within
        self.all_in_here = options.shapes == ["tiny"]

    def run(self, cell: Cell) -> dict[str, Any]:
        """The record of a cell, which is on disk too."""
        start, had = time.monotonic(), self.within.left
        files: dict[str, str] = {}
        try:
            if cell.shape is not None:
                files = {"files": str(self.files(cell.shape, cell))}
            if cell.needs is not None:
                files = {cell.needs: str(getattr(self.options, cell.needs))}
            result = self.measure(f"{PACKAGE}.{cell.module}", {**cell.settings, **files}, cell=cell)
            record = {"status": "done", "result": result}
        except processes.Failed as failure:
            cut = failure.too_long and had < FULL * self.within.seconds
            status = "cut" if cut else "too long" if failure.too_long else "failed"
            record = {"status": status, "why": (failure.tail.strip().splitlines() or [str(failure)])[-1][:300]}
        record = {"cell": cell.name, **record, "seconds": round(time.monotonic() - start, 1)}
        self.records.add(record)
        return record

    def measure(self, module: str, settings: dict[str, Any], *, cell: Cell | None = None) -> dict[str, Any]:
        """settings -> result of a module's `measure`, by the Python of the cell."""
        python, before = (sys.executable, []) if cell is None else peer_python(cell, self.options)
        if not self.all_in_here or (cell is not None and (cell.peer is not None or cell.by_itself)):
            question = {**settings, "module": module}
            how: dict[str, Any] = {"python": python, "before": before, "timeout": max(1.0, self.within.left)}
            return processes.attempt("gpu.cell", question, options=self.options, **how)
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


def peer_python(cell: Cell, options: Namespace) -> tuple[str, list[str]]:
    """The Python of a cell and folders of packages that it has in front: for PPO those of another release of the peer,
    if they are named.
    """
    if cell.peer is None:
        return sys.executable, []
    if cell.section == "ppo":
        python, before = options.ppo_peer_python or options.peer_python, options.ppo_peer_path
    else:
        python, before = options.vllm_python if cell.peer == "vllm" else options.peer_python, None
    python = python or sys.executable
    if os.sep in python:  # a process begins in a folder of its own
        python = os.path.abspath(python)
    return python, [before] if before else []


def has_package(python: str, package: str, before: list[str]) -> bool:
    """Whether that Python, if it is there, finds a package."""
    if shutil.which(python) is None:
        return False
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    environment = {**os.environ, "PYTHONPATH": processes.module_path(python, before=before)}
    return subprocess.run([python, "-c", find], env=environment, capture_output=True, check=False).returncode == 0


def run_slice(cells: list[Cell], records: Records, *, options: Namespace, after_each: Callable[[], None]) -> bool:
    """Measure what is left, as far as the minutes go. False where cell after cell failed for one reason."""
    within = Slice(60.0 * options.minutes, time.monotonic())
    runner, alike, first = Runner(options, records, within), list[str](), True
    for cell in records.left(cells, again=options.again):
        missing = why_skipped(cell, options)
        if missing is not None:
            if records.status(cell) != "skipped":
                records.add({"cell": cell.name, "status": "skipped", "why": missing, "seconds": 0.0})
            continue
        if within.left < cell.seconds and not first and not runner.all_in_here:
            continue  # a shorter one may fit
        if within.left <= 0:
            break
        record, first = runner.run(cell), False
        print(f"{record['status']:8} {record['seconds']:7.1f} s  {cell.name}  {record.get('why', '')}", flush=True)
        after_each()
        alike = [*alike, record["why"]] if record["status"] == "failed" else []
        if len(alike) >= ALIKE and len(set(alike[-ALIKE:])) == 1:
            return False
    return True


_asked: dict[tuple[str, str], bool] = {}


def why_skipped(cell: Cell, options: Namespace) -> str | None:
    """What a cell needs and this machine does not have; packages are asked for once."""
    if cell.needs is not None and getattr(options, cell.needs) is None:
        return f"needs --{cell.needs.replace('_', '-')}"
    if cell.peer is None:
        return None
    python, before = peer_python(cell, options)
    key = (os.pathsep.join([python, *before]), cell.peer)
    if key not in _asked:
        _asked[key] = has_package(python, cell.peer, before)
    return None if _asked[key] else f"{cell.peer} is not installed for {Path(python).name}"
