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
    """One decoder layer: q, k and v in one matrix, gate and up in another."""

    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection
    attention_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None  # Qwen3: over each head
    k_norm: Tensor | None


def layer_weights(layer: Any, adapter: str | None, *, dtype: torch.dtype) -> LayerWeights:
    """The weights of the library's decoder layer as they are now under `adapter`."""
    attention, mlp = layer.self_attn, layer.mlp

    def norm(module: nn.Module | None) -> Tensor | None:
        return None if module is None else module.weight.to(dtype)  # pyright: ignore

    return LayerWeights(
        joined([attention.q_proj, attention.k_proj, attention.v_proj], adapter, dtype=dtype),
        joined([attention.o_proj], adapter, dtype=dtype),
        joined([mlp.gate_proj, mlp.up_proj], adapter, dtype=dtype),
        joined([mlp.down_proj], adapter, dtype=dtype),
        attention_norm=layer.input_layernorm.weight.to(dtype),
        mlp_norm=layer.post_attention_layernorm.weight.to(dtype),
        q_norm=norm(getattr(attention, "q_norm", None)),
        k_norm=norm(getattr(attention, "k_norm", None)),
    )


def joined(modules: list[nn.Module], adapter: str | None, *, dtype: torch.dtype) -> Projection:
    """Linear layers that share their input as one. Its shapes are those of the layers' largest adapters, whichever is
    asked for (None: the base, with a branch of zeros), since a CUDA graph is recorded once for all of them.
    """
    rank = 0 if dtype == torch.float32 else sum(lora_rank(module) for module in modules)
    pairs = [merged_weight(module, None if rank else adapter) for module in modules]
    weight = torch.cat([w for w, _ in pairs]).to(dtype)
    biases = [b for _, b in pairs if b is not None]
    assert len(biases) in (0, len(pairs))
    bias = torch.cat(biases).to(dtype) if biases else None
    if not rank:
        return Projection(weight, bias)
    columns = -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE
    lora_a, lora_b = (weight.new_zeros(n, columns) for n in (weight.shape[1], weight.shape[0]))
    row = column = 0
    for module, (own, _) in zip(modules, pairs, strict=True):
        matrices = lora_matrices(module, adapter)
        if matrices is not None:
            a, b = matrices
            lora_a[:, column : column + len(a)] = a.t()
            lora_b[row : row + len(own), column : column + len(a)] = b
        row, column = row + len(own), column + lora_rank(module)
    return Projection(torch.cat([weight, lora_b], 1), bias, lora_a.t().contiguous())


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
