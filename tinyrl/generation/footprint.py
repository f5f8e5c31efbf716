"""What sampling takes in memory: how the fused engine holds its weights, and the bytes of one call of an engine.

None of it needs weights, so a plan asks before there are any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinyrl.config.sections import GenerationConfig
from tinyrl.generation.cache import BLOCK, BlockCache, has_kernels
from tinyrl.generation.decoder import Decoder, Held, can_share
from tinyrl.generation.engine import LOOK_EVERY, SamplingSettings
from tinyrl.generation.fused import PREFILL_TOKENS, WIDTH_BUCKET, blocks_that_fit, rows_that_fit
from tinyrl.generation.slots import Slots
from tinyrl.models.device import KEPT_BYTES, resolve_dtype
from tinyrl.models.lora import POLICY_ADAPTER, adapted_parameter
from tinyrl.models.meta import META, AsOn, LiveBytes, weight_bytes
from tinyrl.models.roles import Roles

COPY_SHARE = 0.5  # of the free memory that a copy of the weights may take
UNPACKED_AT_A_TIME = 4  # matrices of a 4-bit base that stand dense: gate and up, and the one that joins them
MATRICES_OF_LOGITS = 3  # alive at a time in the library's engine: logits, log-probabilities, probabilities


def sampling_dtype(config: GenerationConfig, roles: Roles) -> torch.dtype:
    return roles.dtype if config.dtype == "auto" else resolve_dtype(config.dtype, on_cpu=False)


def how_held(roles: Roles, dtype: torch.dtype, *, quantized: bool, free: int) -> Held | None:
    """How the fused engine holds its weights; None where it would need a copy that is too large."""
    if copied_bytes(roles, dtype, quantized=quantized) <= free * COPY_SHARE:
        return "apart" if quantized or dtype != torch.float32 else "merged"
    if quantized:
        return "packed"
    return "apart" if can_share(_base_weights(roles), dtype) else None


def copied_bytes(roles: Roles, dtype: torch.dtype, *, quantized: bool) -> int:
    """Bytes of the weights that the fused engine samples from and that are not the base's own, if there is room."""
    backbone: Any = roles.backbone("policy")
    layers = {id(p) for p in backbone.layers.parameters()}
    shares = dtype != torch.float32 and not quantized
    copied = 0
    for weight in _base_weights(roles):
        own = shares or id(weight) not in layers
        if not (own and can_share([weight], dtype)):
            copied += getattr(weight, "quant_state", weight).shape.numel() * dtype.itemsize
    return copied


def _base_weights(roles: Roles) -> list[Tensor]:
    return [weight for name, weight in roles.causal.named_parameters() if "lora_" not in name]


@dataclass(frozen=True)
class SamplingBytes:
    """rows: decoded at a time; fit: how many of such rows the cache may hold to their end; bytes by part; in_graphs:
    those that CUDA graphs hold from then on; blocks: of a cache in blocks, how many and of how many tokens.
    """

    rows: int
    fit: int
    parts: dict[str, int]
    in_graphs: int = 0
    blocks: tuple[int, int] | None = None

    def kept(self, device: torch.device) -> int:
        """What is still there while weights are updated. On a CPU the C library keeps what is freed, in pieces that
        nothing else fits.
        """
        return min(sum(self.parts.values()), KEPT_BYTES) if device.type == "cpu" else self.in_graphs


def _library_bytes(roles: Roles, engine: str, rows: int, tokens: int) -> dict[str, int]:
    """Of the library's modules, by formula: their cache grows by copies."""
    layers = roles.adapted_layers(POLICY_ADAPTER) if engine == "hf-merged" else []
    copy = weight_bytes(getattr(*adapted_parameter(layer)) for layer in layers)
    text = roles.causal.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layer_cache = 2 * heads * size * roles.causal.dtype.itemsize * tokens  # of a row
    cache = rows * layer_cache * (text.num_hidden_layers + 1)  # a layer's is there twice while it grows
    logits = MATRICES_OF_LOGITS * rows * roles.head("policy").weight.shape[0] * 4
    return {"sampling copy": copy, "cache": cache, "logits of sampling": logits}


@torch.no_grad()
def sampling_bytes(
    roles: Roles,
    config: GenerationConfig,
    *,
    engine: str,
    rows: int,
    prompts: int,
    prompt_tokens: int,
    new_tokens: int,
    device: torch.device,
    free: int,
    quantized: bool = False,
) -> SamplingBytes:
    """Of one call of the engine on `device`, of which `free` bytes are free, before there are weights: the fused
    engine's decoder runs on the meta device, a prefill and a token of every row at its last position. A server's memory
    is its own.

    rows: wanted at a time, of so many prompts; prompt_tokens: of the longest; new_tokens: of a row.
    """
    if engine == "server":
        return SamplingBytes(rows, rows, {})
    if engine != "fused":
        return SamplingBytes(rows, rows, _library_bytes(roles, engine, rows, prompt_tokens + new_tokens))
    columns = new_tokens + LOOK_EVERY[device.type] - 1
    width = prompt_tokens + columns
    width = -(-width // WIDTH_BUCKET) * WIDTH_BUCKET if device.type == "cuda" else width
    settings = SamplingSettings(config.temperature, config.max_new_tokens, top_p=config.top_p, top_k=config.top_k)
    dtype = sampling_dtype(config, roles)
    held = how_held(roles, dtype, quantized=quantized, free=free)
    assert held is not None, "else it is another engine"
    # The base without numbers is a dense one, of the shapes that its 4 bits stand for.
    dense = copied_bytes(roles, dtype, quantized=True) if quantized and held == "apart" else 0
    unpacked = max(p.numel() for p in roles.backbone("policy").parameters()) * dtype.itemsize if held == "packed" else 0
    with roles.acting("policy") as model:
        decoder = Decoder(model, dtype=dtype, held="apart" if quantized else held)
    with roles.acting("policy"), LiveBytes() as live, AsOn(device):
        decoder.sync(roles.adapter_of("policy"))
        copy = live.now + dense
        left, blocks = max(0, free - copy), None
        fit = rows_that_fit(decoder, width, free=left)
        if has_kernels(device):
            count = blocks_that_fit(decoder, rows, width, free=left, block=BLOCK)
            rows, blocks = min(rows, count), (count, BLOCK)
        else:
            rows = min(rows, fit)
        shape = {"capacity": rows, "width": width, "columns": columns, "blocks": blocks}
        slots = Slots(decoder, settings, **shape, greedy=False, device=META)
        cache = weight_bytes([slots.cache.entries])
        prompts = min(rows, prompts, max(1, PREFILL_TOKENS[device.type] // prompt_tokens))
        ids = torch.zeros(prompts, prompt_tokens, dtype=torch.long, device=META)
        lengths = torch.full((prompts,), prompt_tokens, device=META)
        if isinstance(slots.cache, BlockCache):
            slots.cache.claim([range(1)], [prompt_tokens])
        decoder.prefill(ids, lengths, cache=slots.cache, rows=[range(1)])  # writing a row takes no memory
        with LiveBytes() as token:
            slots.advance(rows, width)
    states = live.most + dense - copy - cache + UNPACKED_AT_A_TIME * unpacked
    parts = {"sampling copy": copy, "cache": cache, "states of sampling": states}
    return SamplingBytes(rows, fit, parts, in_graphs=copy + cache + token.most, blocks=blocks)
