"""Triton kernels that read a chunk of logits once (logprobs.py). On a CPU they run in Triton's interpreter, which
TRITON_INTERPRET=1 chooses before triton is first imported.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

WIDTH = 4096  # logits that a program holds, at most
WARPS = 8


@triton.jit
def _log_probabilities(z, targets, logprobs, entropies, log_totals, vocabulary, stride, inverse, width: tl.constexpr):
    """One row a program: the running maximum, sum of exponentials and sum weighted by the logits."""
    row_number = tl.program_id(0).to(tl.int64)
    row = z + row_number * stride
    highest = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, vocabulary, width):
        at = start + tl.arange(0, width)
        there = at < vocabulary
        x = tl.load(row + at, mask=there, other=-float("inf")) * inverse
        now = tl.maximum(highest, tl.max(x, 0))
        keep = tl.exp(highest - now)
        e = tl.where(there, tl.exp(x - now), 0.0)
        total = total * keep + tl.sum(e, 0)
        weighted = weighted * keep + tl.sum(e * tl.where(there, x, 0.0), 0)
        highest = now
    log_total = highest + tl.log(total)
    target = tl.load(targets + row_number)
    tl.store(log_totals + row_number, log_total)
    tl.store(entropies + row_number, log_total - weighted / total)
    tl.store(logprobs + row_number, tl.load(row + target) * inverse - log_total)


@triton.jit
def _gradient(z, targets, log_totals, out, vocabulary, stride, inverse, slope, width: tl.constexpr):
    """slope ([j = target] - p_j), a block of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * width + tl.arange(0, width)
    there = at < vocabulary
    x = tl.load(z + row * stride + at, mask=there, other=-float("inf")) * inverse
    chosen = tl.where(at == tl.load(targets + row), 1.0, 0.0)
    d = chosen - tl.exp(x - tl.load(log_totals + row))
    tl.store(out + row * vocabulary + at, (d * slope).to(out.dtype.element_ty), mask=there)


def width_for(vocabulary: int, most: int) -> int:
    """Return a power of two, of which a vocabulary has several, small ones too."""
    return min(most, triton.next_power_of_2(max(16, vocabulary // 5)))


class RowNumbers(NamedTuple):
    """Log-probabilities of the targets, entropies, and log-sum-exps of rows of logits; all float32 (n,)."""

    logprobs: Tensor
    entropies: Tensor
    log_totals: Tensor


def log_probabilities(z: Tensor, targets: Tensor, *, temperature: float) -> RowNumbers:
    """Compute the numbers of logits (n, V) over the temperature."""
    logprobs, entropies, log_totals = z.new_empty(3, len(z)).unbind()
    vocabulary = z.shape[1]
    _log_probabilities[(len(z),)](  # pyright: ignore[reportIndexIssue]
        z, targets, logprobs, entropies, log_totals, vocabulary, z.stride(0), 1 / temperature,
        width=width_for(vocabulary, WIDTH), num_warps=WARPS,
    )  # fmt: skip
    return RowNumbers(logprobs, entropies, log_totals)


def gradient(
    z: Tensor, targets: Tensor, log_totals: Tensor, *, temperature: float, slope: float, dtype: torch.dtype
) -> Tensor:
    """Return `slope` times the derivative of the log-probabilities with respect to z over the temperature, (n, V)."""
    vocabulary = z.shape[1]
    out = z.new_empty(z.shape, dtype=dtype)
    width = width_for(vocabulary, WIDTH)
    _gradient[(len(z), triton.cdiv(vocabulary, width))](  # pyright: ignore[reportIndexIssue]
        z, targets, log_totals, out, vocabulary, z.stride(0), 1 / temperature, slope, width=width, num_warps=WARPS
    )
    return out
