"""Layout of a micro-batch for the model, padded or packed: which hidden state predicts which response token.

Only this file knows the layout. Padded: rows are padded on the right, with explicit position ids, so learned and
rotary positions agree with an unpadded row. Packed: all rows stand end to end as one, rows with the same prompt behind
one copy of it (packing.py). Either way states come back flat, (N, H), one for each listed response token; the head
never sees a prompt, a tool's answer or a padding position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from tinyrl.models.checks import supports_fused_layers
from tinyrl.models.device import to_device
from tinyrl.models.layers import fused_states
from tinyrl.models.packing import Packing, attending, pack, shared_start

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
    if batch.packing is not None and supports_fused_layers(backbone):
        return fused_states(backbone, batch.input_ids, batch.position_ids, batch.packing)
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
