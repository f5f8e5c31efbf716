"""Layers of Llama-like decoders (Llama, Qwen2, Qwen3) for packed training passes, with derivatives by hand.

The library's layers save a dozen tensors as wide as the feed-forward block; here norms are recomputed in backward.
Tokens are flat: x (N, H). Dropout and adapters that are more than W + B A are left to the library (checks.py). Where
layers are recomputed, or nothing is to be kept, the feed-forward block goes through the tokens tile by tile.

Under autocast the operands of products are in half precision. The residual stream has the dtype of the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import silu

from tinyrl.models.autograd import once_differentiable
from tinyrl.models.batch import Batch
from tinyrl.models.device import HALVES, MICRO_BATCH_TOKENS, autocast_dtype
from tinyrl.models.linears import EACH, Tensors, joined_a, linears, linears_backward, product, residual_linear
from tinyrl.models.lora import is_plain_lora
from tinyrl.models.norms import Norm, Rope, rms_norm, rms_norm_backward, upcast
from tinyrl.models.packing import Packing, attend

PROJECTIONS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
OUT, INNER = 3 * EACH, 4 * EACH  # where the tensors of o_proj begin, and those of gate_proj
NORMS = ("q_norm", "k_norm")  # of heads, in Qwen3
ROTATION = {  # fields of the usual rotary positions; Ministral-3 has more, and scales late queries by position
    "rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "low_freq_factor", "high_freq_factor", "short_factor", "long_factor",
}  # fmt: skip


# ---- a layer: before and after attention ----


class NormedLinears(torch.autograd.Function):
    """Linear layers of the RMS norm of x, computed in a dtype: apply(x, norm weight, eps, dtype, scales, *layers) ->
    one (N, out) for each.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, scales: Sequence[float], *layers: Tensor | None
    ):
        h, r = rms_norm(x, weight, eps, dtype=dtype)
        outputs, low = linears(h, layers, scales)
        ctx.save_for_backward(x, r, weight, low, *layers)
        ctx.dtype = dtype
        ctx.scales = scales
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        x, r, weight, low, *layers = ctx.saved_tensors
        needs_x, needs_weight, _, _, _, *needed = ctx.needs_input_grad
        h = torch.mul(x, r).mul_(weight).to(ctx.dtype)
        dh, found = linears_backward(
            grads, h, low, layers=layers, scales=ctx.scales, needed=needed, needs_h=needs_x or needs_weight
        )  # not in the first layer of a frozen base
        dx = dw = None
        if dh is not None:
            dx, dw = rms_norm_backward(dh, x, r, weight, needs_weight=needs_weight)
        return dx, dw, None, None, None, *found


class AfterAttention(torch.autograd.Function):
    """The rest of a layer: apply(x, attended, norm weight, eps, scales, *layers) -> y (N, H), with

        z = x + out(attended)        y = z + down(silu(gate(h)) * up(h)),  h = RMS norm of z

    layers: out, gate, up, down.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, attended: Tensor, weight: Tensor, eps: float, scales: Sequence[float], *layers: Tensor | None
    ):
        z, low_out = residual_linear(x, attended, layers[:EACH], scales[0])
        h, r = rms_norm(z, weight, eps, dtype=attended.dtype)
        (gate, up), low = linears(h, layers[EACH:-EACH], scales[1:3])
        y, low_down = residual_linear(z, silu(gate).mul_(up), layers[-EACH:], scales[3])
        ctx.save_for_backward(attended, z, r, weight, gate, up, low_out, low, low_down, *layers)
        ctx.scales = scales
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        attended, z, r, weight, gate, up, low_out, low, low_down, *layers = ctx.saved_tensors
        _, _, needs_weight, _, _, *needed = ctx.needs_input_grad
        scales = ctx.scales
        inside = Inside(r=r, gate=gate, up=up, low=low, low_down=low_down)
        dz, dw, of_mlp = feed_forward_backward(
            dy,
            z,
            inside,
            weight=weight,
            layers=layers[EACH:],
            scales=scales[1:],
            needed=needed[EACH:],
            needs_weight=needs_weight,
        )
        d_attended, of_out = linears_backward(
            [dz.to(attended.dtype)], attended, low_out, layers=layers[:EACH], scales=scales[:1], needed=needed[:EACH]
        )
        return dz, d_attended, dw, None, None, *of_out, *of_mlp


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


def feed_forward_backward(
    dy: Tensor,
    z: Tensor,
    inside: Inside,
    *,
    weight: Tensor,
    layers: Tensors,
    scales: Sequence[float],
    needed: Sequence[bool],
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Return the gradients of z, of the norm's weight, and of the tensors of gate, up and down (`layers`)."""
    dtype = inside.gate.dtype
    active = silu(inside.gate)
    dm, of_down = linears_backward(
        [dy.to(dtype)],
        active * inside.up,
        inside.low_down,
        layers=layers[-EACH:],
        scales=scales[-1:],
        needed=needed[-EACH:],
    )
    assert dm is not None
    d_up = active.mul_(dm)
    d_gate = torch.ops.aten.silu_backward(dm.mul_(inside.up), inside.gate)
    h = torch.mul(z, inside.r).mul_(weight).to(dtype)
    dh, of_inputs = linears_backward(
        [d_gate, d_up], h, inside.low, layers=layers[:-EACH], scales=scales[:-1], needed=needed[:-EACH]
    )
    assert dh is not None
    dz, dw = rms_norm_backward(dh, z, inside.r, weight, needs_weight=needs_weight, residual=dy)
    return dz, dw, [*of_inputs, *of_down]


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


class LinearLayers(NamedTuple):
    """The tensors of linear layers in a row, EACH of every layer, and LoRA's scale of each layer."""

    tensors: list[Tensor | None]
    scales: list[float]


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
    tensors, scales = _tensors(layer)
    attended = _attended(x, layer, shared, tensors=tensors[:OUT], scales=scales[:3])
    weight = layer.post_attention_layernorm.weight
    return AfterAttention.apply(x, attended, weight, shared.eps, scales[3:], *tensors[OUT:])


def _attended(x: Tensor, layer: DecoderLayer, shared: Shared, *, tensors: Tensors, scales: Sequence[float]) -> Tensor:
    """Return what the tokens attend to, (N, heads d), before the layer's output projection."""
    attention = layer.self_attn
    eps = shared.eps
    weight = layer.input_layernorm.weight
    qkv: tuple[Tensor, ...] = NormedLinears.apply(x, weight, eps, shared.dtype, scales, *tensors)
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
    tensors, scales = _tensors(layer)
    norms = [m.weight for name in NORMS if (m := getattr(layer.self_attn, name, None)) is not None]
    norms += [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
    return LeanLayer.apply(x, layer, shared, scales, *tensors, *norms)


class LeanLayer(torch.autograd.Function):
    """A layer that keeps x alone: apply(x, layer, shared, scales, *tensors of the projections, *weights of norms) -> y.

    Its feed-forward block goes through the tokens tile by tile, so of a long text nothing is as wide as that block.
    Backward computes attention again, and in each tile what the block has inside, but not y.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, layer: DecoderLayer, shared: Shared, scales: Sequence[float], *parameters: Tensor | None
    ):
        tensors = parameters[: EACH * len(PROJECTIONS)]
        attended = _attended(x, layer, shared, tensors=tensors[:OUT], scales=scales[:3])
        y, _ = residual_linear(x, attended, tensors[OUT:INNER], scales[3])
        weight = layer.post_attention_layernorm.weight
        for tile in _tiles(y):
            z = y[tile]
            h, _ = rms_norm(z, weight, shared.eps, dtype=shared.dtype)
            (gate, up), _ = linears(h, tensors[INNER:-EACH], scales[4:6])
            y[tile], _ = residual_linear(z, silu(gate).mul_(up), tensors[-EACH:], scales[6])
        ctx.save_for_backward(x)
        ctx.layer = layer
        ctx.shared = shared
        ctx.scales = scales
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
        layer = ctx.layer
        tensors = parameters[: EACH * len(PROJECTIONS)]
        needed = [tensor is not None and tensor.requires_grad for tensor in tensors]
        leaf = x.detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad():
            attended = _attended(leaf, layer, ctx.shared, tensors=tensors[:OUT], scales=ctx.scales[:3])
        z, low_out = residual_linear(x, attended.detach(), tensors[OUT:INNER], ctx.scales[3])
        weight = layer.post_attention_layernorm.weight
        dz, dw, of_mlp = _tiled_backward(
            dy,
            z,
            weight=weight,
            layers=tensors[INNER:],
            scales=ctx.scales[4:],
            needed=needed[INNER:],
            shared=ctx.shared,
        )
        d_attended, of_out = linears_backward(
            [dz.to(attended.dtype)],
            attended.detach(),
            low_out,
            layers=tensors[OUT:INNER],
            scales=ctx.scales[3:4],
            needed=needed[OUT:INNER],
            needs_h=attended.requires_grad,
        )
        del z
        found = {id(t): gradient for t, gradient in zip(tensors[OUT:], [*of_out, *of_mlp], strict=True)}
        found[id(weight)] = dw
        inputs = [t for t in (leaf, *parameters) if t is not None and t.requires_grad and id(t) not in found]
        if attended.requires_grad:
            gradients = torch.autograd.grad(attended, inputs, d_attended)
            found |= {id(t): gradient for t, gradient in zip(inputs, gradients, strict=True)}
        dx = None
        if leaf.requires_grad:
            dx = found[id(leaf)]
            assert dx is not None
            dx.add_(dz)
        return dx, None, None, None, *(None if t is None else found.get(id(t)) for t in parameters)


def _versions(tensors: Tensors) -> list[int]:
    """Return how often each tensor was changed."""
    return [tensor._version for tensor in tensors if tensor is not None]


def _tiled_backward(
    dy: Tensor,
    z: Tensor,
    *,
    weight: Tensor,
    layers: Tensors,
    scales: Sequence[float],
    needed: Sequence[bool],
    shared: Shared,
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Compute `feed_forward_backward` tile by tile, of which each computes again what the block has inside."""
    dz = torch.empty_like(z)
    total: list[Tensor | None] = []
    for tile in _tiles(z):
        h, r = rms_norm(z[tile], weight, shared.eps, dtype=shared.dtype)
        (gate, up), low = linears(h, layers[:-EACH], scales[:-1])
        down = joined_a(layers[-EACH:], h.dtype)
        low_down = None if down is None else product(silu(gate).mul_(up), down.t())
        dz[tile], dw, of_layers = feed_forward_backward(
            dy[tile],
            z[tile],
            Inside(r=r, gate=gate, up=up, low=low, low_down=low_down),
            weight=weight,
            layers=layers,
            scales=scales,
            needed=needed,
            needs_weight=weight.requires_grad,
        )
        found = [dw, *of_layers]
        if not total:
            total = found
            continue
        for of_all, of_tile in zip(total, found, strict=True):
            if of_all is not None and of_tile is not None:
                of_all.add_(of_tile)
    return dz, total[0], total[1:]


def _tiles(x: Tensor) -> list[slice]:
    """Return slices of x (N, H), each of as many tokens as a micro-batch has by default."""
    size = MICRO_BATCH_TOKENS[x.device.type]
    return [slice(first, first + size) for first in range(0, len(x), size)]


def _tensors(layer: DecoderLayer) -> LinearLayers:
    """Collect the tensors of a layer's projections, and LoRA's scale of each under the acting adapter."""
    tensors: list[Tensor | None] = []
    scales: list[float] = []
    for module in _projections(layer):
        base = _base(module)
        adapter = None
        if isinstance(module, LoraLayer) and not module._disable_adapters:
            adapter = next((name for name in module._active_adapter[:1] if name in module.lora_A), None)
        a, b = (None, None) if adapter is None else (module.lora_A[adapter].weight, module.lora_B[adapter].weight)
        tensors += [base.weight, base.bias, a, b]
        scales.append(0.0 if adapter is None else module.scaling[adapter])
    return LinearLayers(tensors, scales)


def _projections(layer: DecoderLayer) -> list[Any]:
    return [layer.get_submodule(name) for name in PROJECTIONS]


def _base(module: Any) -> Any:
    return module.get_base_layer() if isinstance(module, LoraLayer) else module
