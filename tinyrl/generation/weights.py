"""The fused decoder's weights: private copies, joined where projections share an input, with LoRA in them.

In float32 the adapter is merged into the matrix. In bfloat16 that would round small updates away: one Adam step of 5e-5
changes a weight by a hundredth of its spacing. There [W, (alpha / r) B] stands in one matrix and is multiplied with
[h, A h], so that base and branch are added up in float32 inside one product, and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tinyrl.models.lora_merge import lora_matrices, lora_rank, merged_weight

RANK_MULTIPLE = 8  # rows of a bfloat16 matrix then start at 16 bytes, as fast kernels want


@dataclass
class Projection:
    """h -> W h + b, where W may have a low-rank branch. weight (out, in), or (out, in + k) with B's columns behind W's;
    lora_a (k, in): what they are multiplied with is A h.
    """

    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None = None

    def __call__(self, h: Tensor) -> Tensor:
        """(N, in) -> (N, out)."""
        return linear(self._widened(h), self.weight, self.bias)

    def added(self, x: Tensor, h: Tensor) -> Tensor:
        """x + W h + b in one product; x (N, out)."""
        return torch.addmm(x if self.bias is None else x + self.bias, self._widened(h), self.weight.t())

    def _widened(self, h: Tensor) -> Tensor:
        return h if self.lora_a is None else torch.cat([h, linear(h, self.lora_a)], -1)


@dataclass
class LayerWeights:
    """One decoder layer: q, k and v in one matrix, by kv heads (queries, key, value of each); gate and up in one."""

    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection
    attention_norm: Tensor | None  # in float32 the norms' weights are multiplied into the matrices behind them
    mlp_norm: Tensor | None
    q_norm: Tensor | None  # Qwen3: over each head
    k_norm: Tensor | None


@torch.no_grad()
def layer_weights(layer: Any, adapter: str | None, *, kv_heads: int, dtype: torch.dtype) -> LayerWeights:
    """The weights of the library's decoder layer as they are now under `adapter`."""
    attention, mlp = layer.self_attn, layer.mlp

    norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    inside = norms if dtype == torch.float32 else (None, None)
    beside = (None, None) if dtype == torch.float32 else tuple(weight.to(dtype) for weight in norms)

    def norm(module: nn.Module | None) -> Tensor | None:
        return None if module is None else module.weight.to(dtype)  # pyright: ignore

    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    return LayerWeights(
        joined(qkv, adapter, dtype=dtype, parts=kv_heads, norm=inside[0]),
        joined([attention.o_proj], adapter, dtype=dtype),
        joined([mlp.gate_proj, mlp.up_proj], adapter, dtype=dtype, norm=inside[1]),
        joined([mlp.down_proj], adapter, dtype=dtype),
        attention_norm=beside[0],
        mlp_norm=beside[1],
        q_norm=norm(getattr(attention, "q_norm", None)),
        k_norm=norm(getattr(attention, "k_norm", None)),
    )


def joined(
    modules: list[nn.Module],
    adapter: str | None,
    *,
    dtype: torch.dtype,
    parts: int = 1,
    norm: Tensor | None = None,
) -> Projection:
    """Linear layers that share their input as one, whose outputs are the first of `parts` equal parts of each layer's,
    the second, and so on. norm (in,): what the input is to be multiplied with (merged weights only). Its shapes are
    those of the layers' largest adapters, whichever is asked for (None: the base, with a branch of zeros), since a CUDA
    graph is recorded once for all of them.
    """
    rank = 0 if dtype == torch.float32 else sum(lora_rank(module) for module in modules)
    pairs = [merged_weight(module, None if rank else adapter) for module in modules]

    def one(tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.unflatten(0, (parts, -1)) for t in tensors], 1).flatten(0, 1)

    weight = one([w for w, _ in pairs]).to(dtype)
    biases = [b for _, b in pairs if b is not None]
    assert len(biases) in (0, len(pairs))
    bias = one(biases).to(dtype) if biases else None
    if not rank:
        return Projection(laid_out(weight, norm), bias)
    columns = -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE
    lora_a, column = weight.new_zeros(columns, weight.shape[1]), 0
    lora_b = [weight.new_zeros(len(own), columns) for own, _ in pairs]
    for module, branch in zip(modules, lora_b, strict=True):
        matrices = lora_matrices(module, adapter)
        if matrices is not None:
            a, b = matrices
            lora_a[column : column + len(a)] = a
            branch[:, column : column + len(a)] = b
        column += lora_rank(module)
    return Projection(torch.cat([weight, one(lora_b)], 1), bias, lora_a)


def laid_out(weight: Tensor, norm: Tensor | None) -> Tensor:
    """A matrix (out, in), its columns multiplied with `norm`. On a CPU it stands in memory input by input, where
    products with a few rows are up to twice as fast; GPUs do not mind.
    """
    if weight.device.type != "cpu":
        return weight if norm is None else weight * norm
    by_inputs = weight.new_empty(weight.shape[1], weight.shape[0])
    if norm is None:
        by_inputs.copy_(weight.t())
    else:
        torch.mul(weight.t(), norm.unsqueeze(1), out=by_inputs)
    return by_inputs.t()


def tensors(weights: LayerWeights | Projection) -> list[Tensor]:
    """Every tensor there is."""
    values = [getattr(weights, field.name) for field in fields(weights)]
    return [t for v in values if v is not None for t in (tensors(v) if isinstance(v, Projection) else [v])]


def take_over(old: LayerWeights | Projection, fresh: LayerWeights | Projection) -> None:
    """Give `old` the values of `fresh`, in the memory that it has."""
    for field in fields(fresh):
        was, new = getattr(old, field.name), getattr(fresh, field.name)
        if isinstance(new, Projection):
            take_over(was, new)
        elif new is not None:
            setattr(old, field.name, renewed(was, new))


def renewed(old: Tensor | None, fresh: Tensor) -> Tensor:
    """`fresh`, in the memory of `old` if it has any (a CUDA graph holds the address); shared weights as they are."""
    if old is None or old.shape != fresh.shape or old.data_ptr() == fresh.data_ptr():
        return fresh
    return old.copy_(fresh)
