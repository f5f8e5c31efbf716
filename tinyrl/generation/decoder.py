"""The forward pass of Llama-like decoders for sampling: joined projections, a static cache.

For Llama, Qwen2, Qwen3 and models built like them. While decoding, the library's modules cost more than their
arithmetic: LoRA branches at every token, the whole cache copied at every token, a dozen small operations a layer.
Here the weights are private copies, made afresh from base and adapter, with one matrix for projections that share an
input (weights.py). The base itself is never merged in place, which would round it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers import PreTrainedModel

from tinyrl.generation.weights import LayerWeights, layer_weights, renewed, take_over, tensors
from tinyrl.models.batches import trunk_of
from tinyrl.models.logprobs import Head, head_of

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def reads_like_llama(model: PreTrainedModel) -> bool:
    """Whether the decoder has the parts this file knows; whether they compute the same is checked on numbers."""
    trunk = trunk_of(model)
    layers = getattr(trunk, "layers", None)
    if layers is None or not all(hasattr(trunk, name) for name in ("embed_tokens", "norm", "rotary_emb")):
        return False
    parts = ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.down_proj")
    return all(
        all(_has(layer, f"{where}.{name}") for where, name in _projections()) and all(_has(layer, p) for p in parts)
        for layer in layers
    )


def _projections() -> list[tuple[str, str]]:
    return [("self_attn" if name[0] in "qkvo" else "mlp", name) for name in PROJECTIONS]


def _has(module: nn.Module, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(module, part):
            return False
        module = getattr(module, part)
    return True


@dataclass
class Cache:
    """Keys and values of every row, each (layers, rows, kv heads, width, head size), and the rotation of each of the
    `width` positions: cos, and sin with the sign of its half, each (width, 1, head size).
    """

    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor


class Decoder:
    """Hidden states of new tokens from a static cache. Weights are in `dtype`, sums of norms and softmax in float32."""

    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.trunk: Any = trunk_of(model)
        config = model.config.get_text_config()
        attention = self.trunk.layers[0].self_attn
        self.num_layers, self.num_heads = len(self.trunk.layers), config.num_attention_heads
        self.num_kv_heads, self.head_dim = config.num_key_value_heads, attention.head_dim
        self.scaling: float = attention.scaling
        self.eps: float = config.rms_norm_eps
        self.activation = self.trunk.layers[0].mlp.act_fn
        self.layers: list[LayerWeights] = []
        self.embedding = torch.empty(0)
        self.norm = torch.empty(0)
        self.head: Head = head_of(model)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token of one sequence."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        """Bytes of the private copy: what merging or another dtype keeps from sharing the model's memory."""
        own = [t for layer in self.layers for t in tensors(layer)]
        shared = {p.data_ptr() for p in self.model.parameters()}
        own += [self.embedding, self.head.weight]
        unique = {t.data_ptr(): t for t in own if t.data_ptr() not in shared}
        return sum(t.numel() * t.itemsize for t in unique.values())

    def sync(self, adapter: str | None) -> None:
        """Copy the weights as they are now under `adapter`, into the same memory as before."""
        self.embedding = renewed(self.embedding, self.trunk.embed_tokens.weight.to(self.dtype))
        self.norm = renewed(self.norm, self.trunk.norm.weight.to(self.dtype))
        head = head_of(self.model)
        tied = head.weight.data_ptr() == self.trunk.embed_tokens.weight.data_ptr()
        weight = self.embedding if tied else renewed(self.head.weight, head.weight.to(self.dtype))
        bias = None if head.bias is None else renewed(self.head.bias, head.bias.to(self.dtype))
        self.head = Head(weight, bias, head.scale, head.softcap)
        for i, layer in enumerate(self.trunk.layers):
            weights = layer_weights(layer, adapter, dtype=self.dtype)
            if i == len(self.layers):
                self.layers.append(weights)
            take_over(self.layers[i], weights)

    def release(self) -> None:
        """Give the memory of the copy back; `sync` takes it again."""
        self.layers, self.embedding, self.norm = [], torch.empty(0), torch.empty(0)
        self.head = head_of(self.model)

    def new_cache(self, rows: int, width: int) -> Cache:
        """All zero, as masked entries must be finite (0 x NaN is NaN). A CPU takes memory only where written."""
        shape = (self.num_layers, rows, self.num_kv_heads, width, self.head_dim)
        device = self.trunk.embed_tokens.weight.device
        if device.type == "cpu":
            size = math.prod(shape) * self.dtype.itemsize
            keys, values = (torch.from_numpy(np.zeros(size, np.uint8)).view(self.dtype).view(shape) for _ in range(2))
        else:
            keys, values = (torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(2))
        return Cache(keys, values, *self._rotations(width, device))

    def _rotations(self, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        positions = torch.arange(width, device=device).unsqueeze(0)
        cos, sin = self.trunk.rotary_emb(torch.empty(1, 1, 1, dtype=self.dtype, device=device), positions)
        sin[..., : self.head_dim // 2].neg_()
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)

    def prefill(self, ids: Tensor, lengths: Tensor, *, cache: Cache, rows: list[range]) -> Tensor:
        """Read prompts ids (P, L), padded on the right, and put the keys and values of prompt p into each of rows[p] of
        the cache. Returns the hidden state of each prompt's last token, (P, H).
        """
        prompts, width = ids.shape
        rotation = (cache.cos[:width].repeat(prompts, 1, 1), cache.sin[:width].repeat(prompts, 1, 1))
        x = self.embedding[ids].flatten(0, 1)
        groups = self.num_heads // self.num_kv_heads
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            q, k, v = (t.unflatten(0, (prompts, width)).transpose(1, 2) for t in self._qkv(layer, x, rotation))
            for p, span in enumerate(rows):
                keys[span.start : span.stop, :, :width] = k[p]
                values[span.start : span.stop, :, :width] = v[p]
            k, v = (x.repeat_interleave(groups, 1, output_size=self.num_heads) for x in (k, v))
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)
            x = self._rest(layer, x, attended.transpose(1, 2).flatten(2).flatten(0, 1))
        last = torch.arange(prompts, device=ids.device) * width + lengths - 1
        return rms_norm(x[last], (x.shape[-1],), self.norm, self.eps)

    def extend(self, ids: Tensor, lengths: Tensor, start: Tensor, *, cache: Cache, rows: range, width: int) -> Tensor:
        """Read on in `rows` of the cache: ids (R, L), padded on the right, token j of row r at position start[r] + j,
        below `width`. A token sees what its row held before `start` and the new ones up to itself; nothing is written
        for padding. Returns the hidden state of each row's last token, (R, H).
        """
        (count, most), heads, size, device = ids.shape, self.num_kv_heads, self.head_dim, ids.device
        positions = start.unsqueeze(1) + torch.arange(most, device=device)
        ahead = torch.arange(width, device=device) > positions.unsqueeze(-1)
        groups = self.num_heads // heads
        mask = torch.zeros(count, 1, groups, most, width, dtype=self.dtype, device=device)
        mask = mask.masked_fill_(ahead[:, None, None], -torch.inf).flatten(2, 3)
        # Projections run on the real tokens alone, (N, H); only the attention pads them.
        real = (torch.arange(most, device=device) < lengths.unsqueeze(1)).flatten().nonzero().squeeze(-1)
        position = positions.flatten()[real]
        lanes = (real // most + rows.start).unsqueeze(1) * heads + torch.arange(heads, device=device)
        place = (lanes * cache.keys.shape[3] + position.unsqueeze(1)).view(-1)
        rotation = cache.cos[position], cache.sin[position]
        x = self.embedding[ids.flatten()[real]]
        padded = x.new_zeros(count * most, self.num_heads, size)
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            q, k, v = self._qkv(layer, x, rotation)
            keys.view(-1, size).index_copy_(0, place, k.reshape(-1, size))
            values.view(-1, size).index_copy_(0, place, v.reshape(-1, size))
            # As in `step`, heads that share keys are rows of one product: (R, kv heads, groups * L, d).
            q = padded.index_copy_(0, real, q).view(count, most, -1, size).transpose(1, 2)
            seen_keys, seen_values = (t[rows.start : rows.stop, :, :width] for t in (keys, values))
            q = q.reshape(count, heads, -1, size)
            attended = scaled_dot_product_attention(q, seen_keys, seen_values, attn_mask=mask, scale=self.scaling)
            attended = attended.view(count, -1, most, size).transpose(1, 2).reshape(count * most, -1)
            x = self._rest(layer, x, attended[real])
        return rms_norm(x[lengths.cumsum(0) - 1], (x.shape[-1],), self.norm, self.eps)

    def step(self, token: Tensor, position: Tensor, *, cache: Cache, width: int) -> Tensor:
        """Hidden states (R, H) after one more token in each of the first R rows of the cache, at `position` (R,), which
        is also where its key and value go. It is below `width` in every row whose state counts.
        """
        rows, heads, size = len(token), self.num_kv_heads, self.head_dim
        device = token.device
        ahead = torch.arange(width, device=device) > position.unsqueeze(1)
        mask = torch.zeros(rows, 1, 1, width, device=device).masked_fill_(ahead[:, None, None], -torch.inf)
        lanes = torch.arange(rows * heads, device=device).view(rows, heads)
        place = (lanes * cache.keys.shape[3] + position.unsqueeze(1)).view(-1)  # flat index of new keys in a layer
        rotation = cache.cos[position], cache.sin[position]
        x = self.embedding[token]
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            q, k, v = self._qkv(layer, x, rotation)
            keys.view(-1, size).index_copy_(0, place, k.reshape(-1, size))
            values.view(-1, size).index_copy_(0, place, v.reshape(-1, size))
            # Heads that share keys are rows of one small matrix product (grouped-query attention, 2305.13245).
            q = q.reshape(rows, heads, -1, size) * self.scaling
            scores = torch.matmul(q, keys[:rows, :, :width].transpose(-1, -2)).float().add_(mask)
            attended = torch.matmul(scores.softmax(-1).to(self.dtype), values[:rows, :, :width])
            x = self._rest(layer, x, attended.view(rows, -1))
        return rms_norm(x, (x.shape[-1],), self.norm, self.eps)

    def _qkv(self, layer: LayerWeights, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (N, heads, d) and keys, and values (N, kv heads, d), of flat tokens x (N, H)."""
        h = rms_norm(x, (x.shape[-1],), layer.attention_norm, self.eps)
        qkv = layer.qkv(h).view(len(x), -1, self.head_dim)
        qk, v = qkv[:, : -self.num_kv_heads], qkv[:, -self.num_kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k, size = qk[:, : self.num_heads], qk[:, self.num_heads :], (self.head_dim,)
            qk = torch.cat([rms_norm(q, size, layer.q_norm, self.eps), rms_norm(k, size, layer.k_norm, self.eps)], 1)
        cos, sin = rotation  # x cos + (the other half, the first negated) sin: RoPE (2104.09864), Eq. 34, by halves
        qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
        return qk[:, : self.num_heads], qk[:, self.num_heads :], v

    def _rest(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """Attention's output projection and the feed-forward block, each added to its residual."""
        x = layer.out.added(x, attended)
        h = rms_norm(x, (x.shape[-1],), layer.mlp_norm, self.eps)
        gate, up = layer.gate_up(h).chunk(2, -1)
        return layer.down.added(x, self.activation(gate).mul_(up))
