"""Every sampling engine on a real model, whose logits are sharp: greedy tokens and log-probabilities in both dtypes."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import running
from tinyrl.config.sections import GenerationConfig
from tinyrl.generation.cached_engine import CachedEngine
from tinyrl.generation.engines import select_engine
from tinyrl.generation.plain import PlainEngine
from tinyrl.generation.request import Request
from tinyrl.generation.sample import Sample
from tinyrl.process.launched import Options
from tinyrl.rollout.collect import Collector
from tinyrl.rollout.load import load_collector
from tinyrl.rollout.prepared import prepare

pytestmark = pytest.mark.real

ENGINES = ("plain", "hf", "fused")
SETTINGS = GenerationConfig(max_new_tokens=12)
LONGEST = 512
WORST = 1.5  # times the error of the library in bfloat16


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def parts(real: Path, request: pytest.FixtureRequest) -> Iterator[Collector]:
    """A policy whose adapter has moved."""
    task = {"name": "sums"}
    made = load_collector(
        prepare(running.config("grpo", real, model={"dtype": request.param}, task=task, generation={"engine": "hf"})),
        options=Options(device="cpu"),
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.policy.parameters["policy"].values():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 1e-3)
    yield made
    made.close()


def engine(parts: Collector, name: Any) -> Any:
    given = (parts.policy, parts.policy.tokenizer, SETTINGS)
    layout = "merged" if parts.policy.dtype == torch.float32 else "separate_lora"
    return PlainEngine(*given) if name == "plain" else CachedEngine(*given, name=name, layout=layout)


def greedy(parts: Collector, name: str) -> list[Sample]:
    made = engine(parts, name)
    asked = list[Request]()
    for row, prompt in enumerate(parts.train_prompts[:3]):
        asked += made.requests_for(prompt.tokens, 1, row=row, seed=0, step=0, greedy=True)
    return made.sample(asked)


@torch.no_grad()
def in_float32(parts: Collector, said: list[Sample]) -> list[Tensor]:
    """Log-probabilities of completions by the library, in float32."""
    out = []
    with parts.policy.acting("policy") as model:
        model = deepcopy(model).float()
        for prompt, one in zip(parts.train_prompts, said, strict=False):
            ids = torch.tensor([prompt.tokens + one.response])
            logits = model(input_ids=ids).logits[0, len(prompt.tokens) - 1 : -1]
            out.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt.tokens) :, None]).squeeze(1))
    return out


def gaps(parts: Collector, said: list[Sample]) -> Tensor:
    """Distance of each token from a float32 pass, in nats."""
    exact = torch.cat(in_float32(parts, said))
    return (torch.tensor([p for one in said for p in one.logprobs]) - exact).abs()


def test_every_engine_says_what_the_library_says(parts: Collector):
    """To rounding in float32, so that nothing is scored again; in bfloat16 each is on average about as far from float32
    as the library itself.
    """
    said = {name: greedy(parts, name) for name in ENGINES}
    library = gaps(parts, said["plain"]).mean()
    if parts.policy.causal.dtype == torch.float32:
        assert all([c.response for c in one] == [c.response for c in said["plain"]] for one in said.values())
        assert all(gaps(parts, one).max() < 1e-4 for one in said.values())
    else:
        assert all(gaps(parts, said[name]).mean() < WORST * library + 0.01 for name in ("hf", "fused"))


def test_the_fused_engine_is_chosen(parts: Collector):
    """For the longest sequences that runs have by default."""
    chosen, why = select_engine(SETTINGS, parts.policy, parts.policy.tokenizer, longest=LONGEST)
    assert chosen.name == "fused", why
