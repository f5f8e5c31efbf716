"""Cache of keys and values while decoding: a stretch of memory for each row, of one width for all."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attended(q: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor, scaling: float) -> Tensor:
    """Attention of q (B, Q, d), which share keys and values (B, W, d), under an additive mask (B, 1, W). Scores are
    kept in float32: bfloat16 is coarse where all of them are large.
    """
    if q.dtype != torch.float32:
        q, keys, values = (x.unsqueeze(1) for x in (q, keys, values))
        mask = mask.unsqueeze(1).expand(-1, -1, q.shape[2], -1)
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scaling)
    scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=scaling)
    return torch.bmm(scores.softmax(-1), values)


class RowCache:
    """Keys and values of every row, entries (layers, rows, kv heads, 2, width, head size), and the rotation of each of
    the `width` positions, by which the queries, key and value of a kv head are multiplied: cos, and sin with the sign
    of its half, each (width, 1, queries + 2, head size), 1 and 0 for the value, which is not rotated.
    """

    def __init__(self, entries: Tensor, cos: Tensor, sin: Tensor, *, heads: int) -> None:
        self.entries, self.cos, self.sin, self.heads = entries, cos, sin, heads
        self.width, self.size = cos.shape[0], entries.shape[-1]

    def mask(self, position: Tensor, width: int) -> Tensor:
        """Additive, (R * kv heads, 1, width): nothing behind `position` of a row is seen."""
        rows, device = len(position), position.device
        ahead = torch.arange(width, device=device) > position.unsqueeze(1)
        mask = torch.zeros(rows, 1, width, dtype=self.entries.dtype, device=device)
        mask = mask.masked_fill_(ahead.unsqueeze(1), -torch.inf)
        return mask.repeat_interleave(self.heads, 0, output_size=rows * self.heads)

    def places(self, row: Tensor, position: Tensor) -> Tensor:
        """Flat index in a layer of the key and the value of each kv head, for N new tokens."""
        lanes = torch.arange(2 * self.heads, device=row.device) + row.unsqueeze(1) * (2 * self.heads)
        return (lanes * self.width + position.unsqueeze(1)).view(-1)

    def write(self, layer: int, places: Tensor, kv: Tensor) -> None:
        """kv (N, kv heads, 2, d)."""
        self.entries[layer].view(-1, self.size).index_copy_(0, places, kv.reshape(-1, self.size))

    def copy(self, source: int, to: int, tokens: int) -> None:
        """Row `to` now holds what `source` does."""
        self.entries[:, to, ..., :tokens, :] = self.entries[:, source, ..., :tokens, :]

    def exchange(self, a: int, b: int, tokens: int) -> None:
        entries = self.entries[..., :tokens, :]
        kept = entries[:, b].clone()
        entries[:, b] = entries[:, a]
        entries[:, a] = kept
