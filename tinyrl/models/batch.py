"""A micro-batch as model and loss read it: rows padded or packed, and which hidden state predicts which token.

Padded: rows are padded on the right, with explicit position ids, so learned and rotary positions agree with an unpadded
row. Packed: all rows stand end to end as one, rows with the same prompt behind one copy of it (packing.py). Either way
states come back flat, (N, H), one for each listed response token; the head never sees a prompt, a tool's answer or a
padding position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tinyrl.data.images import is_image_id
from tinyrl.models.device import to_device
from tinyrl.models.packing import Packing, attending, pack, shared_start

if TYPE_CHECKING:
    from tinyrl.models.image_inputs import ImageInputs, ImagePass

Tokens = Literal["loss", "rewarded", "all"]  # which of the chosen tokens: in the loss, of rewarded samples, or all


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
        """Count the tokens of the prompt with its longest answer."""
        return len(self.prompt) + max(map(len, self.responses))

    @property
    def learnt(self) -> list[int]:
        """Count the learnt tokens of each answer."""
        return [sum(mask) for mask in self.listed()]

    @property
    def texts(self) -> list[list[int]]:
        """Return each answer behind its prompt."""
        return [self.prompt + response for response in self.responses]


@dataclass(frozen=True)
class RowPositions:
    """Positions (axes, n) of the n tokens of a prompt that may have images. Token i >= n of its row is at i + shift on
    every axis.
    """

    prompt: Tensor
    shift: int

    def behind(self, count: int) -> Tensor:
        """Return the positions (axes, count) of the first tokens of a response without images."""
        axes, length = self.prompt.shape
        return torch.arange(length + self.shift, length + self.shift + count).expand(axes, -1)


def behind(own: RowPositions, prompt: list[int], response: list[int], images: ImageInputs) -> Tensor:
    """Return the positions (axes, n) of a response's tokens behind a prompt with positions `own`; it may hold images,
    where the turns of a conversation are learnt in one pass.
    """
    if not any(map(is_image_id, response)):
        return own.behind(len(response))
    return images.positions(prompt + response).prompt[:, len(prompt) :]


def _padded_positions(
    prompts: list[list[int]], responses: list[list[int]], images: ImageInputs, *, width: int
) -> Tensor:
    """Return the positions (axes, b, width) of rows padded on the right, 0 where nothing is."""
    known = dict[tuple[int, ...], RowPositions]()
    rows = list[Tensor]()
    for prompt, response in zip(prompts, responses, strict=True):
        key = tuple(prompt)
        if key not in known:
            known[key] = images.positions(prompt)
        row = torch.cat([known[key].prompt, behind(known[key], prompt, response, images)], 1)
        rows.append(torch.nn.functional.pad(row, (0, width - row.shape[1])))
    return torch.stack(rows, 1)


def _packed_positions(
    prompts: Iterable[Sequence[int]], responses: list[list[list[int]]], start: int, images: ImageInputs
) -> Tensor:
    """Return the positions (1, L), or (axes, 1, L), of rows end to end: the first `start` tokens of all prompts, then
    the rest of each prompt and its responses.
    """
    found = list[Tensor]()
    for prompt, its_responses in zip(prompts, responses, strict=True):
        own = images.positions([*prompt])
        found += [own.prompt[:, :start]] if not found else []
        found.append(own.prompt[:, start:])
        found += [behind(own, [*prompt], response, images) for response in its_responses]
    return by_axis(torch.cat(found, 1).unsqueeze(1))


def by_axis(positions: Tensor) -> Tensor:
    """Return positions (axes, b, L) as models read them, which is (b, L) for one axis."""
    return positions[0] if len(positions) == 1 else positions


@dataclass(frozen=True)
class Batch:
    """b rows of prompt + response, ready for a model, and the map from response token to position.

    input_ids, attention_mask, position_ids (b, L), or (1, L) where packed; position_ids of several axes are (3, b, L).
    N response tokens (all that exist, or those of a mask) are listed row by row: `row` and `column` (N,) say where a
    flat value belongs in a (b, T) tensor, `state_index` (N,) which of the positions predicts it, `targets` (N,) its id.
    `last_index` (b,) is the position of each row's last token, None where the input leaves it out. `items` are what the
    rows were made of, all first responses before all second ones; `rows` are their places among the items of the pass.
    `images` are those of the rows (image_inputs.py); None: there are none.
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
    rows: Sequence[int] = ()
    images: ImagePass | None = None

    def to_rows(self, flat: Tensor) -> Tensor:
        """Lay flat (N,) out as (b, T) with 0 where no token is listed; differentiable."""
        out = flat.new_zeros(self.num_rows, self.num_columns)
        return out.index_put((self.row, self.column), flat)

    def on_device(self, x: Tensor) -> Tensor:
        """Copy a tensor to the batch's device."""
        return to_device(x, self.input_ids.device)

    @property
    def mask(self) -> Tensor:
        """Return the listed tokens, (b, T) bool."""
        return self.to_rows(torch.ones_like(self.row, dtype=torch.bool))


def examples(
    prompts: Sequence[list[int]], responses: Sequence[list[int]], masks: Sequence[list[bool]] | None = None
) -> list[Example]:
    """Make an example of each prompt with its response; masks: which of its tokens are listed (None: all)."""
    given = [None] * len(prompts) if masks is None else [[mask] for mask in masks]
    return [Example(p, [r], m) for p, r, m in zip(prompts, responses, given, strict=True)]


def batch_of(
    items: Sequence[Item],
    *,
    packed: bool = False,
    device: torch.device | str = "cpu",
    tokens: Tokens = "loss",
    last_tokens: bool = False,
    rows: Sequence[int] | None = None,
    varlen: bool = False,
    images: ImageInputs | None = None,
) -> Batch:
    """Lay items out as a batch, all first responses before all second ones. A response may be empty; a prompt may not.
    rows: places of the items in their pass (None: they are all of it).
    `tokens` are listed, the others only input. A row's last token predicts nothing: packed, it is left out without
    `last_tokens`. varlen: packed rows attend in one call (packing.py). images: of a model that reads them.
    """
    masks = [item.listed(tokens) for item in items]
    sides = range(len(items[0].responses))
    prompts = [item.prompt for _ in sides for item in items]
    responses = [item.responses[side] for side in sides for item in items]
    listed = [[t for t, wanted in enumerate(mask[side]) if wanted] for side in sides for mask in masks]
    assert all(prompts), "a row needs at least one prompt token to predict from"
    assert [len(m[side]) for side in sides for m in masks] == [*map(len, responses)], "a mask for each response token"
    if packed:
        laid_out = _packed(prompts, responses, listed, last_tokens, device, varlen, images)
    else:
        laid_out = _padded(prompts, responses, listed, images)
    ids = laid_out.ids
    image_pass: ImagePass | None = None
    if images is not None:
        rows_read = ids.tolist() if packed else [p + r for p, r in zip(prompts, responses, strict=True)]
        image_pass = images.of_pass(rows_read, ids)
        ids = images.plain(ids)
    targets = [response[t] for response, columns in zip(responses, listed, strict=True) for t in columns]
    row = [i for i, columns in enumerate(listed) for _ in columns]

    def on_device(numbers: list[int]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.long), device)

    return Batch(
        input_ids=to_device(ids, device),
        attention_mask=to_device(laid_out.mask, device),
        position_ids=to_device(laid_out.positions, device),
        row=on_device(row),
        column=on_device(list(chain(*listed))),
        state_index=on_device(laid_out.state_index),
        targets=on_device(targets),
        last_index=on_device(laid_out.ends) if last_tokens or not packed else None,
        num_rows=len(responses),
        num_columns=max(map(len, responses), default=0),
        packing=laid_out.packing,
        items=items,
        rows=range(len(items)) if rows is None else rows,
        images=image_pass,
    )


@dataclass(frozen=True)
class LaidOut:
    """Rows padded (b, L), or packed end to end (1, L): ids, mask and positions, the index of the state before each
    listed token and of each row's last one, and how packed tokens attend.
    """

    ids: Tensor
    mask: Tensor
    positions: Tensor
    state_index: list[int]
    ends: list[int]
    packing: Packing | None


def _padded(
    prompts: list[list[int]], responses: list[list[int]], listed: list[list[int]], images: ImageInputs | None
) -> LaidOut:
    """Lay rows out one below the other, padded on the right."""
    texts = [torch.tensor(prompt + response) for prompt, response in zip(prompts, responses, strict=True)]
    ids = pad_sequence(texts, batch_first=True)
    width = ids.shape[1]
    positions = torch.arange(width).expand(len(texts), width)
    if images is not None:
        positions = by_axis(_padded_positions(prompts, responses, images, width=width))
    return LaidOut(
        ids=ids,
        mask=pad_sequence([torch.ones_like(text) for text in texts], batch_first=True),
        positions=positions,
        state_index=[i * width + len(prompts[i]) - 1 + t for i, columns in enumerate(listed) for t in columns],
        ends=[i * width + len(text) - 1 for i, text in enumerate(texts)],
        packing=None,
    )


def _packed(
    prompts: list[list[int]],
    responses: list[list[int]],
    listed: list[list[int]],
    last_tokens: bool,
    device: torch.device | str,
    varlen: bool,
    images: ImageInputs | None,
) -> LaidOut:
    """Lay rows end to end; equal prompts are one, and different ones share what they begin with."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt), []).append(row)
    start = shared_start(groups) if len(groups) > 1 else 0
    ids: list[int] = prompts[0][:start]
    positions: list[int] = list(range(start))
    before: list[list[int]] = [[] for _ in prompts]  # of each row: the positions before each of its tokens
    ends = [0] * len(prompts)
    shape: list[tuple[int, list[int]]] = []
    parts: list[list[list[int]]] = []  # of each prompt: its responses
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
        parts.append(kept)
        shape.append((len(prompt) - start, [len(tokens) for tokens in kept]))
    return LaidOut(
        ids=torch.tensor([ids]),
        mask=torch.ones(1, len(ids), dtype=torch.long),
        positions=torch.tensor([positions]) if images is None else _packed_positions(groups, parts, start, images),
        state_index=list(chain(*before)),
        ends=ends,
        packing=pack(shape, start=start, device=device, varlen=varlen),
    )


def library_states(backbone: nn.Module, batch: Batch) -> Tensor:
    """Compute the hidden states of every position by the library's modules, flat (b * L, H): what models without our
    layers train with, and what our layers are compared with.
    """
    options: dict[str, Any] = {
        "attention_mask": batch.attention_mask,
        "position_ids": batch.position_ids,
        "use_cache": False,
    }
    with attending(backbone, batch.packing):
        if batch.images is None:
            output = backbone(input_ids=batch.input_ids, **options)
        else:
            output = batch.images.run(backbone, batch.input_ids, **options)
    return output.last_hidden_state.flatten(0, 1)
