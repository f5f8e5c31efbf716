"""Packed attention in one call of torch's `varlen_attn` over the rows of a packing, on a GPU in half precision.

The rows stand end to end as they are; for each of them the keys that it reads, those of the pieces in front of it and
its own, are gathered. Keys and values are narrower than queries by the heads that share them, so copying a prompt's for
each of its responses is cheap. (Merging two calls by their log-sum-exps is not an alternative: the gradient of those is
dropped.) What is packed, and the path by blocks, is in packing.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tinyrl.models.autograd import once_differentiable
from tinyrl.models.device import HALVES, to_device

LARGEST_HEAD = 256  # of flash attention
HEAD_MULTIPLE = 8
CAUSAL = (-1, 0)  # a window from the first key to the query itself, at the lower right corner: the last query reads all


@dataclass(frozen=True)
class Row:
    """Tokens `first` to `first + length` of a flat sequence, and the numbers of the pieces in front of them."""

    first: int
    length: int
    prefix_pieces: tuple[int, ...]


@dataclass(frozen=True)
class VarlenRows:
    """Rows as `varlen_attn` takes them.

    keys (M,): the flat token of each key, row by row; None where they are the flat sequence itself. starts_q, starts_k
    (R + 1,) int32: where the queries and keys of each row begin. most_q, most_k: of the longest row.
    """

    keys: Tensor | None
    starts_q: Tensor
    starts_k: Tensor
    most_q: int
    most_k: int

    @classmethod
    def of(cls, rows: Sequence[Row], *, pieces: Sequence[int], device: torch.device) -> VarlenRows:
        """Find the keys of rows; pieces: lengths into which the flat sequence splits."""
        begins = list(accumulate(pieces, initial=0))
        in_order = sorted(rows, key=lambda row: row.first)
        spans: list[Tensor] = []
        counts: list[int] = []
        for row in in_order:
            in_front = [torch.arange(begins[piece], begins[piece + 1]) for piece in row.prefix_pieces]
            own = torch.arange(row.first, row.first + row.length)
            spans += [*in_front, own]
            counts.append(sum(map(len, in_front)) + row.length)
        lengths = [row.length for row in in_order]
        gathers = any(row.prefix_pieces for row in in_order)

        def starts(of: list[int]) -> Tensor:
            return to_device(torch.tensor([0, *accumulate(of)], dtype=torch.int32), device)

        return cls(
            keys=to_device(torch.cat(spans), device) if gathers else None,
            starts_q=starts(lengths),
            starts_k=starts(counts),
            most_q=max(lengths),
            most_k=max(counts),
        )


class _Gather(torch.autograd.Function):
    """x[keys]. A prompt's keys are read by each row of its group: their gradients are summed in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, keys: Tensor) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.length = len(x)
        return x.index_select(0, keys)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (keys,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.length, *grad.shape[1:], dtype=torch.float32)
        return total.index_add_(0, keys, grad.float()).to(grad.dtype), None


def computes_varlen(query: Tensor) -> bool:
    """Return whether `varlen_attn` has a kernel for queries of this dtype and size of heads."""
    size = query.shape[-1]
    return query.dtype in HALVES and size <= LARGEST_HEAD and size % HEAD_MULTIPLE == 0


def attend_varlen(query: Tensor, key: Tensor, value: Tensor, rows: VarlenRows, scaling: float | None) -> Tensor:
    """Attend with flat queries (N, heads, d) to keys and values (N, kv heads, d); return (N, heads, d). Query i of a
    row attends to the keys in front of the row and to keys 0..i of the row.
    """
    from torch.nn.attention.varlen import varlen_attn  # which imports torch's compiler: seconds

    options: dict[str, Any] = {"scale": scaling, "window_size": CAUSAL}
    if query.shape[1] != key.shape[1] and "enable_gqa" in varlen_options():
        options["enable_gqa"] = True
    if rows.keys is not None:
        key = _Gather.apply(key, rows.keys)
        value = _Gather.apply(value, rows.keys)
    out: Any = varlen_attn(query, key, value, rows.starts_q, rows.starts_k, rows.most_q, rows.most_k, **options)
    return out


@cache
def varlen_options() -> frozenset[str]:
    """Return the parameters of this torch's `varlen_attn`: 2.10 has no scale and no window, and 2.11 takes fewer key
    heads than query heads without being told.
    """
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def varlen_is_missing() -> str | None:
    """Return why this torch cannot compute `attend_varlen`; None where it can."""
    if {"scale", "window_size"} <= varlen_options():
        return None
    return f"varlen_attn of torch {torch.__version__} takes no window; it needs torch 2.11"
