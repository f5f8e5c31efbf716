"""Packed attention as one ragged call: the keys of each row, those in front of it and its own, are gathered first.

Today's is a loop over blocks of rows of similar length (tinyrl/models/packing.py), and a run on a GPU tries another
such call, torch's varlen_attn (tinyrl/models/varlen.py). This one calls the kernel below that, and gathers the keys
again in backward. Keys and values are narrower than queries by the number of heads that share them, so copying a
prompt's for each of its responses is cheap.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.gpu import flash
from tinyrl.models.packing import Packing


class GatheredKeys:
    """The rows of a packing, and for each of the M keys that they read the flat token that has it."""

    def __init__(self, packing: Packing) -> None:
        slots = packing.slots.cpu()
        sizes = torch.tensor([block.num_rows * block.width for block in packing.blocks])
        widths = torch.tensor([block.width for block in packing.blocks])
        ends = sizes.cumsum(0)
        block = torch.searchsorted(ends, slots, right=True)  # of each token
        inside = (slots - (ends - sizes)[block]) // widths[block]
        number = block * len(slots) + inside  # the same for the tokens of a row, which stand together
        numbers, lengths = torch.unique_consecutive(number, return_counts=True)
        pieces = list(accumulate(packing.pieces, initial=0))
        keys: list[Tensor] = []
        counts: list[int] = []
        at = 0
        for row_number, length in zip(numbers.tolist(), lengths.tolist(), strict=True):
            in_front = packing.blocks[row_number // len(slots)].prefix_pieces
            spans = [torch.arange(pieces[piece], pieces[piece + 1]) for piece in in_front]
            row = torch.cat([*spans, torch.arange(at, at + length)])
            keys.append(row)
            counts.append(len(row))
            at += length
        device = packing.slots.device
        starts_q = [0, *accumulate(lengths.tolist())]
        starts_k = [0, *accumulate(counts)]
        self.packing = packing
        self.keys = torch.cat(keys).to(device)
        self.rows = flash.Rows(
            cu_q=torch.tensor(starts_q, dtype=torch.int32, device=device),
            cu_k=torch.tensor(starts_k, dtype=torch.int32, device=device),
            most_q=int(lengths.max()),
            most_k=max(counts),
        )


class RaggedAttention(torch.autograd.Function):
    """apply(q (N, heads, d), k, v (N, kv heads, d), gathered, scale) -> (N, heads, d). Keys are gathered again in
    backward; the gradients of a key that several rows read are summed in float32.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, gathered: GatheredKeys, scale: float):  # pyright: ignore[reportIncompatibleMethodOverride]
        keys = gathered.keys
        found = flash.forward(q, k[keys], v[keys], gathered.rows, causal=True, scale=scale)
        ctx.save_for_backward(q, k, v, found.out, found.lse, found.rng_state, found.unused)
        ctx.gathered = gathered
        ctx.scale = scale
        return found.out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, *rest = ctx.saved_tensors
        keys, rows = ctx.gathered.keys, ctx.gathered.rows
        dq, dk, dv = flash.backward(grad, q, k[keys], v[keys], flash.Forward(*rest), rows, causal=True, scale=ctx.scale)
        return dq, _summed(dk, keys, like=k), _summed(dv, keys, like=v), None, None


def _summed(grads: Tensor, keys: Tensor, *, like: Tensor) -> Tensor:
    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    return total.index_add_(0, keys, grads.float()).to(like.dtype)


class RaggedAttend:
    """Takes the place of `packing.attend`. The keys are gathered once for all layers of a micro-batch."""

    def __init__(self) -> None:
        self._last: GatheredKeys | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
        if self._last is None or self._last.packing is not packing:
            self._last = GatheredKeys(packing)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return RaggedAttention.apply(query, key, value, self._last, scale)  # pyright: ignore[reportReturnType]
