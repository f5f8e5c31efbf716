"""Speed, memory and learning on a GPU, cell by cell in their order of worth.

A line of cells.jsonl for each cell, written as soon as it is measured: the same command goes on with what is left, and
tries once more what failed. Cells that need a peer or a folder that is not given are left out. table.md has it all.
Run as a script with settings, it measures what is neither a training of ours nor of the peer (`settings["kind"]`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import grpo, measuring, ours, ppo, processes
from benchmarks.tables import markdown, median_phases, spread
from benchmarks.work import SHAPES, Grpo, Shape, prepare, read_rows

NAMES = ["0.5b", "1.5b", "3b", "7b"]
RESULTS = "gpu-results"  # ignored by git
RESERVE_S = 15.0  # of the minutes given, to end in
LENGTHS = (2048, 8192)
SEEDS = 3
PROMPT, TINY_PROMPT = 256, 8  # tokens
KEPT = ("seconds", "tokens", "phases", "peak_gb", "gap", "before", "after", "outcome", "failed")  # of a result
TESTS = ("tests/gpu/test_graphs.py", "tests/gpu/test_sampling.py", "tests/gpu/test_learning.py",
         "tests/gpu/test_training.py", "tests/gpu/test_runs.py")  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One measurement: a name, the section of its table, and the script of its process with its settings."""

    name: str
    section: str
    script: str
    settings: dict[str, Any]
    shape: Shape | None = None
    python: str | None = None


def cells(options: Namespace) -> list[Cell]:
    """All cells that these options allow, in their order of worth."""
    tiny = options.shapes == ["tiny"]
    work = Grpo(num_prompts=2, max_new_tokens=8, group_size=2) if tiny else Grpo(num_prompts=64, max_new_tokens=512)
    common = {"device": "cpu" if tiny else "cuda", "dtype": "float32" if tiny else "bfloat16", "overrides": []}
    names = ["tiny"] if tiny else [name for name in ("1.5b", "0.5b", "3b", "7b") if name in options.shapes]
    repeats, micro_batch, prompt = 2, min(16, work.rows), TINY_PROMPT if tiny else PROMPT

    def of(name: str) -> dict[str, Any]:
        four = name == "7b"
        more = {"overrides": ["model.quantization=4bit"], "quantization": "4bit"} if four else {}
        return {**common, **more, "repeats": repeats}

    def recipe(method: str, files: Path, work: Grpo) -> dict[str, Any]:
        made = {"steps": repeats + 1, "options": Namespace(threads=options.threads)}
        if method == "grpo":
            found = ours.grpo(files, work=work, **made)
        else:
            found = ours.ppo(files, critic="adapter", **made)
            found["ppo"] |= {"num_prompts": work.rows, "minibatch_size": work.rows}
        found["generation"] |= {"max_prompt_tokens": prompt, "max_new_tokens": work.max_new_tokens}
        found["model"]["dtype"] = common["dtype"]
        return found

    files = () if tiny else TESTS
    found = [Cell(f"tests {file}", "tests", "gpu", {"kind": "tests", "words": [file]}) for file in files]
    for name in names:
        shape, files = SHAPES[name], options.out / "work" / name
        for engine in ("fused", "hf", "fused without graphs"):
            settings = {**of(name), "kind": "sample", "engine": engine, "recipe": recipe("grpo", files, work)}
            found.append(Cell(f"sampling {name} {engine}", "sampling", "gpu", settings, shape))
        asked = {"steps": repeats + 1, "seed": 0, "micro_batch": micro_batch}
        by_ppo = {"prompts": work.rows, "new": work.max_new_tokens, "scored": micro_batch}
        peers = {
            "grpo": (options.peer_python, grpo.peer_question(files, work, **asked)),
            "ppo": (options.ppo_peer_python, ppo.peer_question(files, **asked, **by_ppo)),
        }
        for method, (python, question) in peers.items():
            settings = {**of(name), "recipe": recipe(method, files, work)}
            found.append(Cell(f"{method} {name} tinyrl", method, "ours", settings, shape))
            if python:
                found.append(Cell(f"{method} {name} TRL", method, "peer", {**of(name), **question}, shape, python))
    if options.real_model:
        for seed in range(1 if tiny else SEEDS):
            form, steps = (1, 2) if tiny else (8, 12)
            settings = {**common, "kind": "learn", "seed": seed, "form": form, "steps": steps}
            settings["real_model"] = str(options.real_model)
            found.append(Cell(f"real model, seed {seed}", "real", "gpu", settings))
    for new in () if tiny else LENGTHS:
        name, long = names[0], replace(work, num_prompts=8, max_new_tokens=new)
        settings = {**of(name), "recipe": recipe("grpo", options.out / "work" / name, long)}
        found.append(Cell(f"grpo {name} tinyrl, {new} new tokens", "grpo", "ours", settings, SHAPES[name]))
    return [cell for cell in found if not options.only or any(word in cell.name for word in options.only)]


def measure_cell(cell: Cell, options: Namespace, *, timeout: float) -> dict[str, Any]:
    """The record of a cell: its result, or why there is none."""
    python = cell.python or sys.executable
    try:
        if cell.shape is not None:
            tokens, device = TINY_PROMPT if cell.shape.name == "tiny" else PROMPT, cell.settings["device"]
            prepare(cell.shape, options=options, words=(tokens, tokens), device=device, timeout=timeout)
        result = processes.run(cell.script, cell.settings, options=options, python=python, timeout=timeout)
    except processes.Failed as failure:
        return {"cell": cell.name, "status": "failed", "why": f"{failure}: {failure.tail[-500:]}"}
    return {"cell": cell.name, "status": "done", "result": {key: result[key] for key in KEPT if key in result}}


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
    lines = path.read_text().splitlines() if path.is_file() else []
    records = {record["cell"]: record for record in map(json.loads, lines)}  # the last of each cell
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
        record = records[cell.name] = measure_cell(cell, options, timeout=seconds)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        (options.out / "table.md").write_text(table(every, records))
        print(f"{cell.name}: {record['status']} {record.get('why', '')}", flush=True)
    done = sum(records.get(cell.name, {}).get("status") == "done" for cell in every)
    print(f"{done} of {len(every)} cells are done ({options.out / 'table.md'}); the same command goes on with the rest")


# ---- in a process of its own ----


def run_tests(settings: dict[str, Any]) -> dict[str, Any]:
    """`pytest -m gpu` on a file: its last line, and the names of what failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *settings["words"]]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]]
    return {"outcome": lines[-1], "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))]}


def sample(settings: dict[str, Any]) -> dict[str, Any]:
    """Calls of a sampling engine: fused, fused without graphs, or hf; the first call captures graphs."""
    import torch

    from tinyrl.config.recipe import load_config
    from tinyrl.generation.engine import Request
    from tinyrl.generation.engines import select_engine
    from tinyrl.rollout.load import load_policy
    from tinyrl.runs.launched import Options

    name, section = settings["engine"], settings["recipe"]["grpo"]
    overrides = [*settings["overrides"], f"generation.engine={'hf' if name == 'hf' else 'fused'}"]
    config = load_config("grpo", str(ours.write(settings)), overrides=overrides)
    parts = load_policy(config, options=Options(device=settings["device"]))
    longest = config.generation.max_new_tokens
    longest += config.generation.max_prompt_tokens
    engine: Any = select_engine(config.generation, parts, parts.tokenizer, longest=longest, tried=longest)[0]
    if name == "fused without graphs":
        engine.by_graphs = False
    rows = read_rows(Path(settings["recipe"]["task"]["data"]))[: section["num_prompts"]]
    ids: list[Any] = [parts.tokenizer(row["prompt"])["input_ids"] for row in rows]
    requests = [Request(tokens, prompt_row=i) for i, tokens in enumerate(ids)]
    seconds, tokens = [], []
    for number in range(settings["repeats"] + 1):
        start = time.perf_counter()
        groups = engine.sample(requests, section["group_size"], seed=0, step=number)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        tokens.append(sum(len(completion.tokens) for group in groups for completion in group))
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else measuring.peak_mb() / 1e3
    return {"seconds": seconds[1:], "tokens": tokens[1:], "peak_gb": peak}


def learn(settings: dict[str, Any]) -> dict[str, Any]:
    """What GRPO teaches a real model of right sums: SFT for the form, then the recipe, judged as `benchmarks real`."""
    from benchmarks import judge
    from benchmarks.real import FORM, in_folder, recipe_of, write_rendered
    from tinyrl.cli.commands import app
    from tinyrl.tasks import sums

    folder, options = Path(settings["folder"]), Namespace(threads=settings["threads"])
    data, form = folder / "data", folder / "form"
    sums.write(data)

    def trained(recipe: dict[str, Any], model: Path, name: str) -> dict[str, Any]:
        recipe = in_folder(recipe, model.parent, data)
        recipe["model"] |= {"path": str(model), "dtype": settings["dtype"]}
        (folder / name).mkdir(parents=True, exist_ok=True)
        return ours.measure({**settings, "recipe": recipe, "folder": str(folder / name), "overrides": []})

    taught = recipe_of("sft", options=options, **{**FORM, "num_steps": settings["form"]})
    started = trained(taught, Path(settings["real_model"]), "sft")
    words = ["export", started["adapter"], "--merge", "--dtype", "float32", "--output", str(form / "model")]
    if app(words, standalone_mode=False):
        raise SystemExit("the model that was taught the form could not be written")
    write_rendered(form, data, taught["task"]["system_prompt"])
    recipe = recipe_of("grpo", options=options, seed=settings["seed"], num_steps=settings["steps"])
    result = trained(recipe, form / "model", "grpo")
    before, after = judge.held_out(form, None), judge.held_out(form, result["adapter"])
    return {"before": before["exact"], "after": after["exact"], "seconds": result["seconds"]}


if __name__ == "__main__":
    kinds = {"tests": run_tests, "sample": sample, "learn": learn}
    measuring.serve(lambda settings: kinds[settings["kind"]](settings))
