"""RMS norm and rotary positions, forward and backward: computed in float32 and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from tinyrl.models.autograd import once_differentiable
from tinyrl.models.device import HALVES


def upcast(x: Tensor) -> Tensor:
    """Return x in float32 where it is in half precision, else x itself."""
    return x.float() if x.dtype in HALVES else x


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Apply RMS norm over the last dimension (1910.07467, Eq. 4): w x r in `dtype` (None: that of x), and r = 1 / rms,
    which is (..., 1) and not in half precision.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    r = norm.mul_(norm).mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * r).mul_(weight).to(dtype or x.dtype), r


def rms_norm_backward(
    dh: Tensor, x: Tensor, r: Tensor, weight: Tensor, *, needs_weight: bool, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and (where needed) of the weight from that of w x r, which is overwritten. `residual`:
    a further gradient of x that is added.

        dx = r w dh - x r^3 (w dh . x) / H
    """
    dtype = x.dtype
    dh = upcast(dh)
    x = upcast(x)
    dw = torch.mul(x, r).mul_(dh).flatten(0, -2).sum(0).to(weight.dtype) if needs_weight else None
    dh.mul_(weight)
    along = torch.linalg.vecdot(dh, x).unsqueeze(-1).mul_(r**3).mul_(-1 / x.shape[-1])
    dx = dh.mul_(r) if residual is None else torch.addcmul(residual, dh, r)
    return dx.addcmul_(x, along).to(dtype), dw


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x cos + (x with its halves exchanged) sin."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


class Norm(torch.autograd.Function):
    """RMS norm: apply(x, weight, eps), over the last dimension of (N, heads, d) as well."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float):
        h, r = rms_norm(x, weight, eps)
        ctx.save_for_backward(x, r, weight)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx, dh: Tensor):
        x, r, weight = ctx.saved_tensors
        return *rms_norm_backward(dh.clone(), x, r, weight, needs_weight=ctx.needs_input_grad[1]), None


class Rope(torch.autograd.Function):
    """Rotary positions (RoPE, 2104.09864, Eq. 34), by halves: apply(x (N, heads, d), cos, sin), the two (N, 1, d) with
    the first half of sin negated. Backward rotates the other way.
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor):
        ctx.save_for_backward(cos, sin)
        return apply_rope(x, cos, sin).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return apply_rope(grad, cos, sin.roll(sin.shape[-1] // 2, -1)).to(grad.dtype), None, None
