"""A decode step whose attention is torch's flash kernel with the length of each row.

Today's step (tinyrl/generation/decoder.py) attends to the whole width of the cache under a mask. Here a row reads its
own entries only, and the cache is not copied: seen as one ragged tensor of keys, a row begins every kv heads x 2 x
width entries, and a head every 2 x width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu import flash
from tinyrl.generation.decoder import Decoder, RowCache


def ragged_view(entries: Tensor) -> tuple[Tensor, Tensor]:
    """View a layer's entries (rows, kv heads, 2, width, d) as keys and values (T, kv heads, d)."""
    rows, heads, _, width, size = entries.shape
    shape = ((rows - 1) * heads * 2 * width + width, heads, size)
    strides = (size, 2 * width * size, 1)
    start = entries.storage_offset()
    return entries.as_strided(shape, strides, start), entries.as_strided(shape, strides, start + width * size)


class FlashDecoder(Decoder):
    """A decoder whose step reads as many columns of a row as the row has."""

    def step(self, token: Tensor, position: Tensor, *, cache: RowCache, width: int) -> Tensor:
        count, shared = len(token), self.queries
        row = torch.arange(count + 1, dtype=torch.int32, device=token.device)
        apart = self.num_kv_heads * 2 * cache.width  # entries from one row's first to the next row's
        rows = flash.Rows(cu_q=row, cu_k=row * apart, most_q=1, most_k=cache.width)
        lengths = (position + 1).int()
        places = cache.places(torch.arange(count, device=token.device), position)
        rotation = cache.cos[position], cache.sin[position]
        x = self.embedding[token]
        for i, layer in enumerate(self.layers):
            qkv = self._qkv(layer, x, rotation)
            cache.write(i, places, qkv[:, :, shared:])
            q = qkv[:, :, :shared].flatten(1, 2)
            k, v = ragged_view(cache.entries[i, :count])
            found = flash.forward(q, k, v, rows, causal=False, scale=self.scaling, lengths=lengths)
            x = self._rest(layer, x, found.out.flatten(1))
        return self._normed(x, self.norm)
