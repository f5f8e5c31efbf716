"""A decoder for every other model: the library's own modules over rows of a static cache (library_cache.py), with the
methods of decoder.py's Decoder.

Linear layers that LoRA adapts, or that train in float32 and sample in half precision, are replaced by layers with
weights of their own (decoder.py's Projection): merged, or with LoRA as a product of its own. Experts that LoRA adapts
are replaced in the same way (models/experts.py). The modules above them are shallow copies; all others are the model's.

Prompts are padded on the right, where the causal mask hides padding; but with states (linear attention, convolutions,
Mamba) on the left, where the modules zero it. Behind what a row holds no padding may enter a state: the decay of
Qwen3.5 acts on zeros as well. New tokens are then cut into powers of two, and each size is a forward pass of the rows
that have it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, get_layer_types_and_kwargs
from transformers.pytorch_utils import Conv1D

from tinyrl.data.images import is_image_id
from tinyrl.generation.decoder import Projection, WeightLayout, join_linear, merged_projection, renewed, tensors
from tinyrl.generation.library_cache import (
    KNOWN_LAYERS,
    Continuation,
    LibraryCache,
    PrefillPass,
    Span,
    has_states,
    row_bytes,
)
from tinyrl.models.batch import by_axis
from tinyrl.models.device import HALVES, to_device
from tinyrl.models.experts import (
    Branch,
    computes_experts,
    experts_output,
    merged_experts,
    sampled_branch,
    wrappers_of,
)
from tinyrl.models.image_inputs import ImageInputs, ImagePass
from tinyrl.models.logprobs import Head, head_of
from tinyrl.models.lora import is_plain_lora
from tinyrl.models.memory import weight_bytes
from tinyrl.models.reward_model import positions_of
from tinyrl.models.states import backbone_of

LINEAR = {"Linear", "Conv1D", "Linear4bit"}  # classes of layers whose weights a Projection can hold
CHUNKED = "chunked_attention"
WITHOUT_MASK = {"linear_attention": None, "conv": None}  # kinds of layers, in a step
REFUSED_MASKS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)

# ---- layers with weights of their own ----


class SampledLinear(nn.Module):
    """A linear layer with weights of its own, which `sync` copies from a layer of the model."""

    def __init__(self, *, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.projection: Projection | None = None

    @property
    def weight(self) -> Tensor:
        assert self.projection is not None
        return self.projection.matrix

    @property
    def bias(self) -> Tensor | None:
        assert self.projection is not None
        return self.projection.bias

    def forward(self, x: Tensor) -> Tensor:
        assert self.projection is not None, "used before `sync`"
        flat = x.reshape(-1, x.shape[-1]).to(self.dtype)
        return self.projection(flat).view(*x.shape[:-1], -1)


class SampledExperts(nn.Module):
    """A layer's experts as LoRA adapts them, which `sync` copies: merged into matrices of its own, or the model's
    matrices beside branches of its own.
    """

    def __init__(self, source: ParamWrapper, *, merges: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts: Any = copy.copy(source.get_base_layer())
        self.experts._parameters = dict(self.experts._parameters)
        self.wrappers = wrappers_of(source)
        self.merges = merges
        self.dtype = dtype
        self.merged = dict[str, Tensor]()
        self.branches = dict[str, Branch]()

    @property
    def own_tensors(self) -> list[Tensor]:
        factors = [factor for branch in self.branches.values() for factor in (branch.first, branch.second)]
        return [*self.merged.values(), *factors]

    def sync(self, adapter: str | None) -> None:
        """Copy the weights as they are now under `adapter`, into the same memory as before."""
        for wrapper in self.wrappers:
            name = wrapper.parameter_name
            if self.merges:
                merged = merged_experts(wrapper, adapter)
                self.merged[name] = renewed(self.merged.get(name), merged)
                self.experts._parameters[name] = nn.Parameter(self.merged[name], requires_grad=False)
                continue
            fresh = sampled_branch(wrapper, adapter, dtype=self.dtype)
            old = self.branches.get(name)
            first = renewed(None if old is None else old.first, fresh.first)
            second = renewed(None if old is None else old.second, fresh.second)
            self.branches[name] = Branch(first, second, scale=1.0)

    def release(self) -> None:
        """Free the copies."""
        for name in self.merged:
            self.experts._parameters[name] = None
        self.merged.clear()
        self.branches.clear()

    def forward(self, states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        assert self.merged or self.branches, "used before `sync`"
        return experts_output(self.experts, states, index, weights, branches=self.branches)


def own_weights(layer: nn.Module, *, dtype: torch.dtype) -> bool:
    """Return whether sampling in `dtype` reads other weights than the layer's: adapted ones, or trained ones cast."""
    if isinstance(layer, LoraLayer):
        base = layer.get_base_layer()
        return type(base).__name__ in LINEAR and isinstance(base, nn.Linear | Conv1D) and is_plain_lora(layer)
    if not isinstance(layer, nn.Linear | Conv1D) or type(layer).__name__ not in LINEAR:
        return False
    return dtype in HALVES and layer.weight.dtype == torch.float32


def with_replaced(
    module: nn.Module, replace: Callable[[nn.Module], nn.Module | None], made: dict[int, nn.Module]
) -> nn.Module:
    """Return the module with those inside it replaced for which `replace` gives another; modules above one are shallow
    copies, all others are shared. made: replacements by id, since a module may be in several places.
    """
    if id(module) in made:
        return made[id(module)]
    other = replace(module)
    if other is None:
        other = module
        children = {} if isinstance(module, LoraLayer) else module._modules
        inside = {n: with_replaced(child, replace, made) for n, child in children.items() if child is not None}
        if any(child is not module._modules[name] for name, child in inside.items()):
            other = copy.copy(module)
            other._modules = {**module._modules, **inside}
    made[id(module)] = other
    return other


# ---- masks ----


@dataclass(frozen=True)
class Window:
    """Which earlier tokens a kind of layer sees: the last `size`, or those of its chunk of that size; None: all."""

    size: int | None
    chunked: bool

    def sees(self, at: Tensor, columns: Tensor) -> Tensor:
        seen = columns <= at
        if self.size is None:
            return seen
        if self.chunked:
            return seen & (columns // self.size == at // self.size)
        return seen & (columns > at - self.size)


NO_WINDOW = Window(None, chunked=False)


def windows_of(config: Any) -> dict[str, Window]:
    """Return the window of each kind of layer that a model has."""
    kinds, options = get_layer_types_and_kwargs(config)
    found: dict[str, Window] = {}
    for kind, option in zip(kinds, options, strict=True):
        if kind != "dummy":
            found[kind] = Window(option.get("sliding_window"), chunked=kind == CHUNKED)
    return found


# ---- the decoder ----


@dataclass(frozen=True)
class TokensRead:
    """What a forward pass reads of tokens (R, L): ids, positions (R, L) or (3, R, L), and images if there are any.

    shift (R,): of the position of a row's next token from its number in the row; None where rows have no images.
    """

    ids: Tensor
    positions: Tensor
    shift: Tensor | None
    images: ImagePass | None


class LibraryDecoder:
    """Hidden states of new tokens by the library's modules, which compute in `dtype` as in training passes.

    images: of a model that reads them. extends_images: whether tokens behind those in the cache may be of an image.
    layout: of replaced layers' weights (decoder.py); None: all modules are the model's own, whose acting adapter
    counts, and trained weights are cast at every use. adapts: whether modules of the model's own have adapters, so that
    the role has to act during the forward pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype,
        layout: WeightLayout | None,
        images: ImageInputs | None = None,
    ) -> None:
        self.model = model
        self.images = images
        self.dtype = dtype
        self.layout: WeightLayout | None = layout
        self.half = dtype in HALVES
        self.device = next(model.parameters()).device
        self.sampled: list[tuple[nn.Module, SampledLinear]] = []
        self.sampled_experts: list[SampledExperts] = []
        backbone = backbone_of(model)
        self.backbone: Any = backbone if layout is None else with_replaced(backbone, self._replacement, {})
        self.adapts = any(isinstance(module, LoraLayer) for module in self.backbone.modules())
        config = backbone.config.get_text_config(decoder=True)  # pyright: ignore
        self.last_position = positions_of(config) - 1
        self.like = self._library_cache(backbone)
        self.has_states = has_states(self.like)
        self.windows = windows_of(config)
        self.extends_images = images is None or not (images.sees_ahead or self.has_states)
        self.release()

    def _replacement(self, layer: nn.Module) -> SampledLinear | SampledExperts | None:
        if computes_experts(layer):
            experts = SampledExperts(layer, merges=self.layout == "merged", dtype=self.dtype)
            self.sampled_experts.append(experts)
            return experts
        if not own_weights(layer, dtype=self.dtype):
            return None
        base: Any = layer.get_base_layer() if isinstance(layer, LoraLayer) else layer
        sizes = (base.nx, base.nf) if isinstance(base, Conv1D) else (base.in_features, base.out_features)
        other = SampledLinear(in_features=sizes[0], out_features=sizes[1], dtype=self.dtype)
        self.sampled.append((layer, other))
        return other

    @torch.no_grad()
    def _library_cache(self, backbone: Any) -> Cache:
        """Return the library's cache of two tokens. Raises ValueError where one of its layers is of an unknown kind."""
        cache = DynamicCache(config=backbone.config)
        ids = torch.tensor([[1, 2]], device=self.device)
        with self._autocast():
            backbone(input_ids=ids, past_key_values=cache, use_cache=True)
        unknown = sorted({type(layer).__name__ for layer in cache.layers} - {kind.__name__ for kind in KNOWN_LAYERS})
        if unknown:
            raise ValueError(f"its cache has layers of the kind {', '.join(unknown)}")
        return cache

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.half, cache_enabled=False)

    @cached_property
    def side_stream(self) -> torch.cuda.Stream:
        """The stream on which all CUDA graphs are captured."""
        return torch.cuda.Stream()

    @property
    def embedding(self) -> Tensor:
        return self.backbone.get_input_embeddings().weight

    @property
    def weight_bytes(self) -> int:
        """Count the bytes of the private copies."""
        own = [t for _, layer in self.sampled if layer.projection is not None for t in tensors(layer.projection)]
        own += [t for experts in self.sampled_experts for t in experts.own_tensors]
        shared = {p.data_ptr() for p in self.model.parameters()}
        return weight_bytes(t for t in [*own, self.head.weight] if t.data_ptr() not in shared)

    def row_bytes(self, width: int) -> int:
        """Count the bytes of a row of `width` tokens in the cache."""
        return row_bytes(self.like, width, dtype=self.dtype)

    # ---- weights ----

    @torch.no_grad()
    def sync(self, adapter: str | None) -> None:
        """Copy the weights as they are now under `adapter`, into the same memory as before."""
        head = head_of(self.model)
        weight = head.weight
        bias = head.bias
        if self.layout is not None:
            weight = renewed(self.head.weight, weight.to(self.dtype))
            bias = None if bias is None else renewed(self.head.bias, bias.to(self.dtype))
        self.head = Head(weight, bias, head.scale, head.softcap)
        for source, layer in self.sampled:
            fresh = self._projection(source, adapter)
            if layer.projection is None:
                layer.projection = fresh
            for old, new in zip(tensors(layer.projection), tensors(fresh), strict=True):
                assert old.shape == new.shape, "a weight has another shape than at the last sync"
                renewed(old, new)
        for experts in self.sampled_experts:
            experts.sync(adapter)

    def _projection(self, source: nn.Module, adapter: str | None) -> Projection:
        if self.layout == "merged":
            return merged_projection([source], adapter)
        return join_linear([source], adapter, dtype=self.dtype, quantized=self.layout == "quantized")

    def release(self) -> None:
        """Free the copies; `sync` makes them again."""
        self.head = Head(torch.empty(0), None)
        for _, layer in self.sampled:
            layer.projection = None
        for experts in self.sampled_experts:
            experts.release()

    # ---- forward passes ----

    def new_cache(self, rows: int, width: int) -> LibraryCache:
        kept: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        return LibraryCache(self.like, rows, width, **kept, has_images=self.images is not None)

    def prefill(
        self,
        ids: Tensor,
        lengths: Tensor,
        *,
        cache: LibraryCache,
        rows: list[range],
    ) -> Tensor:
        """Prefill prompts ids (P, L), padded on the right: keys, values and states of prompt p go into each of rows[p]
        of the cache. Returns the hidden state of each prompt's last token, (P, H).
        """
        counts = lengths.tolist()
        longest = ids.shape[1]
        columns = torch.arange(longest, device=ids.device)
        first = torch.zeros_like(lengths)
        mask = None
        if self.has_states and min(counts) < longest:
            first = longest - lengths
            mask = (columns >= first.unsqueeze(1)).long()
        positions = (columns - first.unsqueeze(1)).clamp(min=0)
        places = zip(rows, first.tolist(), counts, strict=True)
        spans = [Span(slice(row.start, row.stop), start, count) for row, start, count in places]
        cache.begin(PrefillPass(spans))
        given = self._unpadded(ids, counts)
        ids = ids.gather(1, positions)
        if self.images is not None and mask is not None:
            ids = ids.where(mask.bool(), 0)  # padding is of no image
        read = self._read(given, ids, positions, first=first.tolist())
        if cache.shift is not None and read.shift is not None:
            for span, shift in zip(rows, read.shift, strict=True):
                cache.shift[span.start : span.stop] = shift
        states = self._forward(read, mask, cache)
        return states[torch.arange(len(ids), device=ids.device), first + lengths - 1]

    def extend(
        self,
        ids: Tensor,
        lengths: Tensor,
        start: Tensor | int,
        *,
        cache: LibraryCache,
        rows: Sequence[int],
        width: int,
    ) -> Tensor:
        """Continue `rows` of the cache by ids (R, L), padded on the right: token j of row r at position start[r] + j
        (a number: of all rows), below `width`. Returns the hidden state of each row's last token, (R, H).
        """
        starts = start if isinstance(start, Tensor) else torch.full_like(lengths, start)
        counts = lengths.tolist()
        if not self.has_states or min(counts) == max(counts):
            return self._extend(ids, lengths, starts, cache=cache, rows=rows, width=width)
        last: Tensor | None = None
        done = [0] * len(rows)
        for bit in reversed(range(max(counts).bit_length())):
            size = 1 << bit
            part = [r for r, count in enumerate(counts) if count & size]
            if not part:
                continue
            pieces = torch.stack([ids[r, done[r] : done[r] + size] for r in part])
            behind = to_device(torch.tensor([done[r] for r in part]), self.device) + starts[part]
            sizes = torch.full_like(behind, size)
            own = [rows[r] for r in part]
            states = self._extend(pieces, sizes, behind, cache=cache, rows=own, width=width)
            if last is None:
                last = states.new_zeros(len(rows), states.shape[1])
            last[part] = states
            for r in part:
                done[r] += size
        assert last is not None
        return last

    def _extend(
        self, ids: Tensor, lengths: Tensor, start: Tensor, *, cache: LibraryCache, rows: Sequence[int], width: int
    ) -> Tensor:
        ahead = torch.arange(ids.shape[1], device=ids.device)
        positions = start.unsqueeze(1) + ahead
        columns = torch.where(ahead < lengths.unsqueeze(1), positions, cache.width)
        first = rows[0]
        adjacent = [*rows] == [*range(first, first + len(rows))]
        where = slice(first, first + len(rows)) if adjacent else to_device(torch.tensor([*rows]), self.device)
        shift = None if cache.shift is None else cache.shift[where]
        read = self._read(self._unpadded(ids, lengths.tolist()), ids, positions, shift=shift)
        if cache.shift is not None and read.shift is not None:
            cache.shift[where] = read.shift
        masks = self._masks(positions, width, by_kind=self.takes_masks_by_kind)
        states = self._behind(read, masks, Continuation(where, columns, width), cache)
        return states[torch.arange(len(ids), device=ids.device), lengths - 1]

    def step(self, token: Tensor, position: Tensor, *, cache: LibraryCache, width: int) -> Tensor:
        """Return hidden states (R, H) after one more token in each of the first R rows of the cache, at `position`
        (R,), where what the layers keep of it goes. It is below `width` in every row whose state counts.
        """
        at = position.unsqueeze(1)
        shift = None if cache.shift is None else cache.shift[: len(token)]
        read = self._read([], token.unsqueeze(1), at, shift=shift)
        masks = self._masks(at, width, by_kind=self.takes_masks_by_kind)
        return self._behind(read, masks, Continuation(slice(0, len(token)), at, width), cache)[:, -1]

    def _behind(self, read: TokensRead, masks: Any, batch: Continuation, cache: LibraryCache) -> Tensor:
        cache.begin(batch)
        states = self._forward(read, masks, cache)
        cache.end()
        return states

    def _unpadded(self, ids: Tensor, counts: list[int]) -> list[list[int]]:
        """Return the tokens of rows that are padded on the right, where images are looked for in them."""
        if self.images is None:
            return []
        return [row[:count] for row, count in zip(ids.tolist(), counts, strict=True)]

    def _read(
        self,
        rows: list[list[int]],
        ids: Tensor,
        numbers: Tensor,
        *,
        first: list[int] | None = None,
        shift: Tensor | None = None,
    ) -> TokensRead:
        """Return what the model reads of tokens ids (R, L) that are `numbers` (R, L) in their rows. rows: the same
        tokens, of each row from column `first` (None: 0) on, if there may be images; shift (R,): of the rows so far.
        """
        if self.images is None:
            return TokensRead(ids, numbers, None, None)
        shift = torch.zeros(len(ids), dtype=torch.long, device=self.device) if shift is None else shift
        positions = (numbers + shift.unsqueeze(1)).expand(self.images.axes, *numbers.shape)
        with_images = [row for row, tokens in enumerate(rows) if any(map(is_image_id, tokens))]
        if with_images:
            positions = positions.clone()
            shift = shift.clone()
        for row in with_images:
            own = self.images.positions(rows[row])
            column = 0 if first is None else first[row]
            begins = numbers[row, column] + shift[row]
            positions[:, row, column : column + len(rows[row])] = to_device(own.prompt, self.device) + begins
            shift[row] += own.shift
        return TokensRead(self.images.plain(ids), by_axis(positions), shift, self.images.of_pass(rows, ids))

    def _masks(self, positions: Tensor, width: int, *, by_kind: bool) -> Any:
        """Return the additive mask (R, 1, L, width) of tokens at positions (R, L): of each kind of layer, or the one
        that all kinds have.
        """
        columns = torch.arange(width, device=positions.device)
        at = positions[:, None, :, None]
        made: dict[Window, Tensor] = {}
        for window in {*self.windows.values(), NO_WINDOW} if by_kind else {*self.windows.values()}:
            mask = torch.zeros(len(at), 1, at.shape[2], width, dtype=self.dtype, device=at.device)
            made[window] = mask.masked_fill_(~window.sees(at, columns), torch.finfo(self.dtype).min)
        if not by_kind:
            [mask] = made.values()
            return mask
        masks = {kind: made[window] for kind, window in self.windows.items()}
        return {"full_attention": made[NO_WINDOW], **masks, **WITHOUT_MASK}

    @cached_property
    def takes_masks_by_kind(self) -> bool:
        """Return whether the model's forward pass takes masks by kind of layer, rather than one of all layers. Raises
        ValueError where it takes neither.
        """
        at = torch.ones(1, 1, dtype=torch.long, device=self.device)
        for by_kind in (True, False):
            cache = self.new_cache(1, 4)
            cache.begin(PrefillPass([Span(slice(0, 1), first=0, count=1)]))
            self._forward(self._read([], at, at - 1), None, cache)
            batch = Continuation(slice(0, 1), at, 3)
            try:
                self._behind(self._read([], at, at), self._masks(at, 3, by_kind=by_kind), batch, cache)
            except torch.OutOfMemoryError:
                raise
            except REFUSED_MASKS:
                continue
            return by_kind
        raise ValueError("its forward pass takes no masks of rows that are at different positions")

    def _forward(self, read: TokensRead, mask: Any, cache: LibraryCache) -> Tensor:
        """Return the hidden states (R, L, H) of tokens."""
        # A row that has ended is decoded on beside the others; learned positions have a last one.
        positions = read.positions.clamp(max=self.last_position)
        with self._autocast():
            options: dict[str, Any] = {
                "attention_mask": mask,
                "position_ids": positions,
                "past_key_values": cache,
                "use_cache": True,
            }
            if read.images is None:
                output = self.backbone(input_ids=read.ids, **options)
            else:
                output = read.images.run(self.backbone, read.ids, **options)
        return output.last_hidden_state.to(self.dtype)
