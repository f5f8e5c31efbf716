"""Masked sums, means and whitening.

Every function takes a bool mask, True = this entry counts. What lies under False may be anything, inf and NaN included:
it is replaced before any arithmetic, so that neither value nor gradient sees it (0 * NaN is NaN, in backward too).
In this room x[b, t] is of response b in [0, B) and token t in [0, T), and shapes are asserted (AssertionError).
"""

import torch
from torch import Tensor


def assert_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """Assert that `mask` is a (B, T) bool tensor and that every named tensor has its shape."""
    assert mask.dtype == torch.bool, f"mask must be bool, not {mask.dtype}"
    assert mask.dim() == 2, f"mask must be (B, T), not {tuple(mask.shape)}"
    for name, tensor in tensors.items():
        assert tensor.shape == mask.shape, f"{name} is {tuple(tensor.shape)}, mask is {tuple(mask.shape)}"


def keep_true(x: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Return `x` where `mask` is True and `fill` elsewhere, as float32; no gradient reaches x under False.

    x, mask: any one shape.
    """
    assert mask.dtype == torch.bool, f"mask must be bool, not {mask.dtype}"
    assert x.shape == mask.shape, f"x is {tuple(x.shape)}, mask is {tuple(mask.shape)}"
    return torch.where(mask, x.float(), fill)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum x over True entries, all of them or along `dim`; 0 where there is none. x, mask: any one shape."""
    kept = keep_true(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average x over True entries, all of them or along `dim`; 0 where there is none. x, mask: any one shape."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale to zero mean and unit variance over all True entries: (x - mean) / sqrt(var + 1e-8), var with
    n - 1; 0 elsewhere. x, mask: any one shape. Fewer than two True entries, or entries that are all equal, give 0.
    """
    centred = x.float() - masked_mean(x, mask)
    # A second pass removes what rounding left of the mean: equal entries then give 0, not amplified noise.
    centred = keep_true(centred - masked_mean(centred, mask), mask)
    variance = centred.square().sum() / (mask.sum() - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)
