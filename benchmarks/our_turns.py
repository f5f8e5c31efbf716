"""tinyrl's side of the benchmark of turns: rollouts of 8 x 8 episodes, LoRA on with B not zero.

The tool answers from the worker process, as in a run. settings["plainly"]: each turn is sampled anew from the
episode's beginning, as for engines that have no `play`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import peft  # noqa: F401
import torch
import transformers  # noqa: F401

from benchmarks import measuring, our_recipe
from benchmarks.fixed_work import SPEED
from benchmarks.scripted_tool import TURNS
from tinyrl.config.recipe import load_config
from tinyrl.generation.engine import Completion, Request, SampleOptions
from tinyrl.generation.fused import FusedEngine
from tinyrl.generation.turns import EpisodeRunner, Episodes, play_plainly
from tinyrl.models.roles import load_policy
from tinyrl.rollout.components import Options, SamplingParts


class LimitedTurns(Episodes):
    """Episodes in which a turn has a limit of its own, and is answered though it was cut off, as the peer's are."""

    def limit(self, sample: int) -> int:
        return min(SPEED.max_new_tokens, super().limit(sample))

    def ended(self, sample: int, turn: Completion) -> None:
        super().ended(sample, replace(turn, finish_reason="eos"))


def rollout(parts: SamplingParts, *, plainly: bool, step: int) -> list[Completion]:
    """One rollout: whole episodes, as `turns.play` has them."""
    assert isinstance(parts.runner, EpisodeRunner)
    prompts = parts.train_prompts[: SPEED.num_prompts]
    requests = [Request(prompt.tokens, prompt_row=prompt.index) for prompt in prompts]
    options: SampleOptions = {"seed": parts.config.run.seed, "step": step}
    runner = replace(parts.runner, max_new_tokens=TURNS * SPEED.max_new_tokens)
    with LimitedTurns(prompts, requests, SPEED.group_size, runner=runner, seed=options["seed"], step=step) as episodes:
        if plainly:
            play_plainly(requests, SPEED.group_size, engine=parts.engine, episodes=episodes, options=options)
        else:
            assert isinstance(parts.engine, FusedEngine)
            parts.engine.play(requests, SPEED.group_size, episodes=episodes, **options)
        assert all(len(episode.turn_ends) == TURNS and not episode.failure for episode in episodes.episodes)
        return episodes.finalized()


def main() -> None:
    imports, settings = measuring.resident_mb(), measuring.job()
    files = Path(settings["files"])
    config = load_config("grpo", str(our_recipe.write(settings)), overrides=settings["overrides"])
    torch.set_num_threads(settings["threads"])
    parts = SamplingParts(config, options=Options(device="cpu"))
    load_policy(parts.roles, files / "adapter")
    seconds, tokens, read = [], [], []
    for step in range(settings["steps"]):
        start = time.perf_counter()
        completions = rollout(parts, plainly=settings["plainly"], step=step)
        seconds.append(time.perf_counter() - start)
        tokens.append(sum(sum(c.action_mask or []) for c in completions))
        read.append(sum(len(c.tokens) for c in completions) - tokens[-1])
    parts.close()
    measuring.answer(
        settings,
        seconds=seconds[1:],
        tokens=tokens[1:],
        read=read[1:],
        imports_mb=imports,
        peak_mb=measuring.peak_mb(),
    )


if __name__ == "__main__":
    main()
