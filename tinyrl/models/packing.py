"""Packed attention: rows end to end without padding; each group's prompt, and the prefix of all prompts, stored once.

A flat sequence [start | prompt 1 | response 1.1 | response 1.2 | ... | prompt 2 | ...] goes through the model as one
row, so everything but attention does no work twice and none for padding. Attention is replaced by name in the library's
table of attention functions: no module changes, and adapters work as usual. Flat queries, keys and values are laid into
blocks of similar length, padded on the right; a row attends to itself, and to the keys in front of it: the start and,
for a response, its prompt. No tensor is as large as the flat sequence squared, nor as a row squared: on a CPU, where
keys in front need a mask, the queries of a long row attend in blocks. On a GPU one call (varlen.py) takes the place of
the blocks where a run's trial has chosen it (training/kernel_trial.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tinyrl.models.autograd import once_differentiable
from tinyrl.models.device import to_device
from tinyrl.models.varlen import Row, VarlenRows, attend_varlen, computes_varlen

ATTENTION = "tinyrl_packed"
# Options that some models pass to attention, which this one does not support.
REFUSED = ("softcap", "sliding_window", "position_bias", "s_aux", "sinks", "cache")
LEAST_START = 8  # tokens: a shorter common prefix is not worth its attention calls
MASK_ELEMENTS = 1 << 22  # of the largest mask: 16 MB in float32. Where it would be larger, queries attend in blocks


class CannotPack(ValueError):
    """The model asks for attention that is not computed over packed rows."""


@dataclass(frozen=True)
class Block:
    """Rows of one attention call: `num_rows` by `width` slots, behind the keys of some pieces."""

    num_rows: int
    width: int
    prefix_pieces: tuple[int, ...]


@dataclass(frozen=True)
class Packing:
    """Lays a flat sequence of N tokens into blocks.

    slots (N,): place of each token in the blocks laid end to end; pieces: lengths into which the flat sequence splits,
    so that keys shared by several rows are a piece of their own; rows: the same rows without blocks; varlen: attend by
    one call over them where a kernel can. State: the blocks' masks, by dtype.
    """

    slots: Tensor
    blocks: list[Block]
    pieces: list[int]
    rows: list[Row]
    varlen: bool = False
    masks: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, index: int, dtype: torch.dtype) -> Tensor:
        """Return (queries, keys) of 0 and -inf for the last queries of a block behind others, made once for all layers:
        all queries of its rows, or as many as MASK_ELEMENTS allow.
        """
        if (index, dtype) not in self.masks:
            block = self.blocks[index]
            keys = sum(self.pieces[piece] for piece in block.prefix_pieces) + block.width
            queries = min(block.width, max(1, MASK_ELEMENTS // keys))
            full = torch.full((queries, keys), -torch.inf, dtype=dtype, device=self.slots.device)
            self.masks[index, dtype] = full.triu(keys - queries + 1)
        return self.masks[index, dtype]

    @cached_property
    def varlen_rows(self) -> VarlenRows:
        """Lay out the rows for one call, once for all layers."""
        return VarlenRows.of(self.rows, pieces=self.pieces, device=self.slots.device)


def shared_start(prompts: Iterable[Sequence[int]]) -> int:
    """Return the length of the prefix common to all prompts, shorter than the shortest one; 0 if below LEAST_START."""
    prompts = list(prompts)
    start = min(common_length(prompts), min(map(len, prompts)) - 1)
    return start if start >= LEAST_START else 0


def common_length(texts: Sequence[Sequence[int]]) -> int:
    """Return the length of the prefix common to one or more texts: that of the lexicographically first and last."""
    first = min(texts, key=tuple)
    last = max(texts, key=tuple)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))


def pack(
    groups: Sequence[tuple[int, Sequence[int]]],
    *,
    start: int = 0,
    device: torch.device | str = "cpu",
    varlen: bool = False,
) -> Packing:
    """Lay out groups of (prompt length, response lengths), in this order, behind `start` tokens of all prompts. A group
    with at most one non-empty response is one causal row; else its prompt is a row of its own. varlen: as in Packing.
    """
    pieces = [start] if start else []
    prefix = tuple(range(len(pieces)))
    standalone: list[tuple[int, int]] = []  # (at, length) of rows that attend to themselves and the start
    grouped: list[tuple[tuple[int, ...], list[tuple[int, int]]]] = []  # (pieces in front, responses)
    at = start
    for prompt, responses in groups:
        rows = []
        end = at + prompt
        for length in responses:
            rows += [(end, length)] if length else []
            end += length
        if len(rows) > 1:
            standalone.append((at, prompt))
            grouped.append(((*prefix, len(pieces)), rows))
            pieces += [prompt, end - at - prompt]
        else:
            standalone.append((at, end - at))
            pieces.append(end - at)
        at = end
    slots = torch.empty(at, dtype=torch.long)
    blocks = []
    laid: list[Row] = []
    offset = 0
    for pieces_in_front, rows in [((), [(0, start)] if start else []), (prefix, standalone), *grouped]:
        laid += [Row(first, length, pieces_in_front) for first, length in rows]
        buckets: list[list[tuple[int, int]]] = []  # the shortest row is more than half as long as the longest
        for row in sorted(rows, key=lambda row: -row[1]):
            if buckets and 2 * row[1] > buckets[-1][0][1]:
                buckets[-1].append(row)
            else:
                buckets.append([row])
        for bucket in buckets:
            width = bucket[0][1]
            for first, length in bucket:
                slots[first : first + length] = torch.arange(offset, offset + length)
                offset += width
            blocks.append(Block(len(bucket), width, pieces_in_front))
    return Packing(to_device(slots, device), blocks, pieces, laid, varlen)


# The decoder and the packing in use. Not a context variable: a recomputed layer runs on a thread of autograd's own.
_in_use: list[tuple[Any, Packing]] = []


@contextmanager
def attending(backbone: Any, packing: Packing | None) -> Iterator[None]:
    """Replace the decoder's attention by the packed one, unless packing is None."""
    if packing is None:
        yield
        return
    own = backbone.config._attn_implementation
    backbone.config._attn_implementation = ATTENTION
    _in_use.append((backbone, packing))
    try:
        yield
    finally:
        _in_use.pop()
        backbone.config._attn_implementation = own


def attending_as_now() -> Callable[[], AbstractContextManager[None]]:
    """Return a way to restore the current attention later, for a layer that is recomputed in backward."""
    return partial(attending, *_in_use[-1]) if _in_use else nullcontext


class _Read(torch.autograd.Function):
    """blocks[slots]. No slot is read twice, so backward writes instead of summing: faster, and deterministic."""

    @staticmethod
    def forward(ctx, blocks: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.num_slots = len(blocks)
        return blocks.index_select(0, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (slots,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_slots, *grad.shape[1:]).index_copy_(0, slots, grad), None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as the library's attention functions do: (1, heads, N, d) queries, keys and values -> (1, N, heads, d)."""
    refused = [name for name in REFUSED if options.get(name) is not None]
    if refused or dropout or attention_mask is not None:
        raise CannotPack(f"{type(module).__name__} asks for {', '.join(refused) or 'dropout or a mask'}")
    _, packing = _in_use[-1]
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    return attend(q, k, v, packing, scaling).unsqueeze(0), None


def attend(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    """Attend with flat queries (N, heads, d) to keys and values (N, kv heads, d); return (N, heads, d). Query i of a
    block attends to the keys in front of the rows and to keys 0..i of its row; padding is last.
    """
    if packing.varlen and computes_varlen(query):
        return attend_varlen(query, key, value, packing.varlen_rows, scaling)
    sizes = [block.num_rows * block.width for block in packing.blocks]
    laid = []
    for x in (query, key, value):  # for each block (rows, heads, width, d), 0 where there is no token
        padded = x.new_zeros(sum(sizes), *x.shape[1:]).index_copy(0, packing.slots, x)
        parts = zip(packing.blocks, padded.split(sizes), strict=True)
        laid.append([part.unflatten(0, (-1, block.width)).transpose(1, 2) for block, part in parts])
    pieces = [x.split(packing.pieces) for x in (key, value)]
    outputs = []
    for i, (block, q, k, v) in enumerate(zip(packing.blocks, *laid, strict=True)):
        if block.prefix_pieces:
            shape = (block.num_rows, -1, -1, -1)  # keys (P, heads, d) that stand in front of every row
            in_front = [[x[piece].transpose(0, 1).expand(shape) for piece in block.prefix_pieces] for x in pieces]
            k, v = (torch.cat([*front, own], 2) for front, own in zip(in_front, (k, v), strict=True))
        heads = q.shape[1]
        grouped = heads != k.shape[1]
        if q.is_cuda and grouped and not flash_runs(q, k, v):
            k, v = (x.repeat_interleave(heads // x.shape[1], dim=1, output_size=heads) for x in (k, v))
            grouped = False
        options: dict[str, Any] = {"scale": scaling, "enable_gqa": grouped}
        if not block.prefix_pieces:
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        elif q.is_cuda:  # flash kernels know this shape without a mask
            causal = causal_lower_right(q.shape[2], k.shape[2])
            attended = scaled_dot_product_attention(q, k, v, attn_mask=causal, **options)  # pyright: ignore
        else:
            attended = attend_by_blocks(q, k, v, mask=packing.mask(i, q.dtype), **options)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return _Read.apply(torch.cat(outputs), packing.slots)


def flash_runs(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether flash attention computes this on a GPU: not in float32, nor on one before Ampere (T4, V100). It
    alone reads keys that several query heads share as they are. The other kernel without a matrix of queries by keys
    needs as many key heads as query heads, and products keep that matrix for backward.
    """
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True))


def attend_by_blocks(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor, **options: Any) -> Tensor:
    """Attend with (rows, heads, width, d) queries, the last of which read all keys, as many at a time as the mask has
    rows. A block reads no key behind its last query, so its mask ends at the lower right corner of `mask`.
    """
    queries, keys = mask.shape
    width = query.shape[2]
    parts = []
    for first in range(0, width, queries):
        last = min(first + queries, width)
        end = keys - width + last  # keys that the block reads
        part = scaled_dot_product_attention(
            query[:, :, first:last],
            key[:, :, :end],
            value[:, :, :end],
            attn_mask=mask[queries - (last - first) :, keys - end :],
            **options,
        )
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


AttentionInterface.register(ATTENTION, packed_attention)
