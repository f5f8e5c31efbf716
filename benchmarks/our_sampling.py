"""tinyrl's side of the sampling benchmark: one engine's sample() of 8 x 8 completions, LoRA on with B not zero."""

from __future__ import annotations

import time
from pathlib import Path

import peft  # noqa: F401
import torch
import transformers  # noqa: F401

from benchmarks import measuring, our_recipe
from benchmarks.fixed_work import SPEED, texts
from tinyrl.config.recipe import load_config
from tinyrl.generation.engine import Request
from tinyrl.generation.select import engine_of
from tinyrl.models.roles import load_policy
from tinyrl.rollout.components import Options, Parts


def main() -> None:
    imports, settings = measuring.resident_mb(), measuring.job()
    files = Path(settings["files"])
    config = load_config("grpo", str(our_recipe.write(settings)), overrides=settings["overrides"])
    torch.set_num_threads(settings["threads"])
    base = Parts(config, options=Options(device="cpu"))
    load_policy(base.roles, files / "adapter")
    engine, _ = engine_of(
        config.generation,
        base.roles,
        base.tokenizer,
        stop=config.generation.stop,
        longest_response=config.generation.max_new_tokens,
    )
    ids = [base.tokenizer(text)["input_ids"] for text in texts(files)[: SPEED.num_prompts]]
    requests = [Request(tokens, prompt_row=i) for i, tokens in enumerate(ids)]  # pyright: ignore
    seconds, tokens = [], []
    for step in range(settings["steps"]):
        start = time.perf_counter()
        groups = engine.sample(requests, SPEED.group_size, seed=config.run.seed, step=step)
        seconds.append(time.perf_counter() - start)
        tokens.append(sum(len(completion.tokens) for group in groups for completion in group))
    measuring.answer(settings, seconds=seconds[1:], tokens=tokens[1:], imports_mb=imports, peak_mb=measuring.peak_mb())


if __name__ == "__main__":
    main()
