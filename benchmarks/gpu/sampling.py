"""Sampling by tinyrl: the fused decoder by graphs, the same without them, or the library's modules.

LoRA is on (its B is zero, which takes the same time); the first call captures graphs and is not counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks import measuring, our_recipe
from benchmarks.fixed_work import texts
from benchmarks.gpu.meter import peak_gb, timed
from benchmarks.gpu.shapes import Work
from benchmarks.gpu.training import recipe_of
from tinyrl.config.recipe import load_config
from tinyrl.generation.engine import Request
from tinyrl.generation.fused import FusedEngine
from tinyrl.generation.select import engine_of
from tinyrl.rollout.components import Options, Parts


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """engine: fused, fused without graphs, or hf."""
    imports, work, name = measuring.resident_mb(), Work(**settings["work"]), settings["engine"]
    recipe = recipe_of("grpo", Path(settings["files"]), work, steps=1, settings=settings)
    overrides = [*settings["overrides"], f"generation.engine={'hf' if name == 'hf' else 'fused'}"]
    config = load_config("grpo", str(our_recipe.write({**settings, "recipe": recipe})), overrides=overrides)
    base = Parts(config, options=Options(device=settings["device"]))
    engine: Any = engine_of(
        config.generation, base.roles, base.tokenizer, stop=[], longest_response=config.generation.max_new_tokens
    )[0]
    if name == "fused without graphs":
        assert isinstance(engine, FusedEngine)
        engine.by_graphs = False
    ids: list[Any] = [base.tokenizer(text)["input_ids"] for text in texts(Path(settings["files"]))[: work.prompts]]
    requests = [Request(tokens, prompt_row=i) for i, tokens in enumerate(ids)]

    def once(number: int) -> int:
        groups = engine.sample(requests, work.group, seed=0, step=number)
        return sum(len(completion.tokens) for group in groups for completion in group)

    device = base.accelerator.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result = timed(once, device, repeats=settings["repeats"])
    kept = getattr(engine, "_kept", None)
    graphs = 0 if kept is None else sum(len(each.graphs) for each in kept.graphs.values())
    return {**result, "graphs": graphs, "max_rows": engine.max_rows, "peak_gb": peak_gb(device, imports)}
