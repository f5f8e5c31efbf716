"""The packed pass of Llama-like decoders (Llama, Qwen2, Qwen3 and their like) through the layers of fused_layers.py.

The library's modules stay as they are: their weights and adapters are read from them at every call. What this does not
know (recomputed layers, dropout, another dtype, adapters that are more than W + B A) is left to the library.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from tinyrl.models.fused_layers import EACH, AfterAttention, Normed, NormedProducts, Rotated
from tinyrl.models.lora_merge import is_plain_lora
from tinyrl.models.packing import Packing, attend

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ACTIVATIONS = ("silu", "swish")  # two names of one function
ROTATION = {  # all that rotary positions have of the usual kinds; Ministral-3 scales queries by position besides
    "rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "low_freq_factor", "high_freq_factor", "short_factor", "long_factor",
}  # fmt: skip


def reads_like_llama(trunk: nn.Module) -> bool:
    """Whether the decoder has the parts of Llama's; whether they compute the same is checked on numbers, of few and of
    early positions.
    """
    layers: Any = getattr(trunk, "layers", None)
    if layers is None or not all(hasattr(trunk, name) for name in ("embed_tokens", "norm", "rotary_emb")):
        return False
    config: Any = trunk.config
    rope: dict[str, Any] = getattr(config.get_text_config(), "rope_parameters", None) or {}
    by_kind = [own for own in rope.values() if isinstance(own, dict)]  # of layers, where these differ
    if not all({*own} <= ROTATION for own in by_kind or [rope]):
        return False
    parts = ("input_layernorm", "post_attention_layernorm", *(f"{_room(name)}.{name}" for name in PROJECTIONS))
    return all(all(_has(layer, part) for part in parts) for layer in layers)


def _room(projection: str) -> str:
    return "self_attn" if projection[0] in "qkvo" else "mlp"


def _has(module: nn.Module, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(module, part):
            return False
        module = getattr(module, part)
    return True


def could_fuse(trunk: nn.Module) -> bool:
    """Whether this file knows the parts of the decoder; whether the numbers agree is for batches.py to compare."""
    if not reads_like_llama(trunk):
        return False
    config: Any = trunk.config.get_text_config()  # pyright: ignore
    plain = all(type(_base(module)) is nn.Linear for layer in trunk.layers for module in _projections(layer))  # pyright: ignore
    return plain and getattr(config, "hidden_act", None) in ACTIVATIONS and hasattr(config, "rms_norm_eps")


def can_fuse_now(trunk: Any) -> bool:
    """Whether nothing is in use that this file leaves to the library."""
    device = trunk.norm.weight.device.type
    if any(torch.is_autocast_enabled(kind) for kind in (("cpu", "cuda") if device == "meta" else (device,))):
        return False
    if getattr(trunk.layers[0], "gradient_checkpointing", False) or any(
        p.dtype != torch.float32 for p in trunk.parameters()
    ):
        return False
    adapted = [m for layer in trunk.layers for m in _projections(layer) if isinstance(m, LoraLayer)]
    return all(is_plain_lora(layer) and not _drops_out(layer) and not layer.merged for layer in adapted)


def _drops_out(layer: LoraLayer) -> bool:
    """Whether an adapter's dropout is on. One of zero is an nn.Identity, whatever mode it is in."""
    return any(isinstance(dropout, nn.Dropout) and dropout.training for dropout in layer.lora_dropout.values())


def fused_states(trunk: Any, ids: Tensor, positions: Tensor, packing: Packing) -> Tensor:
    """Hidden states (N, H) of the packed tokens ids (1, N) at positions (1, N), under the adapter that acts."""
    eps: float = trunk.config.get_text_config().rms_norm_eps
    embedded = trunk.embed_tokens(ids)
    cos, sin = (t[0].unsqueeze(1) for t in trunk.rotary_emb(embedded, positions))
    half = sin.shape[-1] // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
    x = embedded[0]
    for layer in trunk.layers:
        attention, norms = layer.self_attn, (layer.input_layernorm, layer.post_attention_layernorm)
        inputs, scales, rest, rest_scales = _tensors(layer)
        qkv: Any = NormedProducts.apply(x, norms[0].weight, eps, scales, *inputs)
        q, k, v = (t.unflatten(1, (-1, attention.head_dim)) for t in qkv)
        if getattr(attention, "q_norm", None) is not None:  # Qwen3: over each head
            q, k = Normed.apply(q, attention.q_norm.weight, eps), Normed.apply(k, attention.k_norm.weight, eps)
        q, k = Rotated.apply(q, cos, sin), Rotated.apply(k, cos, sin)
        attended = attend(q, k, v, packing, attention.scaling).flatten(1)  # pyright: ignore
        x = AfterAttention.apply(x, attended, norms[1].weight, eps, rest_scales, *rest)
    return Normed.apply(x, trunk.norm.weight, eps)  # pyright: ignore


def _tensors(layer: Any) -> tuple[list[Tensor | None], list[float], list[Tensor | None], list[float]]:
    """Tensors and LoRA's scales, as fused_layers.py takes them: of q, k and v, and of the other projections."""
    tensors: list[Tensor | None] = []
    scales: list[float] = []
    for module in _projections(layer):
        base: Any = _base(module)
        adapter = module._active_adapter[0] if isinstance(module, LoraLayer) and not module._disable_adapters else None
        if adapter is not None and adapter in module.lora_A:
            tensors += [base.weight, base.bias, module.lora_A[adapter].weight, module.lora_B[adapter].weight]
            scales.append(module.scaling[adapter])
        else:
            tensors += [base.weight, base.bias, None, None]
            scales.append(0.0)
    first = 3 * EACH
    return tensors[:first], scales[:3], tensors[first:], scales[3:]


def _projections(layer: Any) -> list[Any]:
    return [getattr(getattr(layer, _room(name)), name) for name in PROJECTIONS]


def _base(module: nn.Module) -> nn.Module:
    return module.get_base_layer() if isinstance(module, LoraLayer) else module
