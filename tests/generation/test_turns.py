"""Episodes of the lookup task: every engine and both ways to play give the same, drawn and scored as one sequence."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from tests.faults.lookup_runs import lookup
from tinyrl.environments import Reply
from tinyrl.environments.environment import Environment, Episode
from tinyrl.generation.engine import Completion, Request, sample_keys, uniforms
from tinyrl.generation.turns import EpisodeRunner, play
from tinyrl.rollout.components import Options, SamplingParts

GROUP, SEED, STEP = 8, 3, 2
Played = tuple[list[Completion], list[Episode]]


def make_parts() -> SamplingParts:
    """The lookup model with an adapter that is not zero, the same in every call."""
    parts = SamplingParts(lookup(generation={"engine": "fused"}), options=Options(device="cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parts.roles.parameters["policy"].values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return parts


def episodes_of(parts: SamplingParts, *, num_prompts: int | None = None) -> Played:
    prompts, runner = parts.train_prompts[:num_prompts], parts.runner
    assert isinstance(runner, EpisodeRunner)
    requests = [Request(p.tokens, prompt_row=p.index) for p in prompts]
    return play(prompts, requests, GROUP, engine=parts.engine, runner=runner, seed=SEED, step=STEP)


@pytest.fixture(scope="module")
def fused() -> SamplingParts:
    return make_parts()


@pytest.fixture(scope="module")
def sampled(fused: SamplingParts) -> Played:
    return episodes_of(fused)


def test_when_answers_come_changes_no_bit(fused: SamplingParts) -> None:
    """Which rows are decoded together changes the rounding, so it must not hang on the clock."""
    runner, draw = fused.runner, random.Random(0)
    assert isinstance(runner, EpisodeRunner)
    environment = runner.environment
    assert isinstance(environment, Environment)
    respond = environment._respond
    assert respond is not None

    def late(prompts: list[Any], transcripts: list[Any], **columns: Any) -> list[Any]:
        time.sleep(draw.random() * 0.02)
        return [reply or Reply("found Amy Berg ;") for reply in respond(prompts, transcripts, **columns)]

    environment._respond = late
    try:
        for num_prompts in (1, 2):  # few rows, where each one more is another rounding
            first, *others = [episodes_of(fused, num_prompts=num_prompts)[0] for _ in range(4)]
            assert all([c.logprobs for c in other] == [c.logprobs for c in first] for other in others)
    finally:
        environment._respond = respond


def test_an_episode_is_drawn_and_scored_as_one_sequence(fused: SamplingParts, sampled: Played) -> None:
    """One forward pass of the library over each whole row gives the log-probabilities, and with the random numbers of
    the row's places the tokens; with those of turn 1 again it does not.
    """
    model, prompts = fused.roles.causal, fused.train_prompts
    again = longest = 0
    for row, (completion, episode) in enumerate(zip(*sampled, strict=True)):
        prompt, chosen = prompts[row // GROUP], completion.action_mask
        assert chosen is not None
        with torch.inference_mode(), fused.roles.acting("policy"):
            logits = model(input_ids=torch.tensor([prompt.tokens + completion.tokens])).logits[0]
        logits = logits[len(prompt.tokens) - 1 : -1].float().log_softmax(-1)
        key = sample_keys(SEED, STEP, prompts=np.array([prompt.index]), samples=np.array([row % GROUP]))
        drawn = uniforms(key, num_tokens=len(chosen))[0]
        starts = [0, *(end + 1 for end in episode.turn_ends)]
        for t, (token, ours) in enumerate(zip(completion.tokens, completion.logprobs, strict=True)):
            if not chosen[t]:
                assert ours == 0.0
                continue
            assert ours == pytest.approx(float(logits[t, token]), abs=1e-5)
            assert token_at(logits[t], float(drawn[t])) == token
            if t > episode.turn_ends[0]:
                first = t - next(start for start in reversed(starts) if start <= t)
                again += token_at(logits[t], float(drawn[first])) != token
        longest = max(longest, len(episode.turn_ends))
    assert longest == 3
    assert again > 10


def token_at(logprobs: torch.Tensor, u: float) -> int:
    """The token at a point of the cumulative distribution."""
    return int((logprobs.double().exp().cumsum(0) <= u).sum())


def test_each_episode_has_a_seed_of_its_own(fused: SamplingParts) -> None:
    prompts, runner = fused.train_prompts, fused.runner
    assert isinstance(runner, EpisodeRunner)
    asked: list[int] = []

    def noted(prompts: list[Any], transcripts: list[Any], seed: list[int], **columns: Any) -> list[Reply | None]:
        asked.extend(seed)
        return [Reply(done=True)] * len(prompts)

    assert isinstance(fused.runner, EpisodeRunner)
    environment = fused.runner.environment
    assert isinstance(environment, Environment)
    respond, environment._respond = environment._respond, noted
    try:
        for step in (STEP, STEP, STEP + 1):
            requests = [Request(p.tokens, prompt_row=p.index) for p in prompts]
            play(prompts, requests, GROUP, engine=fused.engine, runner=runner, seed=SEED, step=step)
    finally:
        environment._respond = respond
    batch = len(prompts) * GROUP
    assert len(asked) == 3 * batch
    assert sorted(asked[:batch]) == sorted(asked[batch : 2 * batch])
    assert len(set(asked)) == 2 * batch
