"""`python -m benchmarks gpu`: cells that measure a GPU one by one, in their order of worth.

A line of cells.jsonl for each cell, written as soon as it is measured; table.md has all of them. The same command goes
on with what is left: a cell whose estimate does not fit into the minutes that remain is left for the next call, and
what failed or was wrong is tried again after what is new.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import grpo, ours, ppo, processes
from benchmarks.gpu.table import table
from benchmarks.work import SHAPES, Grpo, Shape, prepare

RESERVE_S = 15.0  # of the minutes given, to end in
KEPT = ("seconds", "tokens", "phases", "peak_gb", "gap", "before", "after", "outcome", "failed", "parts", "rows",
        "wrong", "skipped", "versions")  # of a result  # fmt: skip
QUICK_TESTS = ("tests/gpu/test_graphs.py", "tests/gpu/test_sampling.py", "tests/gpu/test_training.py")
SLOW_TESTS = ("tests/gpu/test_learning.py", "tests/gpu/test_runs.py")


@dataclass(frozen=True)
class Plan:
    """What is measured: a step of so much work in passes of so many tokens, on a device, in a dtype."""

    device: str
    shape: str  # of the cells about one model
    further: tuple[str, ...]  # shapes of trainings
    families: dict[str, float]  # shapes that the library's modules sample, with the minutes of a cell
    work: Grpo
    prompt_tokens: int
    micro_batch_tokens: tuple[int, int]  # of the peer's table; variants are measured at the second
    repeats: int = 2
    form: int = 8  # steps of SFT, then of GRPO, of the real model
    steps: int = 12
    judged: int = 128
    dtype: str = "bfloat16"


ON_A_GPU = Plan(
    device="cuda",
    shape="0.5b",
    further=("1.5b", "3b", "7b"),
    families={"gemma3-1b": 0.9, "qwen3.5-0.8b": 1.2, "qwen3-moe": 1.5},
    work=Grpo(num_prompts=64, group_size=8, max_new_tokens=256),
    prompt_tokens=256,
    micro_batch_tokens=(8_192, 32_768),
)
ON_A_CPU = Plan(
    device="cpu",
    shape="tiny",
    further=(),
    families={"tiny-gemma3": 0.1, "tiny-qwen3.5": 0.1, "tiny-qwen3-moe": 0.1},
    work=Grpo(num_prompts=3, group_size=4, max_new_tokens=8),
    prompt_tokens=8,
    micro_batch_tokens=(48, 96),
    repeats=1,
    form=1,
    steps=2,
    judged=4,
)


@dataclass(frozen=True)
class Cell:
    """One measurement: its name, the section of its table, minutes on an H100 as they were estimated, and the script of
    its process with its settings. shape: whose folder is made first; needs: an option without which it is left out.
    """

    name: str
    section: str
    minutes: float
    script: str
    settings: dict[str, Any]
    shape: Shape | None = None
    python: str | None = None
    needs: str | None = None


def plan_of(options: Namespace) -> Plan:
    return ON_A_CPU if options.shapes == ["tiny"] else ON_A_GPU


def cells(options: Namespace) -> list[Cell]:
    """All cells in their order, those of shapes that were not asked for left out."""
    plan = plan_of(options)
    found = [*first_cells(plan, options), *second_cells(plan, options), *further_cells(plan, options)]
    shapes = [*options.shapes, *plan.families] if plan is ON_A_CPU else options.shapes
    chosen = [cell for cell in found if cell.shape is None or cell.shape.name in shapes]
    return [cell for cell in chosen if not options.only or any(word in cell.name for word in options.only)]


def common(plan: Plan) -> dict[str, Any]:
    return {"device": plan.device, "dtype": plan.dtype, "overrides": [], "repeats": plan.repeats}


def recipe(plan: Plan, options: Namespace, *, method: str, shape: str, work: Grpo) -> dict[str, Any]:
    files = options.out / "work" / shape
    steps = plan.repeats + 1
    if method == "grpo":
        found = ours.grpo(files, steps=steps, options=options, work=work)
    else:
        found = ours.ppo(files, critic="adapter", steps=steps, options=options)
        found["ppo"] |= {"num_prompts": work.rows, "minibatch_size": work.rows}
    found["generation"] |= {"max_prompt_tokens": plan.prompt_tokens, "max_new_tokens": work.max_new_tokens}
    found["model"]["dtype"] = plan.dtype
    return found


def first_cells(plan: Plan, options: Namespace) -> list[Cell]:
    """Is it still right, where does the time go, which variants are kept, does it learn: ten minutes."""
    shape = SHAPES[plan.shape]
    name = plan.shape
    step = common(plan) | {
        "recipe": recipe(plan, options, method="grpo", shape=name, work=plan.work),
        "micro_batch_tokens": plan.micro_batch_tokens[1],
    }

    def variants(kind: str, minutes: float) -> Cell:
        settings = {**step, "kind": "variants", "variants": kind}
        return Cell(f"{kind} {name}", "variants", minutes, "gpu.runs", settings, shape)

    return [
        tests("tests, quick half", QUICK_TESTS, minutes=1.0),
        Cell(f"profile {name}", "profile", 1.5, "gpu.runs", {**step, "kind": "profile"}, shape),
        variants("head", 0.9),
        variants("attention", 1.0),
        variants("pointwise", 1.1),
        variants("decode", 0.8),
        variants("drawing", 0.7),
        real_model(plan, options, seed=0),
    ]


def second_cells(plan: Plan, options: Namespace) -> list[Cell]:
    """The tables of docs/benchmarks.md: beside TRL, larger models, what saves memory."""
    found = []
    for tokens in plan.micro_batch_tokens:
        found += [training(plan, options, plan.shape, 0.9, tokens=tokens), peer(plan, options, 1.5, tokens=tokens)]
    if "1.5b" in plan.further:
        found.append(training(plan, options, "1.5b", 1.7))
    settings = common(plan) | {
        "recipe": recipe(plan, options, method="grpo", shape=plan.shape, work=plan.work),
        "micro_batch_tokens": plan.micro_batch_tokens[1],
        "kind": "variants",
        "variants": "offload",
    }
    found.append(Cell(f"offload {plan.shape}", "variants", 1.0, "gpu.runs", settings, SHAPES[plan.shape]))
    large = "7b" if "7b" in plan.further else plan.shape
    few = replace(plan.work, num_prompts=min(8, plan.work.num_prompts))
    limited = {"overrides": ["model.quantization=4bit"], "quantization": "4bit", "memory_gb": 24}
    if plan.device == "cpu":
        del limited["memory_gb"]
    return [*found, training(plan, options, large, 3.0, work=few, note="in 4 bits, within 24 GB", more=limited)]


def further_cells(plan: Plan, options: Namespace) -> list[Cell]:
    """What there is no answer to yet, for when the others are done."""
    found = [tests("tests, slow half", SLOW_TESTS, minutes=2.5)]
    for engine, minutes in (
        ("fused", 0.7),
        ("hf", 1.0),
        ("fused without graphs", 0.8),
        ("hf without graphs", 1.2),
    ):
        found.append(sampling(plan, options, plan.shape, minutes, engine=engine))
    for shape, minutes in plan.families.items():
        found += family_cells(plan, options, shape, minutes)
    found += [training(plan, options, plan.shape, 2.0, method="ppo"), ppo_peer(plan, options, 4.0)]
    if "3b" in plan.further:
        found.append(training(plan, options, "3b", 2.5))
    if plan.device == "cuda":
        found += [real_model(plan, options, seed=seed) for seed in (1, 2)]
    return found


ON_EXPERTS = "lora.target_parameters=experts"  # beside all-linear, which leaves them out


def family_cells(plan: Plan, options: Namespace, shape: str, minutes: float) -> list[Cell]:
    """Sampling from a model that no decoder of ours knows, and a step of GRPO; of one with experts both also with LoRA
    on these. A model with states runs eagerly.
    """
    has_states = "qwen3.5" in shape
    has_experts = "moe" in shape
    found: list[Cell] = []
    if not has_states:
        found.append(sampling(plan, options, shape, minutes, engine="hf"))
    found.append(sampling(plan, options, shape, minutes, engine="hf without graphs"))
    found.append(sampling(plan, options, shape, minutes, engine="plain"))
    few = replace(plan.work, num_prompts=min(16, plan.work.num_prompts))
    found.append(training(plan, options, shape, 2 * minutes, work=few))
    if has_experts:
        note = "LoRA on experts"
        more = {"overrides": [ON_EXPERTS]}
        found.append(sampling(plan, options, shape, minutes, engine="hf", overrides=[ON_EXPERTS], note=note))
        found.append(training(plan, options, shape, 2 * minutes, work=few, note=note, more=more))
    return found


def sampling(
    plan: Plan,
    options: Namespace,
    shape: str,
    minutes: float,
    *,
    engine: str,
    overrides: Sequence[str] = (),
    note: str | None = None,
) -> Cell:
    """Calls of a sampling engine, which has graphs on a card unless its name says otherwise."""
    settings = common(plan) | {
        "recipe": recipe(plan, options, method="grpo", shape=shape, work=plan.work),
        "kind": "sample",
        "engine": engine,
        "graphs": engine in ("fused", "hf"),
        "overrides": [*overrides],
    }
    name = f"sampling {shape} {engine}"
    if note is not None:
        name += f", {note}"
    return Cell(name, "sampling", minutes, "gpu.runs", settings, SHAPES[shape])


def tests(name: str, files: tuple[str, ...], *, minutes: float) -> Cell:
    return Cell(name, "tests", minutes, "gpu.runs", {"kind": "tests", "files": files})


def real_model(plan: Plan, options: Namespace, *, seed: int) -> Cell:
    settings = common(plan) | {
        "kind": "learn",
        "real_model": str(options.real_model),
        "seed": seed,
        "form": plan.form,
        "steps": plan.steps,
        "judged": plan.judged,
    }
    needs = None if options.real_model else "--real-model"
    return Cell(f"real model, {plan.dtype}, seed {seed}", "real", 1.0, "gpu.runs", settings, needs=needs)


def training(
    plan: Plan,
    options: Namespace,
    shape: str,
    minutes: float,
    *,
    method: str = "grpo",
    tokens: int | None = None,
    work: Grpo | None = None,
    note: str | None = None,
    more: dict[str, Any] | None = None,
) -> Cell:
    """A training of ours. tokens: of a micro-batch (None: auto)."""
    settings = common(plan) | {"recipe": recipe(plan, options, method=method, shape=shape, work=work or plan.work)}
    settings |= more or {}
    name = f"{method} {shape} tinyrl"
    if tokens is not None:
        settings["overrides"] = [*settings["overrides"], f"run.micro_batch_tokens={tokens}"]
        name += f", micro-batches of {tokens:,} tokens"
    if note is not None:
        name += f", {note}"
    return Cell(name, method, minutes, "ours", settings, SHAPES[shape])


def peer(plan: Plan, options: Namespace, minutes: float, *, tokens: int) -> Cell:
    """TRL's GRPO with as many tokens in a micro-batch, padding included."""
    files = options.out / "work" / plan.shape
    rows = min(plan.work.rows, tokens // (plan.prompt_tokens + plan.work.max_new_tokens))
    question = grpo.peer_question(files, plan.work, steps=plan.repeats + 1, seed=0, micro_batch=rows)
    return peer_cell(plan, f"grpo {plan.shape} TRL, micro-batches of {tokens:,} tokens", "grpo", minutes, question,
                     python=options.peer_python, option="--peer-python")  # fmt: skip


def ppo_peer(plan: Plan, options: Namespace, minutes: float) -> Cell:
    files = options.out / "work" / plan.shape
    rows = min(16, plan.work.rows)
    work = {"prompts": plan.work.rows, "new": plan.work.max_new_tokens, "scored": rows}
    question = ppo.peer_question(files, steps=plan.repeats + 1, seed=0, micro_batch=rows, **work)
    return peer_cell(plan, f"ppo {plan.shape} TRL", "ppo", minutes, question,
                     python=options.ppo_peer_python, option="--ppo-peer-python")  # fmt: skip


def peer_cell(
    plan: Plan, name: str, method: str, minutes: float, question: dict[str, Any], *, python: str | None, option: str
) -> Cell:
    needs = None if python else option
    return Cell(name, method, minutes, "peer", {**common(plan), **question}, SHAPES[plan.shape], python, needs)


# ---- running them ----


def measure_cell(cell: Cell, plan: Plan, options: Namespace, *, timeout: float) -> dict[str, Any]:
    """The record of a cell: its result, or why there is none."""
    python = cell.python or sys.executable
    try:
        if cell.shape is not None:
            words = (plan.prompt_tokens, plan.prompt_tokens)
            prepare(
                cell.shape,
                options=options,
                words=words,
                device=plan.device,
                reward_model=cell.section == "ppo",
                timeout=timeout,
            )
        result = processes.run(cell.script, cell.settings, options=options, python=python, timeout=timeout)
    except processes.Failed as failure:
        return {"cell": cell.name, "status": "failed", "why": f"{failure}: {failure.tail[-800:]}"}
    return record_of(cell, result)


def record_of(cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
    """A cell with a variant that is wrong says so, with the gap; its other rows count."""
    kept = {key: result[key] for key in KEPT if key in result}
    record = {"cell": cell.name, "status": "done", "result": kept}
    if result.get("wrong"):
        why = "; ".join(f"{name}: {sentence}" for name, sentence in result["wrong"].items())
        record |= {"status": "wrong", "why": why}
    return record


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """The last record of each cell."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {record["cell"]: record for record in map(json.loads, lines)}


def left_of(every: list[Cell], records: dict[str, dict[str, Any]]) -> list[Cell]:
    """Cells without a result, those that were tried last; without those that lack an option."""
    left = [cell for cell in every if records.get(cell.name, {}).get("status") != "done" and cell.needs is None]
    return sorted(left, key=lambda cell: cell.name in records)


def show(every: list[Cell], records: dict[str, dict[str, Any]]) -> str:
    """A line for each cell that is left, with its minutes, then those that lack an option."""
    left = left_of(every, records)
    lines = [f"{cell.minutes:4.1f} min  {cell.name}" for cell in left]
    lines.append(f"{sum(cell.minutes for cell in left):4.1f} min  in all, as estimated for an H100")
    lines += [f"{cell.minutes:4.1f} min  {cell.name}: needs {cell.needs}" for cell in every if cell.needs is not None]
    return "\n".join(lines)


def main(options: Namespace) -> None:
    import torch

    plan = plan_of(options)
    every = cells(options)
    path = options.out / "cells.jsonl"
    records = read_records(path)
    if options.list:
        print(show(every, records))
        return
    if plan.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device here; --shapes tiny tries all of it out on a CPU", file=sys.stderr)
        raise SystemExit(2)
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * options.minutes - RESERVE_S
    for cell in left_of(every, records):
        seconds = ends - time.monotonic()
        fits = plan.device == "cpu" or 60 * cell.minutes <= seconds
        if seconds <= 0 or not fits:
            print(f"{cell.name}: left for the next call (about {cell.minutes} minutes)", flush=True)
            continue
        start = time.monotonic()
        record = measure_cell(cell, plan, options, timeout=seconds)
        record["minutes"] = round((time.monotonic() - start) / 60, 2)
        records[cell.name] = record
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        (options.out / "table.md").write_text(table(every, records))
        print(f"{cell.name}: {record['status']} in {record['minutes']} min {record.get('why', '')}", flush=True)
    done = sum(records.get(cell.name, {}).get("status") == "done" for cell in every)
    print(f"{done} of {len(every)} cells are done ({options.out / 'table.md'}); the same command goes on with the rest")
