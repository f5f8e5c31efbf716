"""Memory of sampling before there are weights: the engine that a model will have, and what a call of it takes.

The fused engine's own decoder runs on the meta device, a prefill and a token of every row at its last position. The
library's modules are counted by formula: their cache grows by copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinyrl.config.sections import GenerationConfig
from tinyrl.generation.continuous_batching import PREFILL_TOKENS, WIDTH_BUCKET
from tinyrl.generation.decoder import Decoder
from tinyrl.generation.engine import LOOK_EVERY, Completion, SamplingEngine, SamplingSettings
from tinyrl.generation.fused import rows_that_fit
from tinyrl.generation.slots import Slots
from tinyrl.models.loading import POLICY_ADAPTER
from tinyrl.models.lora_merge import adapted_parameter
from tinyrl.models.memory import AsOn, LiveBytes, weight_bytes
from tinyrl.models.outline import META
from tinyrl.models.roles import Roles

MATRICES_OF_LOGITS = 3  # alive at a time in the library's engine: logits, log-probabilities, probabilities


class Unsampled(SamplingEngine):
    """The engine in the place of one that weights would be needed for: it has its name."""

    exact = False

    def __init__(self, name: str) -> None:
        self.name = name

    def sample(self, *_: Any, **__: Any) -> list[list[Completion]]:
        raise AssertionError("models without numbers do not sample")


@dataclass(frozen=True)
class Call:
    """What is sampled at a time: rows wanted, of how many prompts, tokens of the longest, new tokens of a row."""

    rows: int
    prompts: int
    prompt: int
    new: int


@dataclass(frozen=True)
class SamplingBytes:
    """rows: decoded at a time; fit: how many of such rows the cache may hold; bytes by part; in_graphs: of the states
    of one token, which CUDA graphs keep.
    """

    rows: int
    fit: int
    parts: dict[str, int]
    in_graphs: int = 0


@torch.no_grad()
def sampling_bytes(
    roles: Roles,
    config: GenerationConfig,
    call: Call,
    *,
    engine: str,
    dtype: torch.dtype,
    device: torch.device,
    free: int,
) -> SamplingBytes:
    """Of one call of the engine on `device`, of which `free` bytes are free; `roles` have no numbers."""
    if engine == "server":  # its memory is its own
        return SamplingBytes(call.rows, call.rows, {})
    if engine == "fused":
        return _fused(roles, config, call, dtype=dtype, device=device, free=free)
    layers = roles.adapted_layers(POLICY_ADAPTER) if engine == "hf-merged" else []
    copy = weight_bytes(getattr(*adapted_parameter(layer)) for layer in layers)
    text = roles.causal.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layer_cache = 2 * heads * size * roles.causal.dtype.itemsize * (call.prompt + call.new)  # of a row
    cache = call.rows * layer_cache * (text.num_hidden_layers + 1)  # a layer's is there twice while it grows
    logits = MATRICES_OF_LOGITS * call.rows * roles.head("policy").weight.shape[0] * 4
    return SamplingBytes(call.rows, call.rows, {"sampling copy": copy, "cache": cache, "logits of sampling": logits})


def _fused(
    roles: Roles, config: GenerationConfig, call: Call, *, dtype: torch.dtype, device: torch.device, free: int
) -> SamplingBytes:
    columns = call.new + LOOK_EVERY[device.type] - 1
    width = call.prompt + columns
    width = -(-width // WIDTH_BUCKET) * WIDTH_BUCKET if device.type == "cuda" else width
    settings = SamplingSettings(config.temperature, config.max_new_tokens, top_p=config.top_p, top_k=config.top_k)
    with roles.acting("policy") as model, LiveBytes() as live, AsOn(device):
        decoder = Decoder(model, dtype=dtype)
        decoder.sync(roles.adapter_of("policy"))
        copy = live.now
        fit = rows_that_fit(decoder, width, free=max(0, free - copy))
        rows = min(call.rows, fit)
        slots = Slots(decoder, settings, capacity=rows, width=width, columns=columns, greedy=False, device=META)
        cache = weight_bytes([slots.cache.entries])
        prompts = min(rows, call.prompts, max(1, PREFILL_TOKENS[device.type] // call.prompt))
        _prefill(decoder, slots, prompts=prompts, length=call.prompt)
        with LiveBytes() as token:
            slots.advance(rows, width)
    parts = {"sampling copy": copy, "cache": cache, "states of sampling": live.most - copy - cache}
    return SamplingBytes(rows, fit, parts, in_graphs=token.most)


def _prefill(decoder: Decoder, slots: Slots, *, prompts: int, length: int) -> Tensor:
    ids = torch.zeros(prompts, length, dtype=torch.long, device=META)
    lengths = torch.full((prompts,), length, device=META)
    return decoder.prefill(ids, lengths, cache=slots.cache, rows=[range(1)])  # writing a row takes no memory
