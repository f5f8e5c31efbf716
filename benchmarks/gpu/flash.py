"""torch's ragged flash attention, called directly; on a CPU, where it has no kernel, its formula.

Rows stand end to end: queries (N, heads, d), keys and values (M, kv heads, d), where query head i reads key head
i // (heads / kv heads). Row r has the queries cu_q[r] to cu_q[r + 1] and the keys cu_k[r] to cu_k[r + 1], of which
`lengths[r]`, if given, count. Causal: the last query of a row sees all of its keys, the one before all but one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Rows:
    """Where rows begin, int32 (R + 1,) each, and the longest row of either side."""

    cu_q: Tensor
    cu_k: Tensor
    most_q: int
    most_k: int


@dataclass(frozen=True)
class Forward:
    """The output (N, heads, d), the log-sum-exp of each query (heads, N), and what the kernel's backward asks for."""

    out: Tensor
    lse: Tensor
    rng_state: Tensor
    unused: Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, *, causal: bool, scale: float, lengths: Tensor | None = None
) -> Forward:
    if not q.is_cuda:
        return _forward_by_formula(q, k, v, rows, causal=causal, scale=scale, lengths=lengths)
    out, lse, rng_state, unused, _ = aten._flash_attention_forward(
        q, k, v, rows.cu_q, rows.cu_k, rows.most_q, rows.most_k, 0.0, causal, False, scale=scale, seqused_k=lengths
    )
    return Forward(out, lse, rng_state, unused)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Forward, rows: Rows, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    if not q.is_cuda:
        return _backward_by_formula(grad, q, k, v, found, rows, causal=causal, scale=scale)
    return aten._flash_attention_backward(
        grad.contiguous(), q, k, v, found.out, found.lse, rows.cu_q, rows.cu_k, rows.most_q, rows.most_k, 0.0, causal,
        found.rng_state, found.unused, scale=scale,
    )  # fmt: skip


# ---- the formula ----


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn, as far as training asks for it, where there is no kernel: row by row, with
    the derivatives of autograd.
    """
    assert cu_seq_k is not None
    assert (return_aux, seqused_k, block_table, num_splits) == (None, None, None, None)
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (len(query), len(key)) == (int(cu_seq_q[-1]), int(cu_seq_k[-1])), "tokens outside of the rows"
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    assert enable_gqa or query.shape[1] == key.shape[1], "shared key heads without enable_gqa"
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    assert window_size in ((-1, -1), (-1, 0))
    rows = Rows(cu_seq_q, cu_seq_k, max_q, max_k)
    shared = query.shape[1] // value.shape[1]
    out = []
    for queries, keys in _spans(rows, None):
        size = query.shape[-1] ** -0.5 if scale is None else scale
        p = _scores(query[queries], key[keys], causal=window_size == (-1, 0), scale=size).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", p, value[keys].float().repeat_interleave(shared, 1)))
    return torch.cat(out).to(query.dtype)


def _spans(rows: Rows, lengths: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and the keys of each row."""
    starts_q = rows.cu_q.tolist()
    starts_k = rows.cu_k.tolist()
    for r in range(len(starts_q) - 1):
        end = starts_k[r + 1] if lengths is None else starts_k[r] + int(lengths[r])
        yield slice(starts_q[r], starts_q[r + 1]), slice(starts_k[r], end)


def _scores(q: Tensor, k: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Return float32 scores (heads, queries, keys) of one row."""
    shared = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(shared, 1)
    scores = scale * torch.einsum("qhd,khd->hqk", q.float(), keys)
    if causal:
        unseen = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        scores = scores.masked_fill(unseen, -torch.inf)
    return scores


def _forward_by_formula(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, *, causal: bool, scale: float, lengths: Tensor | None
) -> Forward:
    out = torch.zeros_like(q)
    lse = q.new_zeros(q.shape[1], len(q), dtype=torch.float32)
    shared = q.shape[1] // k.shape[1]
    for queries, keys in _spans(rows, lengths):
        scores = _scores(q[queries], k[keys], causal=causal, scale=scale)
        lse[:, queries] = scores.logsumexp(-1)
        values = v[keys].float().repeat_interleave(shared, 1)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return Forward(out, lse, q.new_empty(0), q.new_empty(0))


def _backward_by_formula(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Forward, rows: Rows, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """With P = exp(S - lse): dV = P' dO, dS = P (dO V' - rowsum(dO O)), dQ = scale dS K, dK = scale dS' Q."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    kv_heads = k.shape[1]
    shared = q.shape[1] // kv_heads
    for queries, keys in _spans(rows, None):
        p = (_scores(q[queries], k[keys], causal=causal, scale=scale) - found.lse[:, queries].unsqueeze(-1)).exp()
        wide_k = k[keys].float().repeat_interleave(shared, 1)
        wide_v = v[keys].float().repeat_interleave(shared, 1)
        grads = grad[queries].float()
        along = (grads * found.out[queries].float()).sum(-1).t().unsqueeze(-1)
        ds = p * (torch.einsum("qhd,khd->hqk", grads, wide_v) - along)
        dq[queries] = scale * torch.einsum("hqk,khd->qhd", ds, wide_k).to(q.dtype)
        of_keys = scale * torch.einsum("hqk,qhd->khd", ds, q[queries].float())
        of_values = torch.einsum("hqk,qhd->khd", p, grads)
        dk[keys] = of_keys.unflatten(1, (kv_heads, shared)).sum(2).to(k.dtype)
        dv[keys] = of_values.unflatten(1, (kv_heads, shared)).sum(2).to(v.dtype)
    return dq, dk, dv
