"""Engines of tiny models for the tests of this folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.policies import policy_of
from tinyrl.config.sections import GenerationConfig
from tinyrl.generation.cached_engine import CachedEngine
from tinyrl.generation.drawing import sample_keys, uniforms
from tinyrl.generation.engine import SamplingEngine
from tinyrl.generation.plain import PlainEngine
from tinyrl.generation.request import Request
from tinyrl.generation.sample import Sample
from tinyrl.models.batch import examples
from tinyrl.models.loading import load_causal_lm, load_tokenizer
from tinyrl.models.lora import lora_config, wrap_in_lora
from tinyrl.models.policy import Policy

CPU = torch.device("cpu")
PROMPTS = [[20, 21, 22], [30], list(range(40, 52)), [7, 7, 60, 61, 62]]
TEMPLATE = (
    "{{ tools | tojson if tools }}{{ mood }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def make_engine(
    folder: Path,
    name: str = "plain",
    *,
    lora: bool = False,
    reference: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    **options: Any,
) -> Any:
    model = load_causal_lm(str(folder), dtype=dtype)
    if lora:
        torch.manual_seed(0)  # A is drawn: two engines with the same arguments have the same weights
        model = wrap_in_lora(model, lora_config(r=4, alpha=8, dropout=0.0, target_modules="all-linear"))
    settings = GenerationConfig.model_validate({"max_new_tokens": 20} | options)
    tokenizer = load_tokenizer(str(folder))
    policy = policy_of(model, device=device, reference=reference, tokenizer=tokenizer)
    if name == "plain":
        return PlainEngine(policy, tokenizer, settings)
    assert name in ("fused", "hf")
    layout = "merged" if dtype == torch.float32 else "separate_lora"
    return CachedEngine(policy, tokenizer, settings, name=name, layout=layout)


def in_lora(model: Any, **changes: Any) -> Policy:
    config = replace(lora_config(r=4, alpha=8, dropout=0.0, target_modules="all-linear"), **changes)
    return policy_of(wrap_in_lora(model, config))


def requests(
    engine: SamplingEngine, count: int, prompts: list[list[int]] | None = None, **options: Any
) -> list[Request]:
    """So many requests for each prompt."""
    asked = list[Request]()
    for row, prompt in enumerate(prompts or PROMPTS):
        asked += engine.requests_for(prompt, count, **{"row": row, "seed": 0, "step": 0, **options})
    return asked


def sample(engine: SamplingEngine, count: int = 3, **options: Any) -> list[list[Sample]]:
    samples = engine.sample(requests(engine, count, **options))
    return [samples[i : i + count] for i in range(0, len(samples), count)]


@torch.no_grad()
def without_cache(engine: SamplingEngine, count: int) -> list[list[Sample]]:
    """What the engine has to sample, by a pass over each whole text for each token, and none of its code but the
    random numbers.
    """
    groups: list[list[Sample]] = []
    for row, prompt in enumerate(PROMPTS):
        groups.append([])
        for key in sample_keys(0, 0, prompts=np.full(count, row), samples=np.arange(count)):
            tokens: list[int] = []
            logprobs: list[float] = []
            while len(tokens) < engine.settings.max_new_tokens and not engine.eos & {*tokens}:
                with engine.policy.acting("policy") as model:
                    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1]
                probs = (logits.double() / engine.settings.temperature).softmax(-1)
                u = uniforms(np.array([key], dtype=np.uint64), num_tokens=len(tokens) + 1)[0, -1]
                tokens.append(int((probs.cumsum(-1) <= u).sum()))
                logprobs.append(float(probs[tokens[-1]].log()))
            finish = "eos" if tokens[-1] in engine.eos else "length"
            groups[-1].append(Sample(prompt, tokens, [True] * len(tokens), logprobs, row=row, finish=finish))
    return groups


def stir(engine: SamplingEngine, *, by: float = 0.1) -> None:
    """Move the policy's weights, so that a forgotten adapter shows."""
    stir_policy(engine.policy, by=by)


def stir_policy(policy: Policy, *, by: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters["policy"].values():
            parameter.add_((torch.randn(parameter.shape, generator=generator) * by).to(parameter.device))


def scored(engine: SamplingEngine, prompts: list[list[int]], responses: list[list[int]]) -> list[list[float]]:
    """Log-probabilities as a training pass computes them."""
    with torch.no_grad(), engine.policy.acting("policy"):
        batch = engine.policy.batch_of(examples(prompts, responses))
        rows, _ = engine.policy.logprobs("policy", batch, temperature=engine.settings.temperature)
    return [row[: len(response)].tolist() for row, response in zip(rows, responses, strict=True)]


def tokens_of(groups: list[list[Sample]]) -> list[list[list[int]]]:
    return [[sample.response for sample in group] for group in groups]


def assert_same(ours: list[list[Sample]], theirs: list[list[Sample]], *, tolerance: float = 1e-5) -> None:
    """The same tokens for the same reasons, and log-probabilities equal to rounding."""
    assert tokens_of(ours) == tokens_of(theirs)
    for a, b in zip([c for g in ours for c in g], [c for g in theirs for c in g], strict=True):
        assert a.finish == b.finish
        assert a.logprobs == pytest.approx(b.logprobs, abs=tolerance)
