"""What lies between a layer's products, compiled: norms, rotation and SiLU x up, each in one pass.

Today's parts (tinyrl/models/layers.py, norms.py) are torch's operations one by one, each a read and a write of a tensor
as wide as the layer. One graph serves all numbers of tokens. On a CPU the graphs are traced and run uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinyrl.models import layers, norms
from tinyrl.models.linears import linears, linears_backward, linears_of, residual_linear

BACKEND = "inductor" if torch.cuda.is_available() else "eager"
MOST_GRAPHS = 64  # of a function
eager_norm_backward = norms.rms_norm_backward


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of tensors, which are detached: a graph is made anew for one that requires a gradient."""
    graph = torch.compile(function, backend=BACKEND, dynamic=True, fullgraph=True)

    def call(*arguments: Any, **options: Any) -> Any:
        detached = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        return graph(*detached, **options)

    return call


@compiled
def norm(x: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return w x r in `dtype`, and r = 1 / rms."""
    wide = x.float()
    r = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * r * weight.float()).to(x.dtype if dtype is None else dtype), r


@compiled
def normed_again(x: Tensor, r: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() * r * weight.float()).to(dtype)


@compiled
def frozen_norm_backward(dh: Tensor, x: Tensor, r: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    """dx = r w dh - x r^3 (w dh . x) / H, with the residual's gradient added."""
    wide, scaled = x.float(), dh.float() * weight.float()
    along = (scaled * wide).mean(-1, keepdim=True) * r**3
    dx = scaled * r - wide * along
    return (dx if residual is None else dx + residual.float()).to(x.dtype)


def norm_backward(
    dh: Tensor, x: Tensor, r: Tensor, weight: Tensor, *, needs_weight: bool, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    if needs_weight:
        return eager_norm_backward(dh, x, r, weight, needs_weight=True, residual=residual)
    return frozen_norm_backward(dh, x, r, weight, residual), None


@compiled
def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x cos + (x with its halves exchanged) sin."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([second, first], -1) * sin).to(x.dtype)


@compiled
def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    wide = gate.float()
    return (wide * torch.sigmoid(wide) * up.float()).to(gate.dtype)


@compiled
def silu_times_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    wide, d = gate.float(), grad.float()
    sigmoid = torch.sigmoid(wide)
    active = wide * sigmoid
    d_gate = d * up.float() * (sigmoid + active * (1 - sigmoid))
    return d_gate.to(gate.dtype), (d * active).to(up.dtype)


class Rope(torch.autograd.Function):
    """Takes the place of norms.Rope."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return rotated(grad, cos, sin.roll(sin.shape[-1] // 2, -1)), None, None


class NormedLinears(torch.autograd.Function):
    """Takes the place of layers.NormedLinears."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, scales: Sequence[float], *tensors: Tensor | None
    ):
        h, r = norm(x, weight, eps, dtype=dtype)
        outputs, low = linears(h, linears_of(tensors, scales))
        ctx.save_for_backward(x, r, weight, low, *tensors)
        ctx.dtype = dtype
        ctx.scales = scales
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, r, weight, low, *tensors = ctx.saved_tensors
        needs_x, needs_weight, _, _, _, *needed = ctx.needs_input_grad
        h = normed_again(x, r, weight, ctx.dtype)
        needs_h = needs_x or needs_weight
        dh, found = linears_backward(grads, h, low, linears_of(tensors, ctx.scales, needed), needs_h=needs_h)
        dx = dw = None
        if dh is not None:
            dx, dw = norm_backward(dh, x, r, weight, needs_weight=needs_weight)
        return dx, dw, None, None, None, *found


class AfterAttention(torch.autograd.Function):
    """Takes the place of layers.AfterAttention."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, x: Tensor, attended: Tensor, weight: Tensor, eps: float, scales: Sequence[float], *tensors: Tensor | None
    ):
        to_out, to_gate, to_up, to_down = linears_of(tensors, scales)
        z, low_out = residual_linear(x, attended, to_out)
        h, r = norm(z, weight, eps, dtype=attended.dtype)
        (gate, up), low = linears(h, [to_gate, to_up])
        y, low_down = residual_linear(z, silu_times(gate, up), to_down)
        ctx.save_for_backward(attended, z, r, weight, gate, up, low_out, low, low_down, *tensors)
        ctx.scales = scales
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        attended, z, r, weight, gate, up, low_out, low, low_down, *tensors = ctx.saved_tensors
        _, _, needs_weight, _, _, *needed = ctx.needs_input_grad
        to_out, to_gate, to_up, to_down = linears_of(tensors, ctx.scales, needed)
        dtype = attended.dtype
        dm, of_down = linears_backward([dy.to(dtype)], silu_times(gate, up), low_down, [to_down])
        assert dm is not None
        d_gate, d_up = silu_times_backward(dm, gate, up)
        h = normed_again(z, r, weight, dtype)
        dh, of_mlp = linears_backward([d_gate, d_up], h, low, [to_gate, to_up])
        assert dh is not None
        dz, dw = norm_backward(dh, z, r, weight, needs_weight=needs_weight, residual=dy)
        d_attended, of_out = linears_backward([dz.to(dtype)], attended, low_out, [to_out])
        return dz, d_attended, dw, None, None, *of_out, *of_mlp, *of_down


@contextmanager
def fused_pointwise() -> Iterator[None]:
    """Have layers.py and norms.py compute by these parts."""
    of_norms = {"rms_norm": norm, "rms_norm_backward": norm_backward}
    parts = {**of_norms, "Rope": Rope, "NormedLinears": NormedLinears, "AfterAttention": AfterAttention}
    # A cell meets a few dtypes, residuals and shapes; beyond the limit a graph would be refused.
    more_graphs = torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS)  # pyright: ignore
    with patch.multiple(layers, **parts), patch.multiple(norms, **of_norms), more_graphs:
        yield
