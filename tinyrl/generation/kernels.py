"""Triton kernels of a decoded token: attention over blocks of the cache, and the draw from logits.

Imported only where they run: triton comes with torch for CUDA on Linux. `BlockCache.reader` and
`engine.sample_tokens` hold the same in plain torch.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from tinyrl.generation.cache import MEMBERS, Parts

LEAST_TILE = 16  # rows of a product on tensor cores
CHUNK = 2048  # logits that a program reads
LOG2_E = math.log2(math.e)


@contextmanager
def as_runtime_error() -> Iterator[None]:
    """A kernel that this GPU or this triton cannot compile is found by the trial of the engine."""
    try:
        yield
    except TritonError as error:
        raise RuntimeError(f"triton: {error}") from error


# ---- attention ----


@triton.jit
def read_blocks(
    q,
    entries,
    table,
    start,
    groups,
    position,
    states,
    sizes,
    q_row,
    q_head,
    table_row,
    scale,
    parts_all,
    first_part,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Softmax attention of one part of a span of blocks, with the log2 of its sum of exponentials (FlashAttention,
    2205.14135). GROUP 1: a row's own span, behind what its group shares. Else the shared one, of up to GROUP rows.
    """
    unit, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, TILE)
    member, query = lane // QUERIES, lane % QUERIES
    if GROUP == 1:
        of = unit
        row = tl.where(member == 0, unit, -1)
        begin = tl.load(start + unit)
        end = tl.load(position + unit).to(tl.int32) + 1
    else:
        of = tl.load(groups + unit * (GROUP + 1) + 1)
        row = tl.load(groups + unit * (GROUP + 1) + 1 + member, mask=member < GROUP, other=-1)
        begin = 0
        end = tl.load(groups + unit * (GROUP + 1))
    present = row >= 0
    dim = tl.arange(0, WIDE)
    real = dim < SIZE
    at = row.to(tl.int64) * q_row + head * q_head + query * SIZE
    mine = tl.load(q + at[:, None] + dim[None, :], mask=present[:, None] & real[None, :], other=0.0)

    blocks = tl.cdiv(end - begin, BLOCK)
    each = tl.cdiv(blocks, PARTS)
    first = begin // BLOCK + part * each
    last = tl.minimum(first + each, begin // BLOCK + blocks)
    most = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    state = tl.zeros([TILE, WIDE], tl.float32)
    inside = tl.arange(0, BLOCK)
    for b in range(first, last):
        block = tl.load(table + of.to(tl.int64) * table_row + b).to(tl.int64)
        token = (block * BLOCK + inside) * (HEADS * 2 * SIZE) + head * 2 * SIZE
        seen = b * BLOCK + inside < end
        keys = tl.load(entries + token[None, :] + dim[:, None], mask=real[:, None] & seen[None, :], other=0.0)
        scores = tl.dot(mine, keys, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - now[:, None])
        shrink = tl.exp2(most - now)
        values = tl.load(entries + token[:, None] + SIZE + dim[None, :], mask=seen[:, None] & real[None, :], other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        state = state * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        most = now
    some = total > 0
    state = state / tl.where(some, total, 1.0)[:, None]
    size = tl.where(some, most + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    place = ((row.to(tl.int64) * HEADS + head) * parts_all + first_part + part) * QUERIES + query
    tl.store(sizes + place, size, mask=present)
    tl.store(states + place[:, None] * SIZE + dim[None, :], state, mask=present[:, None] & real[None, :])


@triton.jit
def join_parts(
    states,
    sizes,
    start,
    out,
    parts_all,
    parts_shared,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    LANES: tl.constexpr,
):
    """The parts of each row by their shares of the sum of exponentials; those of a group where the row is in one."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query, dim = tl.arange(0, LANES), tl.arange(0, WIDE)
    real = (query < QUERIES)[:, None] & (dim < SIZE)[None, :]
    first = tl.where(tl.load(start + row) > 0, 0, parts_shared)
    most = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    joined = tl.zeros([LANES, WIDE], tl.float32)
    for part in range(first, parts_all):
        place = ((row * HEADS + head) * parts_all + part) * QUERIES + query
        size = tl.load(sizes + place, mask=query < QUERIES, other=0.0)
        state = tl.load(states + place[:, None] * SIZE + dim[None, :], mask=real, other=0.0)
        now = tl.maximum(most, size)
        some = now > float("-inf")
        shrink = tl.where(some, tl.exp2(most - tl.where(some, now, 0.0)), 0.0)
        weight = tl.where(some, tl.exp2(size - tl.where(some, now, 0.0)), 0.0)
        total = total * shrink + weight
        joined = joined * shrink[:, None] + state * weight[:, None]
        most = now
    joined = joined / tl.where(total > 0, total, 1.0)[:, None]
    place = ((row * HEADS + head) * QUERIES + query)[:, None] * SIZE + dim[None, :]
    tl.store(out + place, joined.to(out.dtype.element_ty), mask=real)


def attend(
    q: Tensor,
    entries: Tensor,
    *,
    table: Tensor,
    start: Tensor,
    groups: Tensor,
    position: Tensor,
    block: int,
    scaling: float,
) -> Tensor:
    """Attention of one token a row: q (R, kv heads, queries, d) over the tokens 0 to position[r] of row r, whose block
    j is table[r, j] of entries (blocks * block, kv heads, 2, d). Returns (R, kv heads, queries, d).

    groups (G, 1 + MEMBERS): how many tokens, whole blocks, are the same in all of these rows (-1: none); they are read
    once for all. start (R,): where a row's own begin, 0 for rows without a group.
    """
    rows, heads, queries, size = q.shape
    assert q.stride()[2:] == (size, 1)
    assert entries.is_contiguous()
    wide, lanes = max(LEAST_TILE, triton.next_power_of_2(size)), triton.next_power_of_2(queries)
    parts, out = Parts.of(q), q.new_empty(rows, heads, queries, size)
    states, sizes, of_all = parts.states, parts.sizes, parts.shared + parts.own
    shape = {"HEADS": heads, "QUERIES": queries, "SIZE": size, "WIDE": wide}
    given = (q, entries, table, start, groups, position, states, sizes, q.stride(0), q.stride(1), table.stride(0))
    with as_runtime_error():
        for units, first, count, group in ((rows // 2, 0, parts.shared, MEMBERS), (rows, parts.shared, parts.own, 1)):
            if count:
                tile = max(LEAST_TILE, triton.next_power_of_2(group * queries))
                own = {"TILE": tile, "BLOCK": block, "GROUP": group, "PARTS": count}
                read_blocks[units, heads, count](*given, scaling * LOG2_E, of_all, first, **shape, **own)
        join_parts[rows, heads](states, sizes, start, out, of_all, parts.shared, **shape, LANES=lanes)
    return out


# ---- the draw ----


@triton.jit
def sum_chunks(logits, most_of, sum_of, row_stride, vocabulary, temperature, chunks, CHUNK: tl.constexpr):
    """Of a chunk of z = logits / temperature, its largest and the sum of exp(z - largest)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    z = tl.load(logits + row * row_stride + index, mask=index < vocabulary, other=float("-inf"))
    z = tl.div_rn(z, temperature)
    most = tl.max(z, 0)
    # A chunk that is -inf throughout holds nothing; exp(-inf - -inf) would be NaN.
    base = tl.where(most == float("-inf"), 0.0, most)
    tl.store(most_of + row * chunks + chunk, most)
    tl.store(sum_of + row * chunks + chunk, tl.sum(tl.exp(z - base), 0))


@triton.jit
def draw_in_chunk(
    logits,
    most_of,
    sum_of,
    u,
    token,
    logprob,
    row_stride,
    vocabulary,
    temperature,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """The chunk in which the running sum passes u times the total (or the largest logit is), and the place in it."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, CHUNKS)
    mosts = tl.load(most_of + row * chunks + each, mask=each < chunks, other=float("-inf"))
    sums = tl.load(sum_of + row * chunks + each, mask=each < chunks, other=0.0)
    most = tl.max(mosts, 0)
    weights = sums.to(tl.float64) * tl.exp((mosts - most).to(tl.float64))
    total = tl.sum(weights, 0)
    target = tl.load(u + row) * total
    ends = tl.cumsum(weights, 0)
    # Of entries without weight none is drawn: sums of a scan in parallel may differ in their last digit there.
    passed = mosts == most if GREEDY else (ends > target) & (weights > 0)
    chunk = tl.minimum(tl.min(tl.where(passed, each, CHUNKS), 0), chunks - 1)  # past the end there is only NaN
    inside = tl.arange(0, CHUNK)
    index = chunk * CHUNK + inside
    z = tl.load(logits + row * row_stride + index, mask=index < vocabulary, other=float("-inf"))
    z = tl.div_rn(z, temperature)
    chances = tl.exp(z - most)
    if GREEDY:
        hit = z == most
    else:
        before = tl.sum(tl.where(each < chunk, weights, 0.0), 0)
        running = tl.cumsum(chances.to(tl.float64), 0)
        # Rounding may leave the target just before the chunk or at its end: the draw stays inside.
        left = tl.minimum(tl.maximum(target - before, 0.0), tl.max(running, 0) * (1.0 - 1e-12))
        hit = (running > left) & (chances > 0)
    place = tl.min(tl.where(hit, inside, CHUNK), 0)
    place = tl.where(place == CHUNK, 0, place)
    chosen = tl.sum(tl.where(inside == place, z, 0.0), 0)
    tl.store(token + row, tl.minimum(chunk * CHUNK + place, vocabulary - 1).to(tl.int64))
    tl.store(logprob + row, ((chosen - most).to(tl.float64) - tl.log(total)).to(tl.float32))


def sampled(logits: Tensor, u: Tensor, *, temperature: float, greedy: bool) -> tuple[Tensor, Tensor]:
    """As `engine.sample_tokens` without top-k and top-p: the logits (R, V) are read once, and one chunk of a row again.
    What is summed differs from there in the last digits alone.
    """
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1
    chunks = triton.cdiv(vocabulary, CHUNK)
    most, total = (logits.new_empty(rows, chunks) for _ in range(2))
    token, logprob = u.new_empty(rows, dtype=torch.long), logits.new_empty(rows)
    given = (logits.stride(0), vocabulary, temperature, chunks)
    with as_runtime_error():
        sum_chunks[rows, chunks](logits, most, total, *given, CHUNK=CHUNK)
        draw_in_chunk[rows,](
            logits,
            most,
            total,
            u.contiguous(),
            token,
            logprob,
            *given,
            CHUNK=CHUNK,
            CHUNKS=triton.next_power_of_2(chunks),
            GREEDY=greedy,
        )
    return token, logprob
