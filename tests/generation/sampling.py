"""Engines of tiny models for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tinyrl.generation import hf
from tinyrl.generation.decoder import Held
from tinyrl.generation.engine import Completion, Request, SamplingEngine, SamplingSettings
from tinyrl.generation.fused import FusedEngine
from tinyrl.generation.hf import HfEngine
from tinyrl.generation.server import ServerEngine
from tinyrl.generation.slots import Slots
from tinyrl.models.loading import load_causal_lm, load_tokenizer
from tinyrl.models.lora import lora_config, wrap_in_lora
from tinyrl.models.roles import Roles

CPU = torch.device("cpu")
PROMPTS = [[20, 21, 22], [30], list(range(40, 52)), [7, 7, 60, 61, 62]]
LIKE_LLAMA = ("llama", "qwen2", "qwen3")  # what the fused engine samples from
ENGINES = ("hf", "hf-merged", "fused")
Engine = HfEngine | FusedEngine | ServerEngine


def make_engine(
    folder: Path,
    name: str = "hf",
    *,
    lora: bool = False,
    reference: bool = False,
    dtype: torch.dtype = torch.float32,
    base_dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    **options: Any,
) -> Any:
    model = load_causal_lm(str(folder), dtype=base_dtype)
    if lora:
        torch.manual_seed(0)  # A is drawn: two engines with the same arguments have the same weights
        model = wrap_in_lora(model, lora_config(r=4, alpha=8, dropout=0.0, target_modules="all-linear"))
    settings = SamplingSettings(**({"temperature": 1.0, "max_new_tokens": 20} | options))
    roles, tokenizer = Roles(model, device=device, reference=reference), load_tokenizer(str(folder))
    if name == "fused":
        return FusedEngine(roles, tokenizer, settings, dtype=dtype, held=held_in(dtype))
    return HfEngine(roles, tokenizer, settings, merged=name == "hf-merged")


def held_in(dtype: torch.dtype) -> Held:
    return "merged" if dtype == torch.float32 else "apart"


def requests(prompts: list[list[int]] | None = None) -> list[Request]:
    return [Request(prompt, prompt_row=i) for i, prompt in enumerate(prompts or PROMPTS)]


def sample(engine: SamplingEngine, count: int = 3, **options: Any) -> list[list[Completion]]:
    prompts = options.pop("prompts", None)
    options = {"seed": 0, "step": 0, **options}
    return engine.sample(requests(prompts), count, **options)


def stir(engine: Engine, *, by: float = 0.1) -> None:
    """Move the policy's weights, so that a forgotten adapter shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in engine.roles.parameters["policy"].values():
            parameter.add_((torch.randn(parameter.shape, generator=generator) * by).to(parameter.device))


def tokens_of(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.tokens for completion in group] for group in groups]


def assert_same(ours: list[list[Completion]], theirs: list[list[Completion]], *, tolerance: float = 1e-5) -> None:
    """The same tokens for the same reasons, and log-probabilities equal to rounding."""
    assert tokens_of(ours) == tokens_of(theirs)
    for a, b in zip([c for g in ours for c in g], [c for g in theirs for c in g], strict=True):
        assert a.finish_reason == b.finish_reason
        assert a.logprobs == pytest.approx(b.logprobs, abs=tolerance)


def script(monkeypatch: pytest.MonkeyPatch, texts: list[list[int]]) -> None:
    """Make every batch produce these tokens, row by row (a single batch), whatever the model's logits."""
    monkeypatch.setattr(hf, "COMPACT_BELOW", 0.0)
    step = [0]

    def draw(self: Any, logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        token = torch.tensor([text[min(step[0], len(text) - 1)] for text in texts])
        step[0] += 1
        return token, logits.log_softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)

    monkeypatch.setattr(hf.Decoding, "_draw", draw)

    def draw_in_places(self: Slots, logits: Tensor, rows: slice) -> None:
        where = torch.arange(len(self.count))[rows]
        column = self.count[where]
        said = [
            texts[self.sample[p]][min(int(c), len(texts[self.sample[p]]) - 1)]
            for p, c in zip(where, column, strict=True)
        ]
        token = torch.tensor(said)
        self.tokens[where, column] = self.token[where] = token
        self.logprobs[where, column] = logits.log_softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
        self.count[where] += 1

    monkeypatch.setattr(Slots, "_draw", draw_in_places)


def watch(monkeypatch: pytest.MonkeyPatch, before: Callable[[Any], None]) -> None:
    """Call `before` with every batch that is about to be decoded."""
    run = hf.Decoding.run

    def watched(self: Any):
        before(self)
        return run(self)

    monkeypatch.setattr(hf.Decoding, "run", watched)
