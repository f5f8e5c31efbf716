"""Caches of keys and values while decoding: a stretch of memory a row, or blocks that rows share and give back.

On a CPU each row has its stretch, of one width for all, where a step is two products over plain slices. On a GPU the
cache is blocks of a few tokens (PagedAttention, 2309.06180): a row holds as many as it has tokens, the rows of a prompt
hold the blocks that it fills once, and a step reads each row to its own length.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tinyrl.models.device import to_device

# A tile of keys that keeps tensor cores busy; of a row half a block lies idle at its end, on average.
BLOCK = 64
MEMBERS = 8  # rows of a group that read their prompt together
PROGRAMS, MOST_PARTS = 256, 32  # a span is read in parts where there are fewer spans than a GPU can work on at a time
Reader = Callable[[int, Tensor], Tensor]


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether our kernels run there: Triton, which comes with torch for CUDA on Linux, knows GPUs from Ampere on."""
    return (
        device.type == "cuda"
        and torch.cuda.is_available()
        and importlib.util.find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


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


@dataclass
class Parts:
    """What attention over parts of a row's blocks leaves of each: its state, and the log2 of its sum of exponentials,
    (R, kv heads, shared + own, queries, d) and without d. shared: parts of what rows read together; own: of the rest.
    """

    states: Tensor
    sizes: Tensor
    shared: int
    own: int

    @staticmethod
    def of(q: Tensor) -> Parts:
        """Their memory, for queries (R, kv heads, queries, d)."""
        rows, heads, queries, size = q.shape
        # A group has two rows or more, and usually all that it may.
        shared, own = _parts(max(1, rows // MEMBERS) * heads) if rows > 1 else 0, _parts(rows * heads)
        sizes = q.new_empty(rows, heads, shared + own, queries, dtype=torch.float32)
        return Parts(sizes.new_empty(*sizes.shape, size), sizes, shared, own)


def _parts(spans: int) -> int:
    return min(MOST_PARTS, 1 << (-(-PROGRAMS // spans) - 1).bit_length())


class Cache:
    """Keys and values of every row, and the rotation of each of the `width` positions, by which the queries, key and
    value of a kv head are multiplied: cos, and sin with the sign of its half, each (width, 1, queries + 2, head size),
    1 and 0 for the value, which is not rotated.
    """

    def __init__(self, entries: Tensor, cos: Tensor, sin: Tensor, *, heads: int, scaling: float) -> None:
        self.entries, self.cos, self.sin, self.heads, self.scaling = entries, cos, sin, heads, scaling
        self.width, self.size = cos.shape[0], entries.shape[-1]

    def mask(self, position: Tensor, width: int) -> Tensor:
        """Additive, (R * kv heads, 1, width): nothing behind `position` of a row is seen."""
        rows, device = len(position), position.device
        ahead = torch.arange(width, device=device) > position.unsqueeze(1)
        mask = torch.zeros(rows, 1, width, dtype=self.entries.dtype, device=device)
        mask = mask.masked_fill_(ahead.unsqueeze(1), -torch.inf)
        return mask.repeat_interleave(self.heads, 0, output_size=rows * self.heads)


class RowCache(Cache):
    """A stretch of `width` tokens for every row: entries (layers, rows, kv heads, 2, width, head size)."""

    def prompts(self, rows: list[range], width: int) -> Callable[[int, Tensor], None]:
        """What puts a layer's keys and values of prompts, (P, width, kv heads, 2, d), into the rows of each."""

        def put(layer: int, kv: Tensor) -> None:
            kv, entries = kv.permute(0, 2, 3, 1, 4), self.entries[layer]
            for p, span in enumerate(rows):
                entries[span.start : span.stop, :, :, :width] = kv[p]

        return put

    def places(self, row: Tensor, position: Tensor) -> Tensor:
        """Flat index in a layer of the key and the value of each kv head, for N new tokens."""
        lanes = torch.arange(2 * self.heads, device=row.device) + row.unsqueeze(1) * (2 * self.heads)
        return (lanes * self.width + position.unsqueeze(1)).view(-1)

    def write(self, layer: int, places: Tensor, kv: Tensor) -> None:
        """kv (N, kv heads, 2, d)."""
        self.entries[layer].view(-1, self.size).index_copy_(0, places, kv.reshape(-1, self.size))

    def window(self, rows: Sequence[int], width: int) -> Callable[[int], tuple[Tensor, Tensor]]:
        """What gives a layer's keys and values of these rows, (R, kv heads, width, d) each."""
        follow = rows[-1] - rows[0] + 1 == len(rows)
        where: Any = slice(rows[0], rows[-1] + 1) if follow else to_device(torch.tensor(rows), self.entries.device)

        def seen(layer: int) -> tuple[Tensor, Tensor]:
            entries = self.entries[layer, :, :, :, :width][where]
            return entries[:, :, 0], entries[:, :, 1]

        return seen

    def reader(self, position: Tensor, width: int) -> Reader:
        """What attends, in a layer, from q (R, kv heads, queries, d) of the first R rows to all up to `position`."""
        mask = self.mask(position, width)

        def read(layer: int, q: Tensor) -> Tensor:
            q = q.flatten(0, 1)
            keys, values = self.entries[layer].flatten(0, 1)[: len(q), :, :width].unbind(1)
            return attended(q, keys, values, mask=mask, scaling=self.scaling)

        return read

    def copy(self, source: int, to: int, tokens: int) -> None:
        """Row `to` now holds what `source` does."""
        self.entries[:, to, ..., :tokens, :] = self.entries[:, source, ..., :tokens, :]

    def exchange(self, a: int, b: int, tokens: int) -> None:
        entries = self.entries[..., :tokens, :]
        kept = entries[:, b].clone()
        entries[:, b] = entries[:, a]
        entries[:, a] = kept


class BlockCache(Cache):
    """Blocks of `block` tokens: entries (layers, (1 + blocks) * block, kv heads, 2, head size). Nobody's tokens are in
    block 0, where rows of a graph that are not live write theirs.

    Which blocks a row holds is decided on the host (`claim`, `grow`, `free`) and told the device by `publish`, at
    addresses that never move: `table` (rows, blocks of a row); `start` (rows,), the first token that a row reads by
    itself; `groups` (rows / 2, 1 + MEMBERS), of rows with a prompt in common how many tokens are read for all at once,
    and their slots, -1 for none.
    """

    def __init__(
        self, entries: Tensor, cos: Tensor, sin: Tensor, *, heads: int, scaling: float, rows: int, block: int
    ) -> None:
        super().__init__(entries, cos, sin, heads=heads, scaling=scaling)
        self.block, self.by_kernel = block, entries.device.type == "cuda"
        self.total = entries.shape[1] // self.block - 1
        self.spare = list(range(self.total, 0, -1))
        self.users = [0] * (self.total + 1)
        self.blocks: list[list[int]] = [[] for _ in range(rows)]
        self.prompt = [0] * rows  # tokens that were read when the row began
        self.shared = [0] * rows  # leading blocks that others may hold too
        shapes = (rows, self.blocks_of(self.width)), (rows,), (max(1, rows // 2), 1 + MEMBERS)
        sizes = [int(np.prod(shape)) for shape in shapes]
        self.layout = torch.zeros(sum(sizes), dtype=torch.int32, device=entries.device)
        self.table, self.start, self.groups = (
            part.view(shape) for part, shape in zip(self.layout.split(sizes), shapes, strict=True)
        )
        self.published: np.ndarray | None = None

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block)

    # ---- who holds what ----

    def claim(self, rows: list[range], lengths: list[int]) -> None:
        """Blocks for prompts of so many tokens: those that a prompt fills once for all of its rows."""
        for span, length in zip(rows, lengths, strict=True):
            common = length // self.block if len(span) > 1 else 0
            first = [self.spare.pop() for _ in range(common)]
            for row in span:
                assert not self.blocks[row]
                self.blocks[row], self.prompt[row], self.shared[row] = [*first], length, common
                for block in first:
                    self.users[block] += 1
                self._grow(row, length)

    def grow(self, rows: Sequence[int], tokens: Sequence[int]) -> bool:
        """Blocks for so many tokens in each of these rows; False, and none at all, where there are too few."""
        missing = sum(max(0, self.blocks_of(n) - len(self.blocks[r])) for r, n in zip(rows, tokens, strict=True))
        if missing > len(self.spare):
            return False
        for row, count in zip(rows, tokens, strict=True):
            self._grow(row, count)
        return True

    def _grow(self, row: int, tokens: int) -> None:
        while len(self.blocks[row]) < self.blocks_of(tokens):
            self.blocks[row].append(block := self.spare.pop())
            self.users[block] += 1

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            for block in self.blocks[row]:
                self.users[block] -= 1
                if not self.users[block]:
                    self.spare.append(block)
            self.blocks[row], self.shared[row] = [], 0

    def copy(self, source: int, to: int, tokens: int) -> None:
        """Row `to` now holds what `source` did, which holds nothing any more."""
        del tokens
        self.free([to])
        self.exchange(source, to, 0)

    def exchange(self, a: int, b: int, tokens: int) -> None:
        del tokens
        held: list[list[Any]] = [self.blocks, self.prompt, self.shared]
        for of in held:
            of[a], of[b] = of[b], of[a]

    def publish(self, live: int) -> None:
        """Tell the device; nothing is copied where nothing has changed since the last time."""
        table, start, groups = (np.zeros(part.shape, np.int32) for part in (self.table, self.start, self.groups))
        groups[:, 1:] = -1
        for row, blocks in enumerate(self.blocks):
            table[row, : len(blocks)] = blocks
        for group, members in enumerate(self._groups(live)):
            tokens = self.shared[members[0]] * self.block
            groups[group, 0], groups[group, 1 : 1 + len(members)], start[members] = tokens, members, tokens
        layout = np.concatenate([table.ravel(), start, groups.ravel()])
        if self.published is None or not np.array_equal(layout, self.published):
            self.layout.copy_(to_device(torch.from_numpy(layout.copy()), self.layout.device))
            self.published = layout

    def _groups(self, live: int) -> list[list[int]]:
        """Live rows that hold the same blocks, two to MEMBERS of them."""
        alike: dict[int, list[int]] = {}
        for row in range(live):
            if self.shared[row]:
                alike.setdefault(self.blocks[row][0], []).append(row)
        parts = [rows[i : i + MEMBERS] for rows in alike.values() for i in range(0, len(rows), MEMBERS)]
        return [part for part in parts if len(part) > 1]

    # ---- what a decoder reads and writes ----

    def prompts(self, rows: list[range], width: int) -> Callable[[int, Tensor], None]:
        """As RowCache's; each row was claimed. What a prompt's rows have in common is written once."""
        sources, places = [], []
        for p, span in enumerate(rows):
            for row in span:
                tokens = np.arange(0 if row == span[0] else self.shared[row] * self.block, self.prompt[row])
                blocks = np.array(self.blocks[row])[tokens // self.block]
                sources.append(p * width + tokens)
                places.append(blocks * self.block + tokens % self.block)
        both = torch.from_numpy(np.stack([np.concatenate(sources), np.concatenate(places)]))
        source, place = to_device(both, self.entries.device)

        def put(layer: int, kv: Tensor) -> None:
            self.write(layer, place, kv.flatten(0, 1)[source])

        return put

    def places(self, row: Tensor, position: Tensor) -> Tensor:
        """Index in a layer of N new tokens."""
        block = self.table[row, position // self.block]
        return block.long() * self.block + position % self.block

    def write(self, layer: int, places: Tensor, kv: Tensor) -> None:
        self.entries[layer].index_copy_(0, places, kv)

    def window(self, rows: Sequence[int], width: int) -> Callable[[int], tuple[Tensor, Tensor]]:
        row = to_device(torch.tensor(rows), self.table.device)
        places = self.places(row.unsqueeze(1), torch.arange(width, device=self.table.device))

        def seen(layer: int) -> tuple[Tensor, Tensor]:
            keys, values = self.entries[layer][places].unbind(3)
            return keys.transpose(1, 2), values.transpose(1, 2)

        return seen

    def reader(self, position: Tensor, width: int) -> Reader:
        """As RowCache's, of a row to its own length, whatever the width; by a kernel, or its twin in plain torch."""
        if position.is_meta:
            return lambda layer, q: Parts.of(q).states[:, :, 0].to(q.dtype)  # of a kernel only the memory
        if self.by_kernel:
            from tinyrl.generation.kernels import attend

            rows = len(position)
            table, start, groups = self.table[:rows], self.start[:rows], self.groups[: max(1, rows // 2)]
            known = {"table": table, "start": start, "groups": groups, "position": position}
            return lambda layer, q: attend(q, self.entries[layer], **known, block=self.block, scaling=self.scaling)
        mask, seen = self.mask(position, width), self.window(range(len(position)), width)

        def read(layer: int, q: Tensor) -> Tensor:
            keys, values = (x.flatten(0, 1) for x in seen(layer))
            return attended(q.flatten(0, 1), keys, values, mask=mask, scaling=self.scaling)

        return read


AnyCache = RowCache | BlockCache
