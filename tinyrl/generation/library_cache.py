"""A static cache of rows for the library's own modules: what each layer keeps of a sequence, a row per sequence.

Which tensors these are is asked from the library: a text of two tokens goes through its DynamicCache, and each layer
here gets tensors of the same shapes: keys and values, states of linear attention, convolutions and Mamba, or both.

A forward pass is announced with `begin` (PrefillPass or Continuation), because the modules hand over keys and values
without saying whose they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from tinyrl.generation.decoder import zeros

KNOWN_LAYERS = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    DummyLayer,
}
STATES = {"conv": "conv_states", "recurrent": "recurrent_states"}  # kind of state: where the library's layers keep it
StateKey = tuple[str, int]  # kind and number of a state of a layer


@dataclass(frozen=True)
class Span:
    """A prompt of a batch: its `count` tokens begin at column `first` of the batch, and go into `rows` of the cache."""

    rows: slice
    first: int
    count: int


@dataclass(frozen=True)
class PrefillPass:
    """A forward pass over prompts, from their beginning."""

    spans: list[Span]


@dataclass
class Continuation:
    """A forward pass over tokens behind what R rows hold: token j of row r goes to columns[r, j], and all of them see
    the first `width` columns, as far as the mask lets them.

    rows: those of the cache, a slice where they are adjacent; width: columns that are read; gathered: states of rows
    that are not adjacent, until `end` writes them back.
    """

    rows: slice | Tensor
    columns: Tensor
    width: int
    gathered: dict[tuple[int, StateKey], Tensor] = field(default_factory=dict)
    _places: dict[int, Tensor] = field(default_factory=dict)

    def places(self, heads: int, columns: int) -> Tensor:
        """Return the flat index of each new token, (R * heads * L,), among keys of `heads` heads and `columns`."""
        if heads not in self._places:
            rows = self.rows
            device = self.columns.device
            numbers = torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, slice) else rows
            lanes = numbers.unsqueeze(1) * heads + torch.arange(heads, device=device)
            self._places[heads] = (lanes.unsqueeze(-1) * columns + self.columns.unsqueeze(1)).reshape(-1)
        return self._places[heads]


@dataclass
class ForwardPass:
    """What the forward pass under way, or to come, is of; shared by a cache and its layers."""

    batch: PrefillPass | Continuation


class LayerCache(CacheLayerMixin, LinearAttentionCacheLayerMixin):
    """What one layer keeps of each row: keys and values (rows, heads, width + 1, d), states (rows, ...), or both. The
    last column takes what is written for padding.
    """

    is_compileable = False

    def __init__(
        self,
        like: Any,
        current: ForwardPass,
        *,
        number: int,
        rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.current = current
        self.number = number
        self.is_sliding = isinstance(like, DynamicSlidingWindowLayer)
        self.is_initialized = True
        self.record_past = False
        self.keys: Any = None
        self.values: Any = None
        if isinstance(like, CacheLayerMixin):
            of_a_text: list[Any] = [like.keys, like.values]
            shapes = [(rows, t.shape[1], width + 1, t.shape[3]) for t in of_a_text]
            self.keys, self.values = (zeros(shape, dtype=dtype, device=device) for shape in shapes)
        self.states: dict[StateKey, Tensor] = {}
        for key, state in states_of(like).items():
            self.states[key] = zeros((rows, *state.shape[1:]), dtype=state.dtype, device=device)

    # ---- what the library asks, to make masks of prompts; other forward passes bring their own ----

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """All tensors are there from the start."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    # ---- keys and values ----

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values (R, heads, L, d) of new tokens; return those that these tokens attend to."""
        batch = self.current.batch
        if isinstance(batch, PrefillPass):
            for p, span in enumerate(batch.spans):
                tokens = slice(span.first, span.first + span.count)
                self.keys[span.rows, :, : span.count] = key_states[p, :, tokens]
                self.values[span.rows, :, : span.count] = value_states[p, :, tokens]
            return key_states, value_states
        return self._continued(self.keys, key_states, batch), self._continued(self.values, value_states, batch)

    def _continued(self, kept: Tensor, new: Tensor, batch: Continuation) -> Tensor:
        size = kept.shape[-1]
        places = batch.places(kept.shape[1], kept.shape[2])
        kept.view(-1, size).index_copy_(0, places, new.reshape(-1, size).to(kept.dtype))
        return kept[:, :, : batch.width][batch.rows]

    # ---- states ----

    def state(self, key: StateKey) -> Tensor | None:
        """Return the state of the rows in hand, which the modules may change in place; None for prompts, by which they
        know that there is none yet.
        """
        batch = self.current.batch
        if isinstance(batch, PrefillPass) or key not in self.states:
            return None
        if isinstance(batch.rows, slice):
            return self.states[key][batch.rows]
        if (self.number, key) not in batch.gathered:
            batch.gathered[self.number, key] = self.states[key].index_select(0, batch.rows)
        return batch.gathered[self.number, key]

    def _write(self, key: StateKey, state: Tensor) -> Tensor:
        batch = self.current.batch
        current = self.state(key)
        if current is not None:
            return current.copy_(state)
        assert isinstance(batch, PrefillPass)
        for p, span in enumerate(batch.spans):
            self.states[key][span.rows] = state[p].to(self.states[key].dtype)
        return state

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Write the last inputs of a convolution; return them behind those that were there."""
        key = ("conv", state_idx)
        size = self.states[key].shape[-1]
        before = self.state(key)
        if before is None:
            whole = pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            whole = torch.cat([before, conv_states], -1)
        self._write(key, whole[..., -size:])
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return self._write(("recurrent", state_idx), recurrent_states)


class LibraryCache(Cache):
    """`rows` rows of `width` tokens, shaped like the layers of `like`; keys and values are kept in `dtype`.

    can_truncate: whether a row can be cut to its first tokens. States are of all tokens of a row: such a row is
    continued whole or not at all. shift (rows,): of a later token's position from its number in the row, which images
    in front of it make; None where rows have no images.
    """

    def __init__(
        self,
        like: Cache,
        rows: int,
        width: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        has_images: bool = False,
    ) -> None:
        self.width = width
        self.can_truncate = not has_states(like)
        self.shift = torch.zeros(rows, dtype=torch.long, device=device) if has_images else None
        self.current = ForwardPass(PrefillPass([]))
        shape: dict[str, Any] = {"rows": rows, "width": width, "dtype": dtype, "device": device}
        layers: list[Any] = [
            layer if type(layer) is DummyLayer else LayerCache(layer, self.current, number=i, **shape)
            for i, layer in enumerate(like.layers)
        ]
        super().__init__(layers=layers)

    def begin(self, batch: PrefillPass | Continuation) -> None:
        """Announce the forward pass to come."""
        self.current.batch = batch

    def end(self) -> None:
        """Write back states of rows that are not adjacent."""
        batch = self.current.batch
        if isinstance(batch, Continuation) and isinstance(batch.rows, Tensor):
            for (number, key), state in batch.gathered.items():
                self.layers[number].states[key].index_copy_(0, batch.rows, state)  # pyright: ignore
        self.current.batch = PrefillPass([])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # of prompts, as get_mask_sizes; a model of states alone asks as well

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.layers[layer_idx].state(("conv", state_idx))  # pyright: ignore

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.layers[layer_idx].state(("recurrent", state_idx))  # pyright: ignore

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return isinstance(self.current.batch, Continuation)

    def _of_rows(self, tokens: int) -> Iterator[Tensor]:
        """Yield views (rows, ...) of all that belongs to rows of this many tokens."""
        if self.shift is not None:
            yield self.shift
        for layer in self.layers:
            if isinstance(layer, LayerCache):
                if layer.keys is not None:
                    yield layer.keys[:, :, :tokens]
                    yield layer.values[:, :, :tokens]
                yield from layer.states.values()

    def copy(self, source: int, to: int, tokens: int) -> None:
        for tensor in self._of_rows(tokens):
            tensor[to] = tensor[source]

    def exchange(self, a: int, b: int, tokens: int) -> None:
        for tensor in self._of_rows(tokens):
            kept = tensor[b].clone()
            tensor[b] = tensor[a]
            tensor[a] = kept


def states_of(layer: Any) -> dict[StateKey, Tensor]:
    """Return the states that a layer of the library's own cache has."""
    found: dict[StateKey, Tensor] = {}
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for kind, name in STATES.items():
            for number, state in getattr(layer, name).items():
                if state is not None:
                    found[kind, number] = state
    return found


def has_states(like: Cache) -> bool:
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in like.layers)


def row_bytes(like: Cache, width: int, *, dtype: torch.dtype) -> int:
    """Count the bytes of a row of `width` tokens: keys, values and states."""
    total = 0
    for layer in like.layers:
        if isinstance(layer, CacheLayerMixin):
            keys: Any = layer.keys
            values: Any = layer.values
            numbers = keys.shape[1] * keys.shape[3] + values.shape[1] * values.shape[3]
            total += numbers * dtype.itemsize * (width + 1)
        total += sum(state.nbytes for state in states_of(layer).values())
    return max(1, total)
