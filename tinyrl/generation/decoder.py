"""The forward pass of Llama-like decoders for sampling: joined projections, over a cache that never moves.

For Llama, Qwen2, Qwen3 and models built like them. While decoding, the library's modules cost more than their
arithmetic: LoRA branches at every token, the whole cache copied at every token, a dozen small operations a layer.
Here projections that share an input are one matrix. The base itself is never merged in place, which would round it.

Layouts of the weights:

    merged          private copies with the adapter merged in: float32, where they fit
    separate_lora   LoRA is a product of its own, W h + (alpha / r) B (A h), since merging in half precision would round
                    small updates away. A frozen base of the same dtype is not copied: its own q, k and v, and gate and
                    up, become views of the joined matrices. Of a 4-bit base there is a dense copy
    quantized       as separate_lora, but the weights of a 4-bit base are made dense again at every use
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tinyrl.models.device import to_device
from tinyrl.models.logprobs import Head, head_of
from tinyrl.models.lora import dense_weight, lora_matrices, lora_rank, merged_weight
from tinyrl.models.memory import weight_bytes
from tinyrl.models.norms import apply_rope
from tinyrl.models.states import backbone_of

RANK_MULTIPLE = 8  # rows of a bfloat16 matrix then start at 16 bytes, as fast kernels want
WeightLayout = Literal["merged", "separate_lora", "quantized"]

# ---- weights ----


@dataclass
class Projection:
    """h -> W h + b, where W (out, in) may have a low-rank branch: lora_a (k, in), lora_b (out, k).

    W h is added to the branch in float32 before that is rounded: a first update is smaller than the steps between
    numbers of half precision, and added to a rounded W h it would be rounded away again.
    """

    weight: Tensor | list[Tensor]  # of a 4-bit base, one behind another, made dense at every use
    bias: Tensor | None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    dtype: torch.dtype = torch.float32

    @property
    def matrix(self) -> Tensor:
        w = self.weight
        return w if isinstance(w, Tensor) else torch.cat([*map(dense_weight, w)]).to(self.dtype)

    def __call__(self, h: Tensor, residual: Tensor | None = None) -> Tensor:
        """Project h (N, in) to (N, out), and add the residual (N, out)."""
        if self.lora_a is None or self.lora_b is None:
            if residual is None:
                return linear(h, self.matrix, self.bias)
            return torch.addmm(residual if self.bias is None else residual + self.bias, h, self.matrix.t())
        out = linear(linear(h, self.lora_a), self.lora_b).addmm_(h, self.matrix.t())
        out = out if self.bias is None else out.add_(self.bias)
        return out if residual is None else out.add_(residual)


@dataclass
class LayerWeights:
    """One decoder layer: q, k and v in one matrix, merged by kv heads (queries, key, value of each), else one behind
    another; gate and up in one. Norms are None where merged into the matrix behind them; q_norm, k_norm: Qwen3's.
    """

    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection
    attention_norm: Tensor | None
    mlp_norm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None


def linear_weight(module: nn.Module, adapter: str | None) -> tuple[Tensor, Tensor | None]:
    """Return (weight (out, in), bias) of a linear layer under `adapter`; GPT-2's are transposed."""
    weight, bias = merged_weight(module, adapter)
    base = module.get_base_layer() if isinstance(module, LoraLayer) else module
    return weight.t() if isinstance(base, Conv1D) else weight, bias


def merged_projection(
    modules: list[nn.Module], adapter: str | None, *, parts: int = 1, norm: Tensor | None = None
) -> Projection:
    """Join linear layers that share their input in float32. Each layer's outputs are cut into `parts` equal parts, and
    the joined outputs are ordered by part: part 1 of every layer, part 2 of every layer, and so on. norm (in,):
    multiplied into the matrix.

    On a CPU the matrix stands in memory input by input, where products with a few rows are up to twice as fast.
    """

    def one(tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.unflatten(0, (parts, -1)) for t in tensors], 1).flatten(0, 1).float()

    weights, biases = zip(*(linear_weight(module, adapter) for module in modules), strict=True)
    weight = one([*weights])
    present = [bias for bias in biases if bias is not None]
    bias = one(present) if present else None
    if weight.device.type != "cpu":
        return Projection(weight if norm is None else weight * norm, bias)
    by_inputs = weight.t().clone(memory_format=torch.contiguous_format)
    return Projection((by_inputs if norm is None else by_inputs.mul_(norm.unsqueeze(1))).t(), bias)


def join_linear(
    modules: list[nn.Module], adapter: str | None, *, dtype: torch.dtype, quantized: bool = False
) -> Projection:
    """Join linear layers that share their input, with their branches. The shapes are those of the layers' largest
    adapters, whichever is asked for (None: the base, with a branch of zeros), since a CUDA graph is captured once for
    all of them.
    """
    weights, biases = zip(*(linear_weight(module, None) for module in modules), strict=True)
    matrix: Tensor | list[Tensor] | None = [*weights] if quantized else None
    if matrix is None and can_share(weights, dtype):
        matrix = matrix_of(weights)
    if matrix is None:
        matrix = torch.cat([dense_weight(w).to(dtype) for w in weights])
    bias = None if biases[0] is None else torch.cat(biases).to(dtype)
    rank = sum(map(lora_rank, modules))
    if not rank:
        return Projection(matrix, bias, dtype=dtype)
    sizes: list[int] = [module.out_features for module in modules]  # pyright: ignore[reportAssignmentType]
    columns = -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE
    column = 0
    device = weights[0].device
    lora_a = torch.zeros(columns, int(modules[0].in_features), dtype=dtype, device=device)  # pyright: ignore
    lora_b = torch.zeros(sum(sizes), columns, dtype=dtype, device=device)
    for module, branch in zip(modules, lora_b.split(sizes), strict=True):
        if (matrices := lora_matrices(module, adapter)) is not None:
            lora_a[column : column + len(matrices[0])], branch[:, column : column + len(matrices[0])] = matrices
        column += lora_rank(module)
    return Projection(matrix, bias, lora_a, lora_b, dtype)


def can_share(weights: Iterable[Tensor], dtype: torch.dtype) -> bool:
    """Return whether sampling in `dtype` can read a layer's own weights: frozen ones in that dtype."""
    return all(w.dtype == dtype and not w.requires_grad for w in weights)


def matrix_of(weights: Sequence[Tensor]) -> Tensor | None:
    """Return the matrix that these are one behind another in memory; None where they are not."""
    first = weights[0]
    if len(weights) == 1:
        return first.detach()
    at = first.data_ptr()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or not weight.is_contiguous() or weight.data_ptr() != at:
            return None
        at += weight.nbytes
    return first.detach().as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def tensors(weights: LayerWeights | Projection) -> list[Tensor]:
    """List the tensors of weights, in the order of their fields; fields without one are left out."""
    values = [getattr(weights, field.name) for field in fields(weights)]
    nested = [tensors(v) if isinstance(v, Projection) else [v] for v in values]
    return [t for each in nested for t in each if isinstance(t, Tensor)]


def renewed(old: Tensor | None, fresh: Tensor) -> Tensor:
    """Return `fresh` in the memory of `old`, if any (a CUDA graph holds the address); shared weights as they are."""
    if old is None or old.shape != fresh.shape or old.data_ptr() == fresh.data_ptr():
        return fresh
    return old.copy_(fresh)


# ---- cache ----


def zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros, since masked entries must be finite (0 x NaN is NaN). A CPU takes memory only where it
    is written.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class RowCache:
    """Keys and values of every row, entries (layers, rows, kv heads, 2, width, head size), and the rotation of each of
    the `width` positions, by which the queries, key and value of a kv head are multiplied: cos, and sin with the sign
    of its half, each (width, 1, queries + 2, head size), 1 and 0 for the value, which is not rotated.

    can_truncate: whether a row can be cut to its first tokens.
    """

    can_truncate = True

    def __init__(self, entries: Tensor, cos: Tensor, sin: Tensor) -> None:
        self.entries = entries
        self.cos = cos
        self.sin = sin
        self.lanes = 2 * entries.shape[2]
        self.width, self.size = entries.shape[-2:]

    def places(self, row: Tensor, position: Tensor) -> Tensor:
        """Return the flat index in a layer of the key and the value of each kv head, for N new tokens."""
        lanes = torch.arange(self.lanes, device=row.device) + row.unsqueeze(1) * self.lanes
        return (lanes * self.width + position.unsqueeze(1)).view(-1)

    def write(self, layer: int, places: Tensor, kv: Tensor) -> None:
        """Write kv (N, kv heads, 2, d)."""
        self.entries[layer].view(-1, self.size).index_copy_(0, places, kv.reshape(-1, self.size))

    def copy(self, source: int, to: int, tokens: int) -> None:
        self.entries[:, to, ..., :tokens, :] = self.entries[:, source, ..., :tokens, :]

    def exchange(self, a: int, b: int, tokens: int) -> None:
        entries = self.entries[..., :tokens, :]
        kept = entries[:, b].clone()
        entries[:, b] = entries[:, a]
        entries[:, a] = kept


def attended(q: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor, scaling: float) -> Tensor:
    """Attend from q (B, Q, d), which share keys and values (B, W, d), under an additive mask (B, 1, W). Scores stay
    in float32: bfloat16 is coarse where all of them are large.
    """
    if q.dtype != torch.float32:
        q, keys, values = (x.unsqueeze(1) for x in (q, keys, values))
        mask = mask.unsqueeze(1).expand(-1, -1, q.shape[2], -1)
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scaling)
    scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=scaling)
    return torch.bmm(scores.softmax(-1), values)


def attended_behind(q: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None, scaling: float) -> Tensor:
    """Attend from new tokens q (R, heads, L, d) to keys and values (R, kv heads, W, d); return (R, heads, L, d).

    mask: additive, (R or 1, 1, queries of a kv head * L, W); None: query j sees all keys but the last L - 1 - j, as
    where every row holds as many tokens.
    """
    rows, heads, length, size = q.shape
    kv_heads, width = keys.shape[1:3]
    if mask is None:
        k, v = (x.repeat_interleave(heads // kv_heads, 1, output_size=heads) for x in (keys, values))
        causal: Any = causal_lower_right(length, width)
        return scaled_dot_product_attention(q, k, v, attn_mask=causal, scale=scaling)
    folded = q.reshape(rows, kv_heads, -1, size)  # as in `step`, heads that share keys are rows of one product
    return scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling).reshape(q.shape)


# ---- the decoder ----


class Decoder:
    """Hidden states of new tokens from a static cache. Weights are in `dtype`, sums of norms and softmax in float32.

    knows_causal: whether the device's attention has a causal kernel for fewer queries than keys, which needs no mask.
    """

    extends_images = True  # models with images have other decoders

    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype, layout: WeightLayout) -> None:
        self.model = model
        self.dtype = dtype
        self.layout: WeightLayout = layout
        self.backbone: Any = backbone_of(model)
        config = model.config.get_text_config()
        first = self.backbone.layers[0]
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.queries = self.num_heads // self.num_kv_heads  # of a kv head: grouped-query attention (2305.13245)
        self.head_dim = first.self_attn.head_dim
        self.scaling = float(first.self_attn.scaling)
        self.eps = float(config.rms_norm_eps)
        self.least = torch.tensor(config.rms_norm_eps)
        self.activation = first.mlp.act_fn
        self.device = self.backbone.embed_tokens.weight.device
        self.knows_causal = self.device.type == "cuda"
        for layer in self.backbone.layers if layout != "merged" else []:
            # Weights that sampling can read as they are, and multiplies with one input, go into one matrix, of which
            # the layer's own become views; a layer's are moved at a time, so memory grows by no more than one.
            for modules in self._joint(layer):
                weights = [merged_weight(module, None)[0] for module in modules]
                if can_share(weights, dtype) and matrix_of(weights) is None:
                    with torch.inference_mode(False):  # else autograd refuses the layer's weights from now on
                        whole = torch.cat([w.data for w in weights])
                    for weight, part in zip(weights, whole.split([len(w) for w in weights]), strict=True):
                        weight.data = part
        self.release()

    @staticmethod
    def _joint(layer: Any) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the projections of a layer that share their input."""
        attention = layer.self_attn
        mlp = layer.mlp
        return [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]

    @cached_property
    def side_stream(self) -> torch.cuda.Stream:
        """The stream on which all CUDA graphs are captured: cuBLAS keeps 32 MiB for every stream it has seen."""
        return torch.cuda.Stream()

    def row_bytes(self, width: int) -> int:
        """Count the bytes of a row of `width` tokens in the cache: keys and values."""
        return 2 * len(self.backbone.layers) * self.num_kv_heads * self.head_dim * self.dtype.itemsize * width

    @property
    def weight_bytes(self) -> int:
        """Count the bytes of the private copy: what merging or another dtype keeps from sharing the model's memory."""
        own = [*(t for layer in self.layers for t in tensors(layer)), self.embedding, self.head.weight]
        shared = {p.data_ptr() for p in self.model.parameters()}
        return weight_bytes(t for t in own if t.data_ptr() not in shared)

    @torch.no_grad()
    def sync(self, adapter: str | None) -> None:
        """Copy the weights as they are now under `adapter`, into the same memory as before."""
        embedding = self.backbone.embed_tokens.weight
        head = head_of(self.model)
        dtype = self.dtype
        self.embedding = renewed(self.embedding, embedding.to(dtype))
        self.norm = renewed(self.norm, self.backbone.norm.weight.to(dtype))
        tied = head.weight.data_ptr() == embedding.data_ptr()
        weight = self.embedding if tied else renewed(self.head.weight, head.weight.to(dtype))
        bias = None if head.bias is None else renewed(self.head.bias, head.bias.to(dtype))
        self.head = Head(weight, bias, head.scale, head.softcap)
        merged = self.layout == "merged"
        quantized = self.layout == "quantized"

        def own(modules: list[nn.Module], *, norm: Tensor | None = None, parts: int = 1) -> Projection:
            if merged:
                return merged_projection(modules, adapter, parts=parts, norm=norm)
            return join_linear(modules, adapter, dtype=dtype, quantized=quantized)

        for i, layer in enumerate(self.backbone.layers):
            qkv, gate_up = self._joint(layer)
            norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
            heads = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
            weights = LayerWeights(
                own(qkv, norm=norms[0], parts=self.num_kv_heads),
                own([layer.self_attn.o_proj]),
                own(gate_up, norm=norms[1]),
                own([layer.mlp.down_proj]),
                *(None if merged else norm.to(dtype) for norm in norms),
                *(None if norm is None else norm.weight.to(dtype) for norm in heads),
            )
            if i == len(self.layers):
                self.layers.append(weights)
            for old, fresh in zip(tensors(self.layers[i]), tensors(weights), strict=True):
                assert old.shape == fresh.shape, "a weight of a layer has another shape than at the last sync"
                renewed(old, fresh)

    def release(self) -> None:
        """Free the copy; `sync` makes it again."""
        self.layers: list[LayerWeights] = []
        self.embedding = torch.empty(0)
        self.norm = torch.empty(0)
        self.head = Head(torch.empty(0), None)  # never the model's own, which `sync` would write into

    def new_cache(self, rows: int, width: int) -> RowCache:
        shape = (len(self.backbone.layers), rows, self.num_kv_heads, 2, width, self.head_dim)
        entries = zeros(shape, dtype=self.dtype, device=self.device)
        positions = torch.arange(width, device=self.device).unsqueeze(0)
        dtype = self.dtype
        cos, sin = self.backbone.rotary_emb(torch.empty(1, 1, 1, dtype=dtype, device=self.device), positions)
        sin[..., : self.head_dim // 2].neg_()
        lanes = (width, 1, self.queries + 2, self.head_dim)
        all_cos = cos.new_ones(lanes)
        all_sin = sin.new_zeros(lanes)
        all_cos[:, :, :-1] = cos[0, :, None, None]
        all_sin[:, :, :-1] = sin[0, :, None, None]
        return RowCache(entries, all_cos, all_sin)

    def prefill(self, ids: Tensor, lengths: Tensor, *, cache: RowCache, rows: list[range]) -> Tensor:
        """Prefill prompts ids (P, L), padded on the right: keys and values of prompt p go into each of rows[p] of the
        cache. Returns the hidden state of each prompt's last token, (P, H).
        """
        prompts, width = ids.shape
        shared = self.queries
        size = self.head_dim
        rotation = (cache.cos[:width].repeat(prompts, 1, 1, 1), cache.sin[:width].repeat(prompts, 1, 1, 1))
        x = self.embedding[ids].flatten(0, 1)
        for i, layer in enumerate(self.layers):
            qkv = self._qkv(layer, x, rotation).unflatten(0, (prompts, width))
            kv = qkv[..., shared:, :].permute(0, 2, 3, 1, 4)
            for p, span in enumerate(rows):
                cache.entries[i, span.start : span.stop, :, :, :width] = kv[p]
            q = qkv[..., :shared, :].reshape(prompts, width, -1, size).transpose(1, 2)
            k, v = (kv[:, :, i].repeat_interleave(shared, 1, output_size=self.num_heads) for i in range(2))
            seen = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)
            x = self._rest(layer, x, seen.transpose(1, 2).flatten(2).flatten(0, 1))
        last = torch.arange(prompts, device=ids.device) * width + lengths - 1
        return self._normed(x[last], self.norm)

    def extend(
        self, ids: Tensor, lengths: Tensor, start: Tensor | int, *, cache: RowCache, rows: Sequence[int], width: int
    ) -> Tensor:
        """Continue `rows` of the cache by ids (R, L), padded on the right: token j of row r at position start[r] + j,
        below `width`. A token sees what its row held before `start` and the new ones up to itself; nothing is written
        for padding. Returns the hidden state of each row's last token, (R, H).

        start: a number where all rows begin at the same position; `width` is then start + L. Such rows share a mask,
        or need none, where one of each row's own would be as large as their scores.
        """
        count, most = ids.shape
        size = self.head_dim
        device = ids.device
        shared = self.queries
        alike = isinstance(start, int)
        assert not alike or width == start + most
        starts = torch.full((count,), start, device=device) if alike else start
        positions = starts.unsqueeze(1) + torch.arange(most, device=device)
        mask = None
        if not (alike and self.knows_causal):
            masked = positions[:1] if alike else positions
            ahead = torch.arange(width, device=device) > masked.unsqueeze(-1)
            mask = torch.zeros(len(masked), 1, shared, most, width, dtype=self.dtype, device=device)
            mask = mask.masked_fill_(ahead[:, None, None], -torch.inf).flatten(2, 3)
        # Projections run on the real tokens alone, (N, H); only the attention pads them.
        real = (torch.arange(most, device=device) < lengths.unsqueeze(1)).flatten().nonzero().squeeze(-1)
        position = positions.flatten()[real]
        where: Any = to_device(torch.tensor(rows), device)
        places = cache.places(where[real // most], position)
        if rows[-1] - rows[0] + 1 == len(rows):
            where = slice(rows[0], rows[-1] + 1)
        rotation = cache.cos[position], cache.sin[position]
        x = self.embedding[ids.flatten()[real]]
        padded = x.new_zeros(count * most, self.num_heads, size)
        for i, layer in enumerate(self.layers):
            qkv = self._qkv(layer, x, rotation)
            cache.write(i, places, qkv[:, :, shared:])
            q = padded.index_copy_(0, real, qkv[:, :, :shared].reshape(len(x), -1, size))
            q = q.view(count, most, -1, size).transpose(1, 2)
            keys, values = cache.entries[i, :, :, :, :width][where].unbind(2)
            seen = attended_behind(q, keys, values, mask=mask, scaling=self.scaling)
            seen = seen.transpose(1, 2).reshape(count * most, -1)
            x = self._rest(layer, x, seen[real])
        return self._normed(x[lengths.cumsum(0) - 1], self.norm)

    def step(self, token: Tensor, position: Tensor, *, cache: RowCache, width: int) -> Tensor:
        """Return hidden states (R, H) after one more token in each of the first R rows of the cache, at `position`
        (R,), where its key and value go. It is below `width` in every row whose state counts.
        """
        rows = len(token)
        shared = self.queries
        heads = self.num_kv_heads
        places = cache.places(torch.arange(rows, device=token.device), position)
        ahead = torch.arange(width, device=token.device) > position.unsqueeze(1)
        mask = torch.zeros(rows, 1, width, dtype=self.dtype, device=token.device)
        mask = mask.masked_fill_(ahead.unsqueeze(1), -torch.inf).repeat_interleave(heads, 0, output_size=rows * heads)
        rotation = cache.cos[position], cache.sin[position]
        x = self.embedding[token]
        for i, layer in enumerate(self.layers):
            qkv = self._qkv(layer, x, rotation)  # (R, kv heads, queries + 2, d)
            cache.write(i, places, qkv[:, :, shared:])
            keys, values = cache.entries[i].flatten(0, 1)[: rows * heads, :, :width].unbind(1)
            seen = attended(qkv[:, :, :shared].flatten(0, 1), keys, values, mask=mask, scaling=self.scaling)
            x = self._rest(layer, x, seen.reshape(rows, -1))
        return self._normed(x, self.norm)

    def _qkv(self, layer: LayerWeights, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return rotated queries and key, and the value, for each kv head of flat tokens x (N, H): (N, kv heads,
        queries + 2, d).
        """
        qkv = layer.qkv(self._normed(x, layer.attention_norm))
        shape = (len(x), self.num_kv_heads, -1, self.head_dim)
        if self.layout == "merged":
            qkv = qkv.view(shape)
            if layer.q_norm is None:
                return apply_rope(qkv, *rotation)
            q, k, v = qkv.split([self.queries, 1, 1], 2)
        else:
            by_kind = qkv.split([size * self.num_kv_heads * self.head_dim for size in (self.queries, 1, 1)], -1)
            q, k, v = (t.view(shape) for t in by_kind)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._normed(q, layer.q_norm)
            k = self._normed(k, layer.k_norm)
        return apply_rope(torch.cat([q, k, v], 2), *rotation)

    def _rest(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """Apply attention's output projection and the feed-forward block, each added to its residual."""
        x = layer.out(attended, x)
        gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, -1)
        return layer.down(self.activation(gate).mul_(up), x)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Apply the RMS norm over the last dimension (1910.07467, Eq. 4); weight None: it is in the matrix that comes
        next. GPUs have a kernel for it; on a CPU torch makes many operations of it.
        """
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return rms_norm(x, (x.shape[-1],), weight, self.eps)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        h = x * torch.addcmul(self.least, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return h if weight is None else h.mul_(weight)
