"""Layout of a micro-batch for the model, padded or packed: which hidden state predicts which response token.

Only this file knows the layout. Padded: rows are padded on the right, with explicit position ids, so learned and
rotary positions agree with an unpadded row. Packed: all rows stand end to end as one, rows with the same prompt behind
one copy of it (packing.py). Either way states come back flat, (N, H), one for each listed response token; the head
never sees a prompt, a tool's answer or a padding position.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tinyrl.models.device import as_exact, autocast_dtype, in_float32, ordinary_ids, to_device
from tinyrl.models.fused_backbone import can_fuse_now, could_fuse, fused_states
from tinyrl.models.packing import CannotPack, Packing, attending, pack, shared_start

Masks = Sequence[Sequence[bool]] | None  # of each row's response: which tokens are listed


@dataclass(frozen=True)
class SequenceBatch:
    """b rows of prompt + response, ready for a model, and the map from response token to position.

    input_ids, attention_mask, position_ids (b, L), or (1, L) where packed; N response tokens (all that exist, or those
    of a mask) are listed row by row: `row` and `column` (N,) say where a flat value belongs in a (b, T) tensor,
    `state_index` (N,) which of the positions predicts it, `targets` (N,) its id. `last_index` (b,) is the position of
    each row's last token, None where the input leaves it out.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    row: Tensor
    column: Tensor
    state_index: Tensor
    targets: Tensor
    last_index: Tensor | None
    num_rows: int
    num_columns: int
    packing: Packing | None = None

    def to_rows(self, flat: Tensor) -> Tensor:
        """Flat (N,) -> (b, T) with 0 where no token is listed; differentiable."""
        out = flat.new_zeros(self.num_rows, self.num_columns)
        return out.index_put((self.row, self.column), flat)


def make_batch(
    prompts: list[list[int]], responses: list[list[int]], masks: Masks = None, *, device: torch.device | str = "cpu"
) -> SequenceBatch:
    """Lay b prompts and responses out as one right-padded batch. A response may be empty; a prompt may not. masks say
    which response tokens are listed (None: all); the others are only read.
    """
    listed = _listed(prompts, responses, masks)
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    width = max(lengths)
    input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    state_index: list[int] = []
    for i, (prompt, response, columns) in enumerate(zip(prompts, responses, listed, strict=True)):
        input_ids[i, : lengths[i]] = torch.tensor(prompt + response)
        attention_mask[i, : lengths[i]] = 1
        start = i * width + len(prompt) - 1
        state_index += [start + t for t in columns]
    return SequenceBatch(
        to_device(input_ids, device),
        to_device(attention_mask, device),
        torch.arange(width, device=device).expand(len(prompts), width),
        **_response_tokens(responses, listed, state_index, device),
        last_index=to_device(torch.tensor([i * width + n - 1 for i, n in enumerate(lengths)]), device),
    )


def make_packed_batch(
    prompts: list[list[int]],
    responses: list[list[int]],
    masks: Masks = None,
    *,
    device: torch.device | str = "cpu",
    last_tokens: bool = False,
) -> SequenceBatch:
    """The same rows end to end; those whose prompts are equal share one, and different prompts what they begin with. A
    row's last token predicts nothing that counts and is left out, unless `last_tokens` says that its state is to be
    read.
    """
    listed = _listed(prompts, responses, masks)
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt), []).append(row)
    start = shared_start(groups) if len(groups) > 1 else 0
    ids: list[int] = prompts[0][:start]
    positions: list[int] = list(range(start))
    before: list[list[int]] = [[] for _ in prompts]  # of each row: the positions before each of its tokens
    ends = [0] * len(prompts)
    shape: list[tuple[int, list[int]]] = []
    for prompt, rows in groups.items():
        ids += prompt[start:]
        positions += range(start, len(prompt))
        root = len(ids) - 1
        kept = [responses[row] if last_tokens else responses[row][:-1] for row in rows]
        for row, tokens in zip(rows, kept, strict=True):
            last = len(ids) - 1
            before[row] = [last + t if t else root for t in listed[row]]
            ids += tokens
            positions += range(len(prompt), len(prompt) + len(tokens))
            ends[row] = len(ids) - 1 if tokens else root
        shape.append((len(prompt) - start, [len(tokens) for tokens in kept]))
    input_ids = to_device(torch.tensor([ids]), device)
    return SequenceBatch(
        input_ids,
        torch.ones_like(input_ids),
        to_device(torch.tensor([positions]), device),
        **_response_tokens(responses, listed, list(chain(*before)), device),
        last_index=to_device(torch.tensor(ends), device) if last_tokens else None,
        packing=pack(shape, start=start, device=device),
    )


def _listed(prompts: list[list[int]], responses: list[list[int]], masks: Masks) -> list[Sequence[int]]:
    """Of each row the response tokens that are listed, by their place in the response."""
    assert len(prompts) == len(responses)
    assert all(prompts), "a row needs at least one prompt token to predict from"
    if masks is None:
        return [range(len(response)) for response in responses]
    assert [len(mask) for mask in masks] == [len(response) for response in responses], "a mask for each response token"
    return [[t for t, wanted in enumerate(mask) if wanted] for mask in masks]


def _response_tokens(
    responses: list[list[int]], listed: list[Sequence[int]], state_index: list[int], device: torch.device | str
) -> dict[str, Any]:
    """The fields of a batch that do not depend on its layout, and `state_index`, as tensors."""
    row = [i for i, columns in enumerate(listed) for _ in columns]
    targets = [response[t] for response, columns in zip(responses, listed, strict=True) for t in columns]
    lists = {"row": row, "column": list(chain(*listed)), "targets": targets, "state_index": state_index}
    fields = {name: to_device(torch.tensor(x, dtype=torch.long), device) for name, x in lists.items()}
    return {**fields, "num_rows": len(responses), "num_columns": max(map(len, responses), default=0)}


def backbone_of(model: nn.Module) -> nn.Module:
    """The decoder below the language-model head (or below a classification head)."""
    prefix = getattr(model, "base_model_prefix", "")
    backbone = getattr(model, prefix, None) if prefix else None
    if backbone is None or backbone is model:
        raise ValueError(
            f"{type(model).__name__} keeps no separate decoder under `{prefix}` to read hidden states from"
        )
    return backbone


def all_states(backbone: nn.Module, batch: SequenceBatch) -> Tensor:
    """Hidden states of every position, flat (b * L, H)."""
    if batch.packing is not None and fuses(backbone):
        return _our_states(backbone, batch)
    return library_states(backbone, batch)


def library_states(backbone: nn.Module, batch: SequenceBatch) -> Tensor:
    with attending(backbone, batch.packing):
        output = backbone(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            use_cache=False,
        )
    return output.last_hidden_state.flatten(0, 1)


def states_at(states: Tensor, index: Tensor) -> Tensor:
    """states[index], whose backward adds up in the order of `index`. Rows that share a prompt read one state, and on a
    CPU the backward of indexing adds in the order in which threads arrive; on a GPU it sorts, index_select's does not.
    """
    return states.index_select(0, index) if states.device.type == "cpu" else states[index]


def response_states(backbone: nn.Module, batch: SequenceBatch) -> Tensor:
    """The hidden states that predict each response token, flat (N, H) in the order of `batch.row`, `batch.column`."""
    return states_at(all_states(backbone, batch), batch.state_index)


def last_states(backbone: nn.Module, batch: SequenceBatch) -> Tensor:
    """The hidden state of each row's last token, (b, H): what a reward model scores."""
    assert batch.last_index is not None, "the batch was packed without its last tokens"
    return states_at(all_states(backbone, batch), batch.last_index)


@torch.no_grad()
def packs_exactly(backbone: nn.Module) -> bool:
    """Whether the decoder's packed states equal its padded ones, tested on a few tokens.

    Always False for eager attention, which stays as asked, and for attention windows: those longer than the test would
    not show, so the config decides.
    """
    config: Any = backbone.config
    full = all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
    if (
        not getattr(backbone, "_supports_attention_backend", False)
        or config._attn_implementation == "eager"
        or not full
    ):
        return False
    padded, packed = (_few_rows(backbone, make) for make in (make_batch, partial(make_packed_batch, last_tokens=True)))
    try:
        ours = _read(library_states(backbone, packed), packed)
    except CannotPack:
        return False
    return _alike([ours], lambda: [_read(library_states(backbone, padded), padded)], backbone)


TRIED_LAYERS = 2  # whose derivatives are compared
SMALL = 1e-3  # of the largest norm: the least that an error is relative to
_fuses: WeakKeyDictionary[nn.Module, dict[torch.dtype | None, bool]] = WeakKeyDictionary()  # that have been tried
States = Callable[[nn.Module, SequenceBatch], Tensor]


def fuses(backbone: nn.Module) -> bool:
    """Whether fused_backbone.py computes what the decoder does, as things are. Its numbers are compared once, in each
    dtype of autocast, on few packed tokens.
    """
    tried = _fuses.setdefault(backbone, {})
    low = autocast_dtype(next(backbone.parameters()).device.type)
    if low not in tried and not could_fuse(backbone):
        tried[low] = False
    if not tried.get(low, True) or not can_fuse_now(backbone):
        return False
    if low not in tried:
        tried[low] = _fuses_exactly(backbone)
    return tried[low]


@torch.no_grad()
def _fuses_exactly(backbone: nn.Module) -> bool:
    """Whether states are those of the library, and the derivatives of a few layers."""
    batch = _few_rows(backbone, partial(make_packed_batch, last_tokens=True))
    try:
        states, few = _read(_our_states(backbone, batch), batch), _first_layers(backbone, TRIED_LAYERS)
        return _alike([states], lambda: [_read(library_states(backbone, batch), batch)], backbone) and _alike(
            _gradients(_our_states, few, batch), lambda: _gradients(library_states, few, batch), few
        )
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, CannotPack, LookupError, RuntimeError, TypeError, ValueError):  # parts of another shape
        return False


def _our_states(backbone: nn.Module, batch: SequenceBatch) -> Tensor:
    assert batch.packing is not None
    return fused_states(backbone, batch.input_ids, batch.position_ids, batch.packing)


def _few_rows(backbone: nn.Module, make: Callable[..., SequenceBatch]) -> SequenceBatch:
    """A prompt of three responses, and another of one."""
    config: Any = backbone.config
    ids = ordinary_ids(config.get_text_config().vocab_size, 14)
    prompts = [ids[:4], ids[:4], ids[:4], ids[4:6]]
    responses = [ids[6:9], ids[9:10], ids[2:8], ids[10:14]]
    return make(prompts, responses, device=next(backbone.parameters()).device)


def _read(states: Tensor, batch: SequenceBatch) -> Tensor:
    """Of all states those that are used."""
    assert batch.last_index is not None
    return torch.cat([states_at(states, index) for index in (batch.state_index, batch.last_index)])


def _first_layers(backbone: Any, count: int) -> nn.Module:
    """The decoder with fewer layers, the same ones, none of which is recomputed."""
    few = copy.copy(backbone)
    layers: list[Any] = [copy.copy(layer) for layer in backbone.layers[:count]]
    for layer in layers:
        layer.gradient_checkpointing = False
    few._modules = {**backbone._modules, "layers": nn.ModuleList(layers)}
    return few


def _gradients(states: States, backbone: nn.Module, batch: SequenceBatch) -> list[Tensor]:
    """Of the embedded tokens, and of the parameters that are trained: those of a sum of the states that are used, each
    number with a weight of its own.
    """
    leaves: list[Tensor] = []

    def as_leaf(_layer: nn.Module, _ids: object, embedded: Tensor) -> Tensor:
        leaves.append(embedded.detach().requires_grad_())
        return leaves[-1]

    hook = backbone.embed_tokens.register_forward_hook(as_leaf)  # pyright: ignore
    try:  # weights as they are while a layer runs: in_float32 changes them
        with torch.enable_grad(), saved_tensors_hooks(Tensor.detach, lambda kept: kept):
            found = _read(states(backbone, batch), batch).float()
            weights = torch.arange(found.numel(), device=found.device).cos().view_as(found)
            loss = (found * weights).sum()
    finally:
        hook.remove()
    trained = [p for p in backbone.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [*leaves, *trained], allow_unused=True)
    return [gradient.float().reshape(1, -1) for gradient in found if gradient is not None]


def _alike(ours: list[Tensor], library: Callable[[], list[Tensor]], backbone: nn.Module) -> bool:
    """Whether these are the numbers that the library's modules compute: the same in float32, as near to float32 in
    half precision. By rows (K, n), the error of a row is relative to its norm.
    """
    kind = ours[0].device.type
    theirs = library()
    if autocast_dtype(kind) is None and ours[0].dtype == torch.float32:
        return bool((_errors(ours, theirs) <= 1e-4).all())
    with torch.autocast(kind, enabled=False), in_float32(backbone):
        exact = library()
    error, of_library = (float(_errors(x, exact).mean()) for x in (ours, theirs))
    return as_exact(error, of_library)


def _errors(found: list[Tensor], exact: list[Tensor]) -> Tensor:
    gaps = torch.cat([(x.float() - y.float()).norm(dim=1) for x, y in zip(found, exact, strict=True)])
    norms = torch.cat([x.float().norm(dim=1) for x in exact])
    return gaps / norms.clamp(min=SMALL * float(norms.max()))  # what should be zero is what rounding leaves
