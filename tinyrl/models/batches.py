"""Layout of a micro-batch for the model, padded or packed: which hidden state predicts which response token.

Only this file knows the layout. Padded: rows are padded on the right, with explicit position ids, so learned and
rotary positions agree with an unpadded row. Packed: all rows stand end to end as one, rows with the same prompt behind
one copy of it (packing.py). Either way states come back flat, (N, H), one for each listed response token; the head
never sees a prompt, a tool's answer or a padding position.

Rows are cut into micro-batches by one token budget, made smaller when memory runs out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tinyrl.errors import out_of_memory
from tinyrl.models.checks import supports_fused_layers
from tinyrl.models.device import MICRO_BATCH_TOKENS, as_out_of_memory, to_device
from tinyrl.models.layers import fused_states
from tinyrl.models.packing import Packing, attending, pack, shared_start
from tinyrl.models.parallel import ALONE, World
from tinyrl.runs.signals import check_stop, watched

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


# ---- micro-batches ----

MOST_TOKENS = 131_072  # that a measurement may come to
SHARE = 0.8  # of the free memory that a micro-batch may take


@dataclass(frozen=True)
class RowSizes:
    """How long the rows of a step are, and which of them share a prompt.

    prompts, responses: tokens of each row's prompt and response; groups: rows with the same number have the same
    prompt; packed: rows stand end to end, a prompt once for its group, instead of padded to the longest; start: tokens
    that all prompts begin with, which packed rows read once.
    """

    prompts: Sequence[int]
    responses: Sequence[int]
    groups: Sequence[int]
    packed: bool
    start: int = 0

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], responses: Iterable[int], *, packed: bool) -> RowSizes:
        """Of rows with these prompts (equal ones are shared) and this many response tokens."""
        numbers: dict[tuple[int, ...], int] = {}
        groups = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
        start = shared_start(numbers) if packed and len(numbers) > 1 else 0
        return cls([len(prompt) for prompt in prompts], list(responses), groups, packed, start)

    @classmethod
    def alone(cls, lengths: Sequence[int], *, packed: bool) -> RowSizes:
        return cls([0] * len(lengths), lengths, range(len(lengths)), packed)

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def lengths(self) -> list[int]:
        return [p + r for p, r in zip(self.prompts, self.responses, strict=True)]

    def cost(self, rows: Sequence[int]) -> int:
        """Tokens that go through the model for these rows together, padding included."""
        if self.packed:
            prompts = {self.groups[row]: self.prompts[row] - self.start for row in rows}
            return self.start + sum(prompts.values()) + sum(self.responses[row] for row in rows)
        return len(rows) * max(self.prompts[row] + self.responses[row] for row in rows)

    def plan(self, rows: Sequence[int], *, max_tokens: int) -> list[list[int]]:
        """Group rows into micro-batches of at most `max_tokens`. A row longer than the budget goes alone."""
        if self.packed:
            return self._plan_groups(rows, max_tokens)
        lengths, plan = self.lengths, list[list[int]]()
        for row in sorted(rows, key=lambda r: (-lengths[r], r)):  # of at most max_tokens with the padding
            if plan and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= max_tokens:
                plan[-1].append(row)
            else:
                plan.append([row])
        return plan

    def shares(self, rows: Sequence[int], count: int) -> list[list[int]]:
        """Rows in `count` shares of about as many tokens. Rows with one prompt stay together, where that is read once
        for all of them, unless there are too few groups to share out evenly.
        """
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(self.groups[row] if self.packed else row, []).append(row)
        parts = list(groups.values()) if len(groups) >= 2 * count else [[row] for row in rows]
        costs = [self.cost(part) for part in parts]
        widest_first = sorted(range(len(parts)), key=lambda i: (-costs[i], i))
        return [[row for i in share for row in parts[i]] for share in _spread(widest_first, costs, count)]

    def smaller(self, plan: Sequence[Sequence[int]]) -> int | None:
        """A budget that breaks the widest micro-batch of a plan in two; None when each is a single row."""
        costs = [self.cost(micro) for micro in plan if len(micro) > 1]
        return max(1, max(costs) // 2) if costs else None

    def _plan_groups(self, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Keep a group together if it fits, else split it. The widest parts go first, the others beside them."""
        groups: dict[int, list[int]] = {}
        for row in sorted(rows):
            groups.setdefault(self.groups[row], []).append(row)
        parts = [part for group in groups.values() for part in self._split(group, max_tokens)]
        plan: list[list[int]] = []
        costs: list[int] = []
        for part in watched(sorted(parts, key=lambda part: (-self.cost(part), part[0]))):
            more = self.cost(part) - self.start
            place = next((i for i, used in enumerate(costs) if used + more <= max_tokens), None)
            if place is None:
                plan.append(part)
                costs.append(self.start + more)
            else:
                plan[place] = plan[place] + part
                costs[place] += more
        return sorted(plan, key=lambda micro: -self.cost(micro))  # memory of the widest serves the others

    def _split(self, group: list[int], max_tokens: int) -> list[list[int]]:
        """A group in as few parts as fit the budget, each repeating the prompt, of similar length."""
        room = max_tokens - self.prompts[group[0]]
        longest_first = sorted(group, key=lambda row: (-self.responses[row], row))
        rest = [row for row in longest_first if self.responses[row] <= room]
        alone = [[row] for row in longest_first if self.responses[row] > room]
        fewest = max(1, -(-sum(self.responses[row] for row in rest) // max(1, room)))
        for count in range(fewest, len(rest)):
            parts = _spread(rest, self.responses, count)
            if max(sum(self.responses[row] for row in part) for part in parts) <= room:
                return [*alone, *(sorted(part) for part in parts if part)]
        return alone + [[row] for row in rest]


def _spread(indices: Iterable[int], costs: Sequence[int], count: int) -> list[list[int]]:
    """Indices in `count` parts, each to the lightest so far, the first of equally light ones."""
    parts: list[list[int]] = [[] for _ in range(count)]
    lightest = [(0, place) for place in range(count)]  # a heap
    for index in indices:
        filled, place = lightest[0]
        parts[place].append(index)
        heapq.heapreplace(lightest, (filled + costs[index], place))
    return parts


@dataclass(frozen=True)
class Work:
    """A pass over rows: their sizes, the function to run on each micro-batch, which rows (None: all), and the processes
    that share them by tokens.
    """

    sizes: RowSizes
    run: Callable[[list[int]], None]
    rows: Sequence[int] | None = None
    world: World = ALONE

    def plan(self, max_tokens: int) -> list[list[int]]:
        rows = range(len(self.sizes)) if self.rows is None else self.rows
        if self.world.size > 1:
            rows = self.sizes.shares(rows, self.world.size)[self.world.rank]
        return self.sizes.plan(rows, max_tokens=max_tokens)


class MicroBatches:
    """The token budget of every pass through a model, and the one rule for when memory runs out.

    Update, scoring, evaluation and reward model all use it. State: `tokens`, which starts at run.micro_batch_tokens and
    halves when memory runs out. On a GPU `auto` is set by the memory that the first forward and backward pass takes,
    which is that of the longest rows (`fit`). `make_room` frees what other phases keep, and says whether there was
    anything; as they will keep it again, the second time this halves, too.
    """

    def __init__(self, device: torch.device, tokens: Literal["auto"] | int = "auto") -> None:
        self.device = device
        self.tokens = MICRO_BATCH_TOKENS[device.type] if tokens == "auto" else tokens
        self.unmeasured = tokens == "auto" and device.type == "cuda"
        self.make_room: Callable[[], bool] = lambda: False
        self._made_room = False

    def run(self, *passes: Work, restart: Callable[[], None] = lambda: None) -> None:
        """Do all the work, a micro-batch at a time.

        When memory runs out, make room or halve the tokens, and start over after `restart` has removed all traces of
        the attempt.
        Raises OutOfRoom where a single row does not fit.
        """
        while True:
            restart()
            plans = [work.plan(self.tokens) for work in passes]
            try:
                with as_out_of_memory():
                    for work, plan in zip(passes, plans, strict=True):
                        for rows in plan:
                            check_stop()
                            work.run(rows)
                return
            except torch.OutOfMemoryError as error:
                again, freed = self._made_room, self.make_room()
                self._made_room = again or freed
                if again or not freed:
                    self._halve(passes, plans, error, may_stay=freed)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def fit(self, *, cost: int, taken: int, free: int) -> None:
        """Set `tokens` so that a micro-batch takes a share of `free` bytes, from one of `cost` tokens that took `taken`
        bytes: gradients, activations and logits.
        """
        self.unmeasured = False
        self.tokens = min(MOST_TOKENS, max(cost, int(cost * SHARE * free / max(1, taken))))

    def _halve(
        self, passes: Sequence[Work], plans: list[list[list[int]]], error: torch.OutOfMemoryError, *, may_stay: bool
    ) -> None:
        """may_stay: whether a row may be tried again where it is alone already."""
        budgets = [work.sizes.smaller(plan) for work, plan in zip(passes, plans, strict=True)]
        smaller = max((budget for budget in budgets if budget is not None), default=None)
        if smaller is None and may_stay:
            return
        if smaller is None:
            alone = [work.sizes.cost(rows) for work, plan in zip(passes, plans, strict=True) for rows in plan]
            raise out_of_memory(f"with one sequence of {max(alone)} tokens in a micro-batch", error) from error
        self.tokens = smaller
