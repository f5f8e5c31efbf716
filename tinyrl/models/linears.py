"""Linear layers with LoRA, forward and backward, several at once.

A linear layer computes W h + b + scale B A h (LoRA, 2106.09685, Eq. 3). Branch and residual are added inside the
products, where the library's branch costs two more passes over every output. Gradients of parameters are float32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tinyrl.models.device import HALVES

EACH = 4  # tensors of a linear layer
Tensors = Sequence[Tensor | None]


class Linear(NamedTuple):
    """A linear layer: weight (out, in), bias, lora_A (r, in) and lora_B (out, r), and LoRA's scale. needed: whether the
    gradient is wanted of each of the four tensors.
    """

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None
    scale: float
    needed: Sequence[bool] = (False, False, False, False)

    @property
    def tensors(self) -> Tensors:
        return self.weight, self.bias, self.a, self.b


def linears_of(tensors: Tensors, scales: Sequence[float], needed: Sequence[bool] | None = None) -> list[Linear]:
    """Read linear layers from their tensors in a row, as autograd functions are given them."""
    layers = list[Linear]()
    for number, scale in enumerate(scales):
        own = slice(EACH * number, EACH * (number + 1))
        weight, bias, a, b = tensors[own]
        assert weight is not None
        layers.append(Linear(weight, bias, a, b, scale, needed=[False] * EACH if needed is None else needed[own]))
    return layers


def tensors_of(layers: Sequence[Linear]) -> list[Tensor | None]:
    """Return the tensors of linear layers in a row."""
    return [tensor for layer in layers for tensor in layer.tensors]


@cache
def multiplies_in(dtype: torch.dtype) -> bool:
    """Return whether this CPU has instructions for products in a half-precision dtype; else they are emulated."""
    short = "bf16" if dtype == torch.bfloat16 else "fp16"
    there = torch.cpu.get_capabilities()
    return any(there.get(name, False) for name in (f"avx512_{short}", f"amx_{short}", "avx10_2", short))


def product(
    a: Tensor,
    b: Tensor,
    *,
    onto: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return onto + scale a b, summed in float32 or wider and rounded to `dtype` (None: that of a), in `out` if given.
    `scale` and `dtype` do not go together.
    """
    wider = dtype not in (None, a.dtype)
    if a.dtype in HALVES and a.device.type == "cpu" and (wider or not multiplies_in(a.dtype)):
        found = product(a.float(), b.float(), onto=None if onto is None else onto.float(), scale=scale)
        return found.to(dtype or a.dtype) if out is None else out.copy_(found)
    if onto is not None:
        return torch.addmm(onto, a, b, alpha=scale, out=out)
    return torch.mm(a, b, out_dtype=dtype) if wider else torch.mm(a, b, out=out)  # pyright: ignore


def linears(
    h: Tensor, layers: Sequence[Linear], *, residual: Tensor | None = None
) -> tuple[list[Tensor], Tensor | None]:
    """Apply several linear layers to h (N, in); return their outputs (plus `residual`), and A h (N, sum of ranks)."""
    joined = joined_a(layers, h.dtype)
    low = None if joined is None else product(h, joined.t())
    outputs = []
    for layer, part in zip(layers, _by_layer(low, layers), strict=True):
        first = residual if layer.bias is None else layer.bias.to(h.dtype)
        out = product(h, layer.weight.to(h.dtype).t(), onto=first)
        if part is not None and layer.b is not None:
            product(part, layer.b.to(h.dtype).t(), onto=out, scale=layer.scale, out=out)
        outputs.append(out if first is residual or residual is None else out.add_(residual))
    return outputs, low


def linears_backward(
    grads: Sequence[Tensor], h: Tensor, low: Tensor | None, layers: Sequence[Linear], *, needs_h: bool = True
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return the gradient of h (None unless `needs_h`), and those of the layers' tensors in a row, where needed."""
    d_low = None if low is None else torch.empty_like(low)
    parts = _by_layer(low, layers)
    d_parts = _by_layer(d_low, layers)
    found: list[Tensor | None] = []
    for layer, grad, part, d_part in zip(layers, grads, parts, d_parts, strict=True):
        needs_weight, needs_bias, _, needs_b = layer.needed
        dw = product(grad.t(), h, dtype=layer.weight.dtype) if needs_weight else None
        d_bias = grad.sum(0, dtype=layer.bias.dtype) if layer.bias is not None and needs_bias else None
        db = None
        if layer.b is not None and part is not None and d_part is not None:
            product(grad, layer.b.to(h.dtype), out=d_part).mul_(layer.scale)
            db = product(part.t(), grad, dtype=layer.b.dtype).mul_(layer.scale).t() if needs_b else None
        found += [dw, d_bias, None, db]
    needs_a = [layer.needed[2] for layer in layers]
    if d_low is not None and any(needs_a):
        dtype = next(layer.a.dtype for layer in layers if layer.a is not None)
        found[2::EACH] = _by_layer(product(d_low.t(), h, dtype=dtype), layers, dim=0)
    if not needs_h:
        return None, found
    dh = None
    for layer, grad in zip(layers, grads, strict=True):
        dh = product(grad, layer.weight.to(h.dtype), onto=dh, out=dh)
    joined = joined_a(layers, h.dtype)
    return dh if d_low is None or joined is None else product(d_low, joined, onto=dh, out=dh), found


def joined_a(layers: Sequence[Linear], dtype: torch.dtype) -> Tensor | None:
    matrices = [layer.a for layer in layers if layer.a is not None]
    return (matrices[0] if len(matrices) == 1 else torch.cat(matrices)).to(dtype) if matrices else None


def _by_layer(joined: Tensor | None, layers: Sequence[Linear], *, dim: int = 1) -> list[Tensor | None]:
    """Split along `dim` into each layer's part, as long as its rank; None where it has no branch."""
    if joined is None:
        return [None] * len(layers)
    parts = iter(joined.split([len(layer.a) for layer in layers if layer.a is not None], dim))
    return [None if layer.a is None else next(parts) for layer in layers]


def residual_linear(x: Tensor, h: Tensor, layer: Linear) -> tuple[Tensor, Tensor | None]:
    """Return x + the layer's output for h, in the dtype of x, and A h."""
    inside = x.dtype == h.dtype and x.dtype in HALVES  # x is added inside the product, which is rounded once
    (out,), low = linears(h, [layer], residual=x if inside else None)
    if inside:
        return out, low
    return (out.add_(x) if x.dtype == h.dtype else x + out), low
