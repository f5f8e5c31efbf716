"""Steps of `tinyrl train grpo|ppo` in this process: seconds, phases, memory beside its plan, bfloat16's mismatch."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from benchmarks import our_recipe, our_training
from benchmarks.fixed_work import Grpo
from benchmarks.gpu.shapes import Work
from tinyrl.models.device import peak_memory_gb

KEPT = ("policy/sampling_gap", "policy/capped_weights", "memory/peak_gb")


def recipe_of(method: str, files: Path, work: Work, *, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The benchmarks' recipe of a method for this work."""
    options = Namespace(threads=settings["threads"])
    grpo = Grpo(num_prompts=work.prompts, group_size=work.group, max_new_tokens=work.new)
    if method == "grpo":
        recipe = our_recipe.grpo(files, steps=steps, options=options, work=grpo)
    else:
        recipe = our_recipe.ppo(files, critic="adapter", steps=steps, options=options, seed=0)
        recipe["ppo"] |= {"num_prompts": work.rows, "minibatch_size": work.rows}
    recipe["generation"] |= {"max_new_tokens": work.new, "max_prompt_tokens": work.prompt}
    recipe["model"]["dtype"] = settings["dtype"]
    return recipe


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """method: grpo or ppo (critic and reward model on the same base, four epochs)."""
    files, work = Path(settings["files"]), Work(**settings["work"])
    recipe = recipe_of(settings["method"], files, work, steps=settings["repeats"] + 1, settings=settings)
    result = our_training.measure({**settings, "recipe": recipe})
    lines = result.pop("lines")[1:]
    means = {key: [line[key] for line in lines if key in line] for key in KEPT}
    means = {key: sum(values) / len(values) for key, values in means.items() if values}
    on_gpu = settings["device"] == "cuda"
    peak = means["memory/peak_gb"] if on_gpu else (result["peak_mb"] - result["imports_mb"]) / 1e3
    return {
        "seconds": result["seconds"],
        "tokens": result["tokens"],
        "phases": result["phases"],
        "peak_gb": peak,
        "planned_gb": result["planned_gb"],
        "measured_gb": peak_memory_gb(torch.device(settings["device"])),
        **means,
    }
