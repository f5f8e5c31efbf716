"""Speed, memory and learning on a GPU, cell by cell in their order of worth.

A line of cells.jsonl for each cell, written as soon as it is measured: the same command goes on with what is left, and
tries once more what failed. Cells that need a peer or a folder that is not given are left out. table.md has it all.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.gpu_shapes import SHAPES, TINY, Work
from benchmarks.sizes import Shape
from benchmarks.tables import markdown, median_phases, spread

NAMES = ["0.5b", "1.5b", "3b", "7b"]
RESULTS = "gpu-results"  # ignored by git
RESERVE_S = 15.0  # of the minutes given, to end in
LENGTHS = (2048, 8192)
SEEDS = 3
TESTS = ("tests/gpu/test_graphs.py", "tests/gpu/test_sampling.py", "tests/gpu/test_learning.py",
         "tests/gpu/test_training.py", "tests/gpu/test_runs.py")  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One measurement: a name, the section of its table, and the settings of its process (gpu_cells.py)."""

    name: str
    section: str
    settings: dict[str, Any]
    shape: Shape | None = None
    python: str | None = None


def cells(options: Namespace) -> list[Cell]:
    """All cells that these options allow, in their order of worth."""
    tiny = options.shapes == ["tiny"]
    work = Work(prompts=2, group=2, prompt=8, new=8) if tiny else Work()
    common = {"device": "cpu" if tiny else "cuda", "dtype": "float32" if tiny else "bfloat16", "repeats": 2}
    shapes = [TINY] if tiny else [SHAPES[name] for name in ("1.5b", "0.5b", "3b", "7b") if name in options.shapes]

    def of(shape: Shape, **more: Any) -> dict[str, Any]:
        four = ["model.quantization=4bit"] if shape.name == "7b" else []
        return {**common, "overrides": four, "quantization": "4bit" if four else None,
                "micro_batch": min(16, work.rows), "work": asdict(work), **more}  # fmt: skip

    found = [] if tiny else [Cell(f"tests {file}", "tests", {"kind": "tests", "words": [file]}) for file in TESTS]
    for shape in shapes:
        for engine in ("fused", "hf", "fused without graphs"):
            settings = of(shape, kind="sample", engine=engine)
            found.append(Cell(f"sampling {shape.name} {engine}", "sampling", settings, shape))
        for method, python in (("grpo", options.peer_python), ("ppo", options.ppo_peer_python)):
            found.append(Cell(f"{method} {shape.name} tinyrl", method, of(shape, kind="train", method=method), shape))
            if python:
                settings = of(shape, kind="peer", method=method)
                found.append(Cell(f"{method} {shape.name} TRL", method, settings, shape, python))
    if options.real_model:
        for seed in range(1 if tiny else SEEDS):
            form, steps = (1, 2) if tiny else (8, 12)
            settings = {**common, "kind": "learn", "seed": seed, "form": form, "steps": steps}
            found.append(Cell(f"real model, seed {seed}", "real", {**settings, "real_model": str(options.real_model)}))
    for new in () if tiny else LENGTHS:
        long = asdict(replace(work, prompts=8, new=new))
        settings = of(shapes[0], kind="train", method="grpo", work=long)
        found.append(Cell(f"grpo {shapes[0].name} tinyrl, {new} new tokens", "grpo", settings, shapes[0]))
    return [cell for cell in found if not options.only or any(word in cell.name for word in options.only)]


def records_of(path: Path) -> dict[str, dict[str, Any]]:
    """The last record of each cell, by name."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {record["cell"]: record for record in map(json.loads, lines)}


def measure(cell: Cell, options: Namespace, *, timeout: float) -> dict[str, Any]:
    """The record of a cell: its result, or why there is none."""
    settings = dict(cell.settings)
    try:
        if cell.shape is not None:
            files = options.out / "work" / cell.shape.name
            if not (files / "done").is_file():
                question = {"files": str(files), "shape": asdict(cell.shape), "device": settings["device"]}
                question |= {"with_reward_model": True, "prompt": settings["work"]["prompt"]}
                processes.attempt("gpu_shapes", question, options=options, timeout=timeout)
            settings["files"] = str(files)
        python = cell.python or sys.executable
        result = processes.attempt("gpu_cells", settings, options=options, python=python, timeout=timeout)
    except processes.Failed as failure:
        return {"cell": cell.name, "status": "failed", "why": f"{failure}: {failure.tail[-500:]}"}
    return {"cell": cell.name, "status": "done", "result": result}


def table(every: list[Cell], records: dict[str, dict[str, Any]]) -> str:
    """Markdown of all results, a section a subject."""

    def done(section: str) -> list[tuple[Cell, dict[str, Any]]]:
        found = [(cell, records.get(cell.name, {})) for cell in every if cell.section == section]
        return [(cell, record["result"]) for cell, record in found if record.get("status") == "done"]

    def speeds(result: dict[str, Any]) -> list[float]:
        return [tokens / seconds for tokens, seconds in zip(result["tokens"], result["seconds"], strict=True)]

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}"

    def phases(result: dict[str, Any]) -> str:
        return ", ".join(f"{name} {part:.2f}" for name, part in median_phases(result["phases"]).items())

    header = ["", "seconds a step", "of them", "peak GB", "sampling gap"]
    parts = {
        "Tests": markdown(["", "outcome", "failed"], [
            [cell.name, result["outcome"], "; ".join(result["failed"])] for cell, result in done("tests")]),
        "Sampling": markdown(["", "tokens a second", "peak GB"], [
            [cell.name, spread(speeds(result), 0), number(result["peak_gb"])] for cell, result in done("sampling")]),
        **{method.upper(): markdown(header, [
            [cell.name, spread(result["seconds"]), phases(result), number(result["peak_gb"]), number(result.get("gap"))]
            for cell, result in done(method)]) for method in ("grpo", "ppo")},
        "A real model": markdown(["", "probability of the right equation, before", "after", "seconds a step"], [
            [cell.name, f"{result['before']:.3f}", f"{result['after']:.3f}", spread(result["seconds"])]
            for cell, result in done("real")]),
        "Without a result": markdown(["", "why"], [
            [cell.name, records.get(cell.name, {}).get("why", "not yet").splitlines()[0]]
            for cell in every if records.get(cell.name, {}).get("status") != "done"]),
    }  # fmt: skip
    return "\n\n".join(f"### {name}\n\n{text}" for name, text in parts.items()) + "\n"


def main(options: Namespace) -> None:
    import torch

    if options.shapes != ["tiny"] and not torch.cuda.is_available() and not options.list:
        print("torch sees no CUDA device here; --shapes tiny tries all of it out on a CPU", file=sys.stderr)
        raise SystemExit(2)
    options.real_model = options.real_model and options.real_model.resolve()
    path, every = options.out / "cells.jsonl", cells(options)
    records = records_of(path)
    left = [cell for cell in every if records.get(cell.name, {}).get("status") != "done"]
    left.sort(key=lambda cell: cell.name in records)  # what failed comes after what is new
    if options.list:
        print("\n".join(cell.name for cell in left))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * options.minutes - RESERVE_S
    for cell in left:
        if (seconds := ends - time.monotonic()) <= 0:
            break
        record = records[cell.name] = measure(cell, options, timeout=seconds)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        (options.out / "table.md").write_text(table(every, records))
        print(f"{cell.name}: {record['status']} {record.get('why', '')}", flush=True)
    done = sum(records.get(cell.name, {}).get("status") == "done" for cell in every)
    print(f"{done} of {len(every)} cells are done ({options.out / 'table.md'}); the same command goes on with the rest")
