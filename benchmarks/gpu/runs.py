"""What a cell runs in a process of its own: tests, a profile, variants, calls of a sampling engine, a learning run.

(Trainings of ours and of the peer are benchmarks/ours.py and benchmarks/peer.py.)
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import measuring, ours
from benchmarks.work import read_rows


def run_tests(settings: dict[str, Any]) -> dict[str, Any]:
    """`pytest -m gpu` on some files: its last line, and the names of what failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *settings["files"]]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]]
    return {"outcome": lines[-1], "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))]}


def profile(settings: dict[str, Any]) -> dict[str, Any]:
    from benchmarks.gpu import profiling

    return profiling.measure(settings)


def compare(settings: dict[str, Any]) -> dict[str, Any]:
    from benchmarks.gpu import variants

    return variants.measure(settings)


def sample(settings: dict[str, Any]) -> dict[str, Any]:
    """Calls of a sampling engine: fused, hf or plain, with graphs or `without graphs`. The first call captures graphs.
    All completions have the same length. An engine that the run would not choose is wrong.
    """
    import torch

    from benchmarks.gpu.step import load, synchronize
    from tinyrl.generation.engines import select_engine
    from tinyrl.generation.plain import PlainEngine
    from tinyrl.generation.request import Request

    name = settings["engine"]
    kind, _, without_graphs = name.partition(" ")
    section = settings["recipe"]["grpo"]
    is_plain = kind == "plain"
    chosen = [] if is_plain else [f"generation.engine={kind}"]
    policy = load({**settings, "overrides": [*settings["overrides"], *chosen]})
    generation = policy.config.generation
    longest = generation.max_prompt_tokens + generation.max_new_tokens
    engine: Any = None
    if is_plain:
        engine = PlainEngine(policy, policy.tokenizer, generation)
    else:
        engine = select_engine(generation, policy, policy.tokenizer, longest=longest, tried=longest)[0]
    has_graphs = getattr(engine, "by_graphs", False)
    if without_graphs:
        engine.by_graphs = False
    wrong: dict[str, str] = {}
    if engine.name != kind:
        wrong[name] = f"the trial chose {engine.name}"
    elif settings["device"] == "cuda" and settings["graphs"] and not has_graphs:
        wrong[name] = "the trial at the start refused graphs"
    engine = engine.without_ends(generation.max_new_tokens)
    rows = read_rows(Path(settings["recipe"]["task"]["data"]))[: section["num_prompts"]]
    ids: list[Any] = [policy.tokenizer(row["prompt"])["input_ids"] for row in rows]
    seconds = []
    cpu = []
    tokens = []
    for number in range(settings["repeats"] + 1):
        requests = list[Request]()
        for row, prompt in enumerate(ids):
            requests += engine.requests_for(prompt, section["group_size"], row=row, seed=0, step=number)
        start = time.perf_counter()
        cpu_start = time.process_time()
        samples = engine.sample(requests)
        synchronize()
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
        tokens.append(sum(len(sample.response) for sample in samples))
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else measuring.peak_mb() / 1e3
    return {"seconds": seconds[1:], "cpu": cpu[1:], "tokens": tokens[1:], "peak_gb": peak, "wrong": wrong}


def learn(settings: dict[str, Any]) -> dict[str, Any]:
    """What GRPO teaches a real model of right sums: SFT for the form, then the recipe, judged as `benchmarks real`."""
    from benchmarks import judge
    from benchmarks.real import FORM, in_folder, recipe_of, write_rendered
    from tinyrl.cli.commands import app
    from tinyrl.tasks import sums

    folder = Path(settings["folder"])
    options = Namespace(threads=settings["threads"])
    data = folder / "data"
    form = folder / "form"
    sums.write(data)

    def trained(recipe: dict[str, Any], model: Path, name: str) -> dict[str, Any]:
        recipe = in_folder(recipe, model.parent, data)
        recipe["model"] |= {"path": str(model), "dtype": settings["dtype"]}
        (folder / name).mkdir(parents=True, exist_ok=True)
        return ours.measure({**settings, "recipe": recipe, "folder": str(folder / name), "overrides": []})

    form_run = {**FORM, "num_steps": settings["form"], "eval_prompts": settings["judged"]}
    taught = recipe_of("sft", options=options, **form_run)
    started = trained(taught, Path(settings["real_model"]), "sft")
    words = ["export", started["adapter"], "--merge", "--dtype", "float32", "--output", str(form / "model")]
    if app(words, standalone_mode=False):
        raise SystemExit("the model that was taught the form could not be written")
    write_rendered(form, data, taught["task"]["system_prompt"])
    recipe = recipe_of("grpo", options=options, seed=settings["seed"], num_steps=settings["steps"])
    result = trained(recipe, form / "model", "grpo")
    where = {"device": settings["device"], "most": settings["judged"]}
    before = judge.held_out(form, None, **where)
    after = judge.held_out(form, result["adapter"], **where)
    return {"before": before["exact"], "after": after["exact"], "seconds": result["seconds"]}


KINDS = {"tests": run_tests, "profile": profile, "variants": compare, "sample": sample, "learn": learn}


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """The result of a cell. On a CPU no card is seen, and Triton's kernels are interpreted; both are asked for before
    torch and triton are imported.
    """
    if settings.get("device") == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    return KINDS[settings["kind"]](settings)


if __name__ == "__main__":
    measuring.serve(measure)
