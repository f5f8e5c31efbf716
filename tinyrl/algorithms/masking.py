"""Masked sums, means and whitening, and the aggregation of per-token terms into one number.

Every function takes a bool mask, True = this entry counts. What lies under False may be anything, inf and NaN included:
it is replaced before any arithmetic, so that neither value nor gradient sees it (0 * NaN is NaN, in backward too).
`aggregate` is the only place where a loss chooses its denominator.
In this room x[b, t] is of response b in [0, B) and token t in [0, T), and shapes are asserted (AssertionError).
"""

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "sequence-sum", "constant"]


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


def aggregate(x: Tensor, mask: Tensor, *, aggregation: Aggregation, denominator: float | None = None) -> Tensor:
    """Reduce per-token terms (B, T) to one number (0-dim float32), with a named denominator D.

        token         (sum_b sum_t m[b, t] x[b, t]) / D          D: True tokens of the optimizer step
        sequence      (sum_b mean over True t of x[b, t]) / D    D: sequences of the step with at least one True token
        sequence-sum  (sum_b sum_t m[b, t] x[b, t]) / D          D: the same
        constant      (sum_b sum_t m[b, t] x[b, t]) / D          D: any number, the same for every step; required

    With the same D in every micro-batch of a step, the results of the micro-batches add up to that of the whole batch.
    A sequence without a True token counts neither in the sum nor in the default D. D None: counted in this batch.
    D = 0 is the count of a step in which nothing counts: the result is 0, not NaN.
    """
    assert_shapes(mask, x=x)
    assert denominator is None or denominator >= 0, f"denominator is {denominator}"
    assert aggregation in ("token", "sequence", "sequence-sum", "constant"), f"aggregation is {aggregation!r}"
    total = masked_mean(x, mask, dim=1).sum() if aggregation == "sequence" else masked_sum(x, mask)
    if denominator is not None:
        return total / (denominator or 1)
    assert aggregation != "constant", "aggregation 'constant' needs a denominator, say sequences * max_new_tokens"
    count = mask.sum() if aggregation == "token" else mask.any(dim=1).sum()
    return total / count.clamp(min=1)
