"""The packed pass of Llama-like decoders (Llama, Qwen2, Qwen3), with derivatives by hand: fewer passes over memory.

Layer by layer the library keeps a dozen tensors as wide as the feed-forward block and reads each several times; LoRA's
branch alone costs two more passes over every output. Here branch and residual are added up inside the products, norms
are computed again in backward, and weights and adapters are read where they are, at every call. Tokens are flat: x
(N, H). What this does not know (dropout, adapters that are more than W + B A) is left to the library.

A linear layer is four tensors in a row: weight (out, in), bias, lora_A (r, in), lora_B (out, r), the last three None
where it has none. It computes W h + b + scale B A h (LoRA, 2106.09685, Eq. 3).

Under autocast operands of products are in half precision, and so is what goes from one to the next. The sum between
layers has the dtype of the embedding, as in the library: that of a frozen base, float32 where every weight is trained.
Norms and rotations are computed in float32 and rounded once, and gradients of parameters are float32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from tinyrl.models.device import HALVES, autocast_dtype, multiplies_in
from tinyrl.models.lora import is_plain_lora
from tinyrl.models.packing import Packing, attend

EACH = 4  # tensors of a linear layer
Tensors = Sequence[Tensor | None]


def products(
    h: Tensor, layers: Tensors, scales: Sequence[float], *, beside: Tensor | None = None
) -> tuple[list[Tensor], Tensor | None]:
    """What each layer makes of h (N, in), and A h of all of them (N, sum of ranks). `beside`: what is added to it."""
    down = _joined_a(layers, h.dtype)
    low = None if down is None else product(h, down.t())
    parts = _by_layer(low, layers)
    outputs = []
    for (weight, bias, _, b), part, scale in zip(_each(layers), parts, scales, strict=True):
        assert weight is not None
        first = beside if bias is None else bias.to(h.dtype)
        out = product(h, weight.to(h.dtype).t(), onto=first)
        if part is not None and b is not None:
            product(part, b.to(h.dtype).t(), onto=out, scale=scale, out=out)
        outputs.append(out if first is beside or beside is None else out.add_(beside))
    return outputs, low


def products_backward(
    grads: Sequence[Tensor],
    h: Tensor,
    low: Tensor | None,
    *,
    layers: Tensors,
    scales: Sequence[float],
    needed: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradient of h from those of the outputs, and of each tensor of the layers that is `needed`."""
    d_low, found = weights_backward(grads, h, low, layers=layers, scales=scales, needed=needed)
    return input_backward(grads, d_low, layers=layers, dtype=h.dtype), found


def input_backward(grads: Sequence[Tensor], d_low: Tensor | None, *, layers: Tensors, dtype: torch.dtype) -> Tensor:
    """The gradient of h from those of the outputs and of A h."""
    dh = None
    for (weight, *_), grad in zip(_each(layers), grads, strict=True):
        assert weight is not None
        dh = product(grad, weight.to(dtype), onto=dh, out=dh)
    assert dh is not None
    down = _joined_a(layers, dtype)
    return dh if d_low is None or down is None else product(d_low, down, onto=dh, out=dh)


def weights_backward(
    grads: Sequence[Tensor],
    h: Tensor,
    low: Tensor | None,
    *,
    layers: Tensors,
    scales: Sequence[float],
    needed: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradient of A h, and of each tensor of the layers that is `needed`."""
    d_low = None if low is None else torch.empty_like(low)
    parts, d_parts = _by_layer(low, layers), _by_layer(d_low, layers)
    found: list[Tensor | None] = []
    for i, ((weight, bias, _, b), grad, scale) in enumerate(zip(_each(layers), grads, scales, strict=True)):
        assert weight is not None
        needs_weight, needs_bias, _, needs_b = needed[EACH * i : EACH * (i + 1)]
        dw = product(grad.t(), h, dtype=weight.dtype) if needs_weight else None
        db = None
        if b is not None:
            part, d_part = parts[i], d_parts[i]
            assert part is not None
            assert d_part is not None
            product(grad, b.to(h.dtype), out=d_part).mul_(scale)
            db = product(part.t(), grad, dtype=b.dtype).mul_(scale).t() if needs_b else None
        of_bias = grad.sum(0, dtype=bias.dtype) if bias is not None and needs_bias else None
        found += [dw, of_bias, None, db]
    if d_low is not None and any(needed[2::EACH]):
        dtype = next(a.dtype for a in layers[2::EACH] if a is not None)
        found[2::EACH] = _by_layer(product(d_low.t(), h, dtype=dtype), layers, dim=0)
    return d_low, found


def product(
    a: Tensor,
    b: Tensor,
    *,
    onto: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """onto + scale a b, summed in float32 or wider, and rounded to `dtype` (None: that of a). out: where it is put.
    `scale` and `dtype` do not go together.

    A CPU without products in half precision would emulate them, at many times the cost of float32's.
    """
    wider = dtype not in (None, a.dtype)
    if a.dtype in HALVES and a.device.type == "cpu" and (wider or not multiplies_in(a.dtype)):
        x, y = a.float(), b.float()
        found = torch.mm(x, y) if onto is None else torch.addmm(onto.float(), x, y, alpha=scale)
        return found.to(dtype or a.dtype) if out is None else out.copy_(found)
    if onto is not None:
        return torch.addmm(onto, a, b, alpha=scale, out=out)
    return torch.mm(a, b, out_dtype=dtype) if wider else torch.mm(a, b, out=out)  # pyright: ignore


def _each(layers: Tensors) -> list[Tensors]:
    return [layers[i : i + EACH] for i in range(0, len(layers), EACH)]


def _by_layer(joined: Tensor | None, layers: Tensors, *, dim: int = 1) -> list[Tensor | None]:
    """The part of each layer along `dim`, as long as its rank; None where it has no branch."""
    if joined is None:
        return [None] * (len(layers) // EACH)
    parts = iter(joined.split([len(a) for a in layers[2::EACH] if a is not None], dim))
    return [None if a is None else next(parts) for a in layers[2::EACH]]


def _joined_a(layers: Tensors, dtype: torch.dtype) -> Tensor | None:
    matrices = [a for a in layers[2::EACH] if a is not None]
    if not matrices:
        return None
    return (matrices[0] if len(matrices) == 1 else torch.cat(matrices)).to(dtype)


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALVES else x


def normed(x: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """RMS norm over the last dimension (1910.07467, Eq. 4): w x r in `dtype` (None: that of x), and r = 1 / rms,
    (..., 1), not in half precision.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    r = norm.mul_(norm).mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * r).mul_(weight).to(dtype or x.dtype), r


def normed_backward(
    dh: Tensor, x: Tensor, r: Tensor, weight: Tensor, *, needs_weight: bool, beside: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the weight (where needed) from that of w x r, which is overwritten. `beside`: what else
    there is of the gradient of x.

        dx = r w dh - x r^3 (w dh . x) / H
    """
    dtype, dh, x = x.dtype, wide(dh), wide(x)
    dw = torch.mul(x, r).mul_(dh).flatten(0, -2).sum(0).to(weight.dtype) if needs_weight else None
    dh.mul_(weight)
    along = torch.linalg.vecdot(dh, x).unsqueeze(-1).mul_(r**3).mul_(-1 / x.shape[-1])
    dx = dh.mul_(r) if beside is None else torch.addcmul(beside, dh, r)
    return dx.addcmul_(x, along).to(dtype), dw


class NormedProducts(torch.autograd.Function):
    """Linear layers of the RMS norm of x, computed in a dtype: apply(x, norm weight, eps, dtype, scales, *layers) ->
    one (N, out) for each.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, scales: Sequence[float], *layers: Tensor | None
    ):
        h, r = normed(x, weight, eps, dtype=dtype)
        outputs, low = products(h, layers, scales)
        ctx.save_for_backward(x, r, weight, low, *layers)
        ctx.dtype, ctx.scales = dtype, scales
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, r, weight, low, *layers = ctx.saved_tensors
        needs_x, needs_weight, _, _, _, *needed = ctx.needs_input_grad
        h = torch.mul(x, r).mul_(weight).to(ctx.dtype)
        d_low, found = weights_backward(grads, h, low, layers=layers, scales=ctx.scales, needed=needed)
        dx = dw = None
        if needs_x or needs_weight:  # not in the first layer of a frozen base
            dh = input_backward(grads, d_low, layers=layers, dtype=h.dtype)
            dx, dw = normed_backward(dh, x, r, weight, needs_weight=needs_weight)
        return dx, dw, None, None, None, *found


class Normed(torch.autograd.Function):
    """RMS norm: apply(x, weight, eps), over the last dimension of (N, heads, d) as well."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float):  # pyright: ignore[reportIncompatibleMethodOverride]
        h, r = normed(x, weight, eps)
        ctx.save_for_backward(x, r, weight)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx, dh: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, r, weight = ctx.saved_tensors
        return *normed_backward(dh.clone(), x, r, weight, needs_weight=ctx.needs_input_grad[1]), None


class Rotated(torch.autograd.Function):
    """Rotary positions (RoPE, 2104.09864, Eq. 34), by halves: apply(x (N, heads, d), cos, sin), the two (N, 1, d) with
    the first half of sin negated. Backward turns the other way.
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return turned(grad, cos, sin.roll(sin.shape[-1] // 2, -1)).to(grad.dtype), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + (x with its halves exchanged) sin."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


class AfterAttention(torch.autograd.Function):
    """The rest of a layer: apply(x, attended, norm weight, eps, scales, *layers) -> y (N, H), with

        z = x + out(attended)        y = z + down(silu(gate(h)) * up(h)),  h = RMS norm of z

    layers: out, gate, up, down.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, x: Tensor, attended: Tensor, weight: Tensor, eps: float, scales: Sequence[float], *layers: Tensor | None
    ):
        z, low_out = added(x, attended, layers[:EACH], scales[0])
        h, r = normed(z, weight, eps, dtype=attended.dtype)
        (gate, up), low = products(h, layers[EACH:-EACH], scales[1:3])
        y, low_down = added(z, silu(gate).mul_(up), layers[-EACH:], scales[3])
        ctx.save_for_backward(attended, z, r, weight, gate, up, low_out, low, low_down, *layers)
        ctx.scales = scales
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        attended, z, r, weight, gate, up, low_out, low, low_down, *layers = ctx.saved_tensors
        _, _, needs_weight, _, _, *needed = ctx.needs_input_grad
        scales = ctx.scales
        dtype, active = attended.dtype, silu(gate)
        dm, of_down = products_backward(
            [dy.to(dtype)], active * up, low_down, layers=layers[-EACH:], scales=scales[3:], needed=needed[-EACH:]
        )
        d_up = active.mul_(dm)
        d_gate = torch.ops.aten.silu_backward(dm.mul_(up), gate)
        h = torch.mul(z, r).mul_(weight).to(dtype)
        dh, of_mlp = products_backward(
            [d_gate, d_up], h, low, layers=layers[EACH:-EACH], scales=scales[1:3], needed=needed[EACH:-EACH]
        )
        dz, dw = normed_backward(dh, z, r, weight, needs_weight=needs_weight, beside=dy)
        d_attended, of_out = products_backward(
            [dz.to(dtype)], attended, low_out, layers=layers[:EACH], scales=scales[:1], needed=needed[:EACH]
        )
        return dz, d_attended, dw, None, None, *of_out, *of_mlp, *of_down


def added(x: Tensor, h: Tensor, layer: Tensors, scale: float) -> tuple[Tensor, Tensor | None]:
    """x + what a layer makes of h, in the dtype of x, and A h."""
    inside = x.dtype == h.dtype and x.dtype in HALVES  # of the product: rounded once
    (out,), low = products(h, layer, [scale], beside=x if inside else None)
    return (out if inside else out.add_(x) if x.dtype == h.dtype else x + out), low


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ACTIVATIONS = ("silu", "swish")  # two names of one function
ROTATION = {  # all that rotary positions have of the usual kinds; Ministral-3 scales queries by position besides
    "rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "low_freq_factor", "high_freq_factor", "short_factor", "long_factor",
}  # fmt: skip


def reads_like_llama(backbone: nn.Module) -> bool:
    """Whether the decoder has the parts of Llama's; whether they compute the same is checked on numbers, of few and of
    early positions.
    """
    layers: Any = getattr(backbone, "layers", None)
    if layers is None or not all(hasattr(backbone, name) for name in ("embed_tokens", "norm", "rotary_emb")):
        return False
    config: Any = backbone.config
    rope: dict[str, Any] = getattr(config.get_text_config(), "rope_parameters", None) or {}
    by_kind = [own for own in rope.values() if isinstance(own, dict)]  # of layers, where these differ
    if not all({*own} <= ROTATION for own in by_kind or [rope]):
        return False
    parts = ("input_layernorm", "post_attention_layernorm", *(f"{_room(name)}.{name}" for name in PROJECTIONS))
    names = [{name for name, _ in layer.named_modules()} for layer in layers]
    return all(present.issuperset(parts) for present in names)


def _room(projection: str) -> str:
    return "self_attn" if projection[0] in "qkvo" else "mlp"


def could_fuse(backbone: nn.Module) -> bool:
    """Whether this file knows the parts of the decoder; whether the numbers agree is for batches.py to compare."""
    if not reads_like_llama(backbone):
        return False
    config: Any = backbone.config.get_text_config()  # pyright: ignore
    plain = all(type(_base(module)) is nn.Linear for layer in backbone.layers for module in _projections(layer))  # pyright: ignore
    return plain and getattr(config, "hidden_act", None) in ACTIVATIONS and hasattr(config, "rms_norm_eps")


def can_fuse_now(backbone: Any) -> bool:
    """Whether nothing is in use that this file leaves to the library: weights are in float32, under autocast also in
    its dtype.
    """
    low = autocast_dtype(backbone.norm.weight.device.type)
    dtypes = {p.dtype for p in backbone.parameters()}
    if not dtypes <= {torch.float32, low} or low not in (None, *HALVES):
        return False
    adapted = [m for layer in backbone.layers for m in _projections(layer) if isinstance(m, LoraLayer)]
    dropouts = [d for layer in adapted for d in layer.lora_dropout.values()]  # one of zero is an nn.Identity
    drops_out = any(isinstance(dropout, nn.Dropout) and dropout.training for dropout in dropouts)
    return not drops_out and all(is_plain_lora(layer) and not layer.merged for layer in adapted)


def fused_states(backbone: Any, ids: Tensor, positions: Tensor, packing: Packing) -> Tensor:
    """Hidden states (N, H) of the packed tokens ids (1, N) at positions (1, N), under the adapter that acts."""
    kind = backbone.norm.weight.device.type
    dtype = autocast_dtype(kind) or torch.float32
    eps: float = backbone.config.get_text_config().rms_norm_eps
    x = backbone.embed_tokens(ids)[0]
    with torch.autocast(kind, enabled=False):
        cos, sin = (t[0].unsqueeze(1) for t in backbone.rotary_emb(wide(x[:, :1]), positions))
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        recomputed = torch.is_grad_enabled() and getattr(backbone.layers[0], "gradient_checkpointing", False)
        for layer in backbone.layers:
            given = layer, _tensors(layer), cos, sin, packing, eps, dtype
            x = checkpoint(_layer, x, *given, use_reentrant=False) if recomputed else _layer(x, *given)
        return Normed.apply(x, backbone.norm.weight, eps)  # pyright: ignore


def _layer(
    x: Tensor, layer: Any, tensors: Any, cos: Tensor, sin: Tensor, packing: Packing, eps: float, dtype: torch.dtype
) -> Tensor:
    attention, norms = layer.self_attn, (layer.input_layernorm, layer.post_attention_layernorm)
    inputs, scales, rest, rest_scales = tensors
    qkv: Any = NormedProducts.apply(x, norms[0].weight, eps, dtype, scales, *inputs)
    q, k, v = (t.unflatten(1, (-1, attention.head_dim)) for t in qkv)
    if getattr(attention, "q_norm", None) is not None:  # Qwen3: over each head
        q, k = Normed.apply(q, attention.q_norm.weight, eps), Normed.apply(k, attention.k_norm.weight, eps)
    q, k = Rotated.apply(q, cos, sin), Rotated.apply(k, cos, sin)
    attended = attend(q, k, v, packing, attention.scaling).flatten(1)  # pyright: ignore
    return AfterAttention.apply(x, attended, norms[1].weight, eps, rest_scales, *rest)  # pyright: ignore


def _tensors(layer: Any) -> tuple[list[Tensor | None], list[float], list[Tensor | None], list[float]]:
    """Tensors and LoRA's scales, as the layers take them: of q, k and v, and of the other projections."""
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
