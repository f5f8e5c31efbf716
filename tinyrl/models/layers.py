"""Layers of Llama-like decoders (Llama, Qwen2, Qwen3) for packed training passes, with derivatives by hand.

The library's layers save a dozen tensors as wide as the feed-forward block; here norms are recomputed in backward.
Tokens are flat: x (N, H). Dropout and adapters that are more than W + B A are left to the library (checks.py). Where
layers are recomputed, or nothing is to be kept, the feed-forward block goes through the tokens tile by tile.

Under autocast the operands of products are in half precision. The residual stream has the dtype of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import silu

from tinyrl.models.autograd import once_differentiable
from tinyrl.models.batch import Batch
from tinyrl.models.device import HALVES, MICRO_BATCH_TOKENS, autocast_dtype
from tinyrl.models.linears import (
    Linear,
    Tensors,
    joined_a,
    linears,
    linears_backward,
    linears_of,
    product,
    residual_linear,
    tensors_of,
)
from tinyrl.models.lora import is_plain_lora
from tinyrl.models.norms import Norm, Rope, rms_norm, rms_norm_backward, upcast
from tinyrl.models.packing import Packing, attend

PROJECTIONS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
NORMS = ("q_norm", "k_norm")  # of heads, in Qwen3
ROTATION = {  # fields of the usual rotary positions; Ministral-3 has more, and scales late queries by position
    "rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "low_freq_factor", "high_freq_factor", "short_factor", "long_factor",
}  # fmt: skip


# ---- a layer: before and after attention ----


class NormedLinears(torch.autograd.Function):
    """Linear layers of the RMS norm of x, computed in a dtype: apply(x, norm weight, eps, dtype, scales, *tensors of
    the layers) -> one (N, out) for each.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, scales: Sequence[float], *tensors: Tensor | None
    ):
        h, r = rms_norm(x, weight, eps, dtype=dtype)
        outputs, low = linears(h, linears_of(tensors, scales))
        ctx.save_for_backward(x, r, weight, low, *tensors)
        ctx.dtype = dtype
        ctx.scales = scales
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        x, r, weight, low, *tensors = ctx.saved_tensors
        needs_x, needs_weight, _, _, _, *needed = ctx.needs_input_grad
        layers = linears_of(tensors, ctx.scales, needed)
        h = torch.mul(x, r).mul_(weight).to(ctx.dtype)
        needs_h = needs_x or needs_weight  # not in the first layer of a frozen base
        dh, found = linears_backward(grads, h, low, layers, needs_h=needs_h)
        dx = dw = None
        if dh is not None:
            dx, dw = rms_norm_backward(dh, x, r, weight, needs_weight=needs_weight)
        return dx, dw, None, None, None, *found


class AfterAttention(torch.autograd.Function):
    """The rest of a layer: apply(x, attended, norm weight, eps, scales, *tensors of out, gate, up, down) -> y (N, H):

    z = x + out(attended)        y = z + down(silu(gate(h)) * up(h)),  h = RMS norm of z
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, attended: Tensor, weight: Tensor, eps: float, scales: Sequence[float], *tensors: Tensor | None
    ):
        to_out, to_gate, to_up, to_down = linears_of(tensors, scales)
        z, low_out = residual_linear(x, attended, to_out)
        h, r = rms_norm(z, weight, eps, dtype=attended.dtype)
        (gate, up), low = linears(h, [to_gate, to_up])
        y, low_down = residual_linear(z, silu(gate).mul_(up), to_down)
        ctx.save_for_backward(attended, z, r, weight, gate, up, low_out, low, low_down, *tensors)
        ctx.scales = scales
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        attended, z, r, weight, gate, up, low_out, low, low_down, *tensors = ctx.saved_tensors
        _, _, needs_weight, _, _, *needed = ctx.needs_input_grad
        to_out, to_gate, to_up, to_down = linears_of(tensors, ctx.scales, needed)
        block = FeedForward(weight, to_gate, to_up, to_down, needs_weight=needs_weight)
        inside = Inside(r=r, gate=gate, up=up, low=low, low_down=low_down)
        found = feed_forward_backward(dy, z, inside, block)
        d_attended, of_out = linears_backward([found.z.to(attended.dtype)], attended, low_out, [to_out])
        return found.z, d_attended, found.weight, None, None, *of_out, *found.tensors


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward block: its norm's weight, and whether its gradient is needed; its linear layers."""

    weight: Tensor
    gate: Linear
    up: Linear
    down: Linear
    needs_weight: bool


@dataclass(frozen=True)
class Inside:
    """What a feed-forward block has computed between z and y: r = 1 / rms of z, the outputs of gate and up, and A h of
    these two and of down.
    """

    r: Tensor
    gate: Tensor
    up: Tensor
    low: Tensor | None
    low_down: Tensor | None


@dataclass(frozen=True)
class FeedForwardGradients:
    """Gradients of z, of the norm's weight, and of the tensors of gate, up and down in a row."""

    z: Tensor
    weight: Tensor | None
    tensors: list[Tensor | None]


def feed_forward_backward(dy: Tensor, z: Tensor, inside: Inside, block: FeedForward) -> FeedForwardGradients:
    """Compute the gradients of a feed-forward block."""
    dtype = inside.gate.dtype
    active = silu(inside.gate)
    dm, of_down = linears_backward([dy.to(dtype)], active * inside.up, inside.low_down, [block.down])
    assert dm is not None
    d_up = active.mul_(dm)
    d_gate = torch.ops.aten.silu_backward(dm.mul_(inside.up), inside.gate)
    h = torch.mul(z, inside.r).mul_(block.weight).to(dtype)
    dh, of_inputs = linears_backward([d_gate, d_up], h, inside.low, [block.gate, block.up])
    assert dh is not None
    dz, dw = rms_norm_backward(dh, z, inside.r, block.weight, needs_weight=block.needs_weight, residual=dy)
    return FeedForwardGradients(dz, dw, [*of_inputs, *of_down])


# ---- the decoder ----


class Gain(Protocol):
    """A norm, as far as it is read here."""

    weight: Tensor


class Attention(Protocol):
    """The attention of a layer; Qwen3's has `q_norm` and `k_norm` as well."""

    head_dim: int
    scaling: float


class DecoderLayer(Protocol):
    """A layer of a decoder built like Llama's. Its projections are found by their names."""

    self_attn: Attention
    input_layernorm: Gain
    post_attention_layernorm: Gain

    def get_submodule(self, target: str) -> nn.Module: ...


class Projections(NamedTuple):
    """The linear layers of a decoder's layer, under the acting adapter, in the order of PROJECTIONS."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear
    gate: Linear
    up: Linear
    down: Linear

    @property
    def scales(self) -> list[float]:
        return [linear.scale for linear in self]


def reads_like_llama(backbone: Any) -> bool:
    """Return whether the decoder has the parts of Llama's; checks.py compares their numbers, at early positions."""
    if not all(hasattr(backbone, name) for name in ("layers", "embed_tokens", "norm", "rotary_emb")):
        return False
    rope: dict[str, Any] = getattr(backbone.config.get_text_config(), "rope_parameters", None) or {}
    by_kind = [own for own in rope.values() if isinstance(own, dict)]  # where layers differ
    parts = {"input_layernorm", "post_attention_layernorm", *PROJECTIONS}
    return all({*own} <= ROTATION for own in by_kind or [rope]) and all(
        parts <= {name for name, _ in layer.named_modules()} for layer in backbone.layers
    )


def has_known_parts(backbone: Any) -> bool:
    """Return whether every part of the decoder is of a kind that this file computes."""
    config: Any = backbone.config.get_text_config()
    return (
        reads_like_llama(backbone)
        and all(type(_base(module)) is nn.Linear for layer in backbone.layers for module in _projections(layer))
        and getattr(config, "hidden_act", None) in ("silu", "swish")
        and hasattr(config, "rms_norm_eps")
    )


def can_run_now(backbone: Any) -> bool:
    """Return whether weights are in float32 or autocast's dtype, and adapters W + B A, unmerged, without dropout."""
    low = autocast_dtype(backbone.norm.weight.device.type)
    if not {p.dtype for p in backbone.parameters()} <= {torch.float32, low} or low not in (None, *HALVES):
        return False
    adapted = [m for layer in backbone.layers for m in _projections(layer) if isinstance(m, LoraLayer)]
    dropouts = [d for layer in adapted for d in layer.lora_dropout.values()]  # one of zero is an nn.Identity
    drops_out = any(isinstance(dropout, nn.Dropout) and dropout.training for dropout in dropouts)
    return not drops_out and all(is_plain_lora(layer) and not layer.merged for layer in adapted)


def recomputes(backbone: Any) -> bool:
    """Return whether the decoder's layers are recomputed in backward (gradient checkpointing) now."""
    layers = getattr(backbone, "layers", None)
    return bool(layers) and getattr(layers[0], "gradient_checkpointing", False)


def fused_states(backbone: Any, batch: Batch) -> Tensor:
    """Compute the hidden states (N, H) of a packed batch under the acting adapter."""
    assert batch.packing is not None
    kind = backbone.norm.weight.device.type
    dtype = autocast_dtype(kind) or torch.float32
    eps: float = backbone.config.get_text_config().rms_norm_eps
    x = backbone.embed_tokens(batch.input_ids)[0]
    with torch.autocast(kind, enabled=False):
        cos, sin = (t[0].unsqueeze(1) for t in backbone.rotary_emb(upcast(x[:, :1]), batch.position_ids))
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        shared = Shared(cos, sin, batch.packing, eps, dtype)
        run = _lean_layer if recomputes(backbone) or not torch.is_grad_enabled() else _layer
        for layer in backbone.layers:
            x = run(x, layer, shared)
        return Norm.apply(x, backbone.norm.weight, eps)


@dataclass(frozen=True)
class Shared:
    """What all layers of a pass read: cos and sin (N, 1, d) of the rotation, and how tokens attend; the norms' eps, and
    the dtype of products.
    """

    cos: Tensor
    sin: Tensor
    packing: Packing
    eps: float
    dtype: torch.dtype


def _layer(x: Tensor, layer: DecoderLayer, shared: Shared) -> Tensor:
    own = _projections_of(layer)
    attended = _attended(x, layer, shared, [own.q, own.k, own.v])
    after = [own.out, own.gate, own.up, own.down]
    scales = [linear.scale for linear in after]
    weight = layer.post_attention_layernorm.weight
    return AfterAttention.apply(x, attended, weight, shared.eps, scales, *tensors_of(after))


def _attended(x: Tensor, layer: DecoderLayer, shared: Shared, projections: Sequence[Linear]) -> Tensor:
    """Return what the tokens attend to, (N, heads d), before the layer's output projection; projections: q, k, v."""
    attention = layer.self_attn
    eps = shared.eps
    weight = layer.input_layernorm.weight
    scales = [linear.scale for linear in projections]
    qkv: tuple[Tensor, ...] = NormedLinears.apply(x, weight, eps, shared.dtype, scales, *tensors_of(projections))
    q, k, v = (t.unflatten(1, (-1, attention.head_dim)) for t in qkv)
    q_norm: Gain | None = getattr(attention, "q_norm", None)
    k_norm: Gain | None = getattr(attention, "k_norm", None)
    if q_norm is not None and k_norm is not None:  # Qwen3: over each head
        q = Norm.apply(q, q_norm.weight, eps)
        k = Norm.apply(k, k_norm.weight, eps)
    rotated_q: Tensor = Rope.apply(q, shared.cos, shared.sin)
    rotated_k: Tensor = Rope.apply(k, shared.cos, shared.sin)
    return attend(rotated_q, rotated_k, v, shared.packing, attention.scaling).flatten(1)


# ---- a layer that keeps its input alone ----


def _lean_layer(x: Tensor, layer: DecoderLayer, shared: Shared) -> Tensor:
    """Compute `_layer`; backward, if there will be one, computes it again from x."""
    own = _projections_of(layer)
    norms = [m.weight for name in NORMS if (m := getattr(layer.self_attn, name, None)) is not None]
    before = [*tensors_of([own.q, own.k, own.v]), *norms, layer.input_layernorm.weight]
    after = [layer.post_attention_layernorm.weight, *tensors_of([own.out, own.gate, own.up, own.down])]
    return LeanLayer.apply(x, layer, shared, own.scales, len(before), *before, *after)


class LeanLayer(torch.autograd.Function):
    """A layer that keeps x alone: apply(x, layer, shared, scales, count, *before, *after) -> y.

    before, `count` of them: tensors of q, k and v, weights of the norms up to attention; after: the weight of the norm
    behind it, tensors of out, gate, up and down. The feed-forward block goes through the tokens tile by tile, so of a
    long text nothing is as wide as that block. Backward computes attention again, and in each tile what the block has
    inside, but not y.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        layer: DecoderLayer,
        shared: Shared,
        scales: Sequence[float],
        count: int,
        *parameters: Tensor | None,
    ):
        weight, *of_after = parameters[count:]
        assert weight is not None
        projections = linears_of(parameters, scales[:3])
        out, gate, up, down = linears_of(of_after, scales[3:])
        y, _ = residual_linear(x, _attended(x, layer, shared, projections), out)
        for tile in _tiles(y):
            z = y[tile]
            h, _ = rms_norm(z, weight, shared.eps, dtype=shared.dtype)
            (gated, raised), _ = linears(h, [gate, up])
            y[tile], _ = residual_linear(z, silu(gated).mul_(raised), down)
        ctx.save_for_backward(x)
        ctx.layer = layer
        ctx.shared = shared
        ctx.scales = scales
        ctx.count = count
        ctx.parameters = parameters  # not saved: hooks that move inputs of layers would move weights
        ctx.versions = _versions(parameters)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        parameters = ctx.parameters
        if _versions(parameters) != ctx.versions:
            raise RuntimeError("a weight of a recomputed layer was modified by an inplace operation before backward")
        before = parameters[: ctx.count]
        weight, *of_after = parameters[ctx.count :]
        needed = [tensor is not None and tensor.requires_grad for tensor in of_after]
        projections = linears_of(before, ctx.scales[:3])
        out, gate, up, down = linears_of(of_after, ctx.scales[3:], needed)
        leaf = x.detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad():
            attended = _attended(leaf, ctx.layer, ctx.shared, projections)
        z, low_out = residual_linear(x, attended.detach(), out)
        block = FeedForward(weight, gate, up, down, needs_weight=weight.requires_grad)
        found = _tiled_backward(dy, z, block, ctx.shared)
        d_attended, of_out = linears_backward(
            [found.z.to(attended.dtype)], attended.detach(), low_out, [out], needs_h=attended.requires_grad
        )
        del z
        wanted = [tensor is not None and tensor.requires_grad for tensor in (leaf, *before)]
        gradients: Iterator[Tensor] = iter(())
        if attended.requires_grad:
            inputs = [tensor for tensor, needs in zip((leaf, *before), wanted, strict=True) if needs]
            gradients = iter(torch.autograd.grad(attended, inputs, d_attended))
        dx, *of_before = [next(gradients) if needs else None for needs in wanted]
        if dx is not None:
            dx.add_(found.z)
        return dx, None, None, None, None, *of_before, found.weight, *of_out, *found.tensors


def _versions(tensors: Tensors) -> list[int]:
    """Return how often each tensor was changed."""
    return [tensor._version for tensor in tensors if tensor is not None]


def _tiled_backward(dy: Tensor, z: Tensor, block: FeedForward, shared: Shared) -> FeedForwardGradients:
    """Compute `feed_forward_backward` tile by tile; each tile computes again what the block has inside."""
    dz = torch.empty_like(z)
    total: list[Tensor | None] = []
    for tile in _tiles(z):
        h, r = rms_norm(z[tile], block.weight, shared.eps, dtype=shared.dtype)
        (gate, up), low = linears(h, [block.gate, block.up])
        down = joined_a([block.down], h.dtype)
        low_down = None if down is None else product(silu(gate).mul_(up), down.t())
        inside = Inside(r=r, gate=gate, up=up, low=low, low_down=low_down)
        of_tile = feed_forward_backward(dy[tile], z[tile], inside, block)
        dz[tile] = of_tile.z
        found = [of_tile.weight, *of_tile.tensors]
        if not total:
            total = found
            continue
        for of_all, more in zip(total, found, strict=True):
            if of_all is not None and more is not None:
                of_all.add_(more)
    return FeedForwardGradients(dz, total[0], total[1:])


def _tiles(x: Tensor) -> list[slice]:
    """Return slices of x (N, H), each of as many tokens as a micro-batch has by default."""
    size = MICRO_BATCH_TOKENS[x.device.type]
    return [slice(first, first + size) for first in range(0, len(x), size)]


def _projections_of(layer: DecoderLayer) -> Projections:
    """Read a layer's projections, with the matrices of the acting adapter."""
    found = list[Linear]()
    for module in _projections(layer):
        base = _base(module)
        adapter = None
        if isinstance(module, LoraLayer) and not module._disable_adapters:
            adapter = next((name for name in module._active_adapter[:1] if name in module.lora_A), None)
        if adapter is None:
            found.append(Linear(base.weight, base.bias, a=None, b=None, scale=0.0))
            continue
        lora: Any = module
        a = lora.lora_A[adapter].weight
        b = lora.lora_B[adapter].weight
        found.append(Linear(base.weight, base.bias, a=a, b=b, scale=lora.scaling[adapter]))
    return Projections(*found)


def _projections(layer: DecoderLayer) -> list[Any]:
    return [layer.get_submodule(name) for name in PROJECTIONS]


def _base(module: Any) -> Any:
    return module.get_base_layer() if isinstance(module, LoraLayer) else module
