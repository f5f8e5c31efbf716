"""A micro-batch as model and loss read it: rows padded or packed, and which hidden state predicts which token.

Padded: rows are padded on the right, with explicit position ids, so learned and rotary positions agree with an unpadded
row. Packed: all rows stand end to end as one, rows with the same prompt behind one copy of it (packing.py). Either way
states come back flat, (N, H), one for each listed response token; the head never sees a prompt, a tool's answer or a
padding position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tinyrl.models.device import to_device
from tinyrl.models.packing import Packing, pack, shared_start

Tokens = Literal["loss", "rewarded", "all"]  # which of the chosen tokens: in the loss, of rewarded samples, or all
Masks = Sequence[Sequence[bool]] | None  # of each row's response: which tokens are listed


class Item(Protocol):
    """One or two rows of a batch: a prompt with a response (a Sample), or with two (a preference pair)."""

    @property
    def prompt(self) -> list[int]: ...
    @property
    def responses(self) -> Sequence[list[int]]: ...
    def listed(self, tokens: Tokens) -> Sequence[Sequence[bool]]:
        """Return for each response which of its tokens the loss reads."""
        ...


class Example(NamedTuple):
    """A prompt, at least one token, with an answer behind it, or with two: chosen and rejected.

    masks: which tokens of each answer are learnt (None: all); value: the margin of a pair, or the label of an answer.
    """

    prompt: list[int]
    responses: Sequence[list[int]]
    masks: Sequence[list[bool]] | None = None
    value: float = 0.0

    def listed(self, tokens: Tokens = "loss") -> Sequence[list[bool]]:
        return self.masks or [[True] * len(response) for response in self.responses]

    @property
    def length(self) -> int:
        """Tokens of the prompt with its longest answer."""
        return len(self.prompt) + max(map(len, self.responses))

    @property
    def learnt(self) -> list[int]:
        """Number of learnt tokens of each answer."""
        return [sum(mask) for mask in self.listed()]

    @property
    def texts(self) -> list[list[int]]:
        """Each answer behind its prompt."""
        return [self.prompt + response for response in self.responses]


@dataclass(frozen=True)
class Batch:
    """b rows of prompt + response, ready for a model, and the map from response token to position.

    input_ids, attention_mask, position_ids (b, L), or (1, L) where packed; N response tokens (all that exist, or those
    of a mask) are listed row by row: `row` and `column` (N,) say where a flat value belongs in a (b, T) tensor,
    `state_index` (N,) which of the positions predicts it, `targets` (N,) its id. `last_index` (b,) is the position of
    each row's last token, None where the input leaves it out. `items` are what the rows were made of, all first
    responses before all second ones.
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
    items: Sequence[Any] = ()

    def to_rows(self, flat: Tensor) -> Tensor:
        """Flat (N,) -> (b, T) with 0 where no token is listed; differentiable."""
        out = flat.new_zeros(self.num_rows, self.num_columns)
        return out.index_put((self.row, self.column), flat)

    @property
    def mask(self) -> Tensor:
        """(b, T) bool: the listed tokens."""
        return self.to_rows(torch.ones_like(self.row, dtype=torch.bool))

    def padded(self, name: str) -> Tensor:
        """Return a field of the items as (b, T), or (b,) where it is one number each, on the batch's device."""
        return to_device(padded(self.items, name), self.input_ids.device)


def padded(items: Sequence[Any], name: str) -> Tensor:
    """Return a field of each token as (B, T); where it is one number an item, (B,)."""
    rows = [torch.as_tensor(getattr(item, name)) for item in items]
    return pad_sequence(rows, batch_first=True) if rows[0].dim() else torch.stack(rows)


def batch_of(
    items: Sequence[Item],
    *,
    packed: bool,
    device: torch.device | str = "cpu",
    tokens: Tokens = "loss",
    last_tokens: bool = False,
) -> Batch:
    """Lay items out as a batch, all first responses before all second ones; last_tokens: their states are read too."""
    rows = [(item, side) for side in range(len(items[0].responses)) for item in items]
    masks = [item.listed(tokens) for item in items]
    listed = [mask[side] for side in range(len(items[0].responses)) for mask in masks]
    prompts, responses = [item.prompt for item, _ in rows], [item.responses[side] for item, side in rows]
    if packed:
        batch = make_packed_batch(prompts, responses, listed, device=device, last_tokens=last_tokens)
    else:
        batch = make_batch(prompts, responses, listed, device=device)
    return replace(batch, items=items)


def make_batch(
    prompts: list[list[int]], responses: list[list[int]], masks: Masks = None, *, device: torch.device | str = "cpu"
) -> Batch:
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
    return Batch(
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
) -> Batch:
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
    return Batch(
        input_ids,
        torch.ones_like(input_ids),
        to_device(torch.tensor([positions]), device),
        **_response_tokens(responses, listed, list(chain(*before)), device),
        last_index=to_device(torch.tensor(ends), device) if last_tokens else None,
        packing=pack(shape, start=start, device=device),
    )


def _listed(prompts: list[list[int]], responses: list[list[int]], masks: Masks) -> list[Sequence[int]]:
    """Return the positions of each row's listed response tokens."""
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
