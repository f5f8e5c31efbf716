"""The scheduler: sequences that are decoded together, in rows of one cache, entering and leaving as they come (Orca,
OSDI 2022). A training rollout, episodes of several turns, `serve` and agents are four ways of adding to it.

    add(sequences)    they wait until there is room for them
    step()            1. sequences that continue a row of the cache are prefilled behind what it holds; or
                      2. waiting ones are prefilled, a prompt once for its group, a common start once for all; or
                      3. every live row is decoded, by one token or, on a GPU, by a few
                      returned are the sequences that have ended

The live sequences are in the first rows of the cache; rows of sequences that ended may stay cached behind them. Before
each step the last token of a live row is not in the cache yet: its position is that of the last token.

Tensors that a step reads and writes keep their addresses, since a CUDA graph holds them. A graph may compute rows
behind the live ones as well. That does a cached row no harm: its position is behind the tokens that count.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinyrl.data.images import is_image_id, place_of_id
from tinyrl.generation.drawing import advanced, row_params, sample_tokens, uniforms
from tinyrl.generation.request import DecodedSequence
from tinyrl.models.device import to_device
from tinyrl.models.logprobs import Head
from tinyrl.models.packing import LEAST_START, common_length, shared_start
from tinyrl.process.errors import no_memory

PREFILL_TOKENS = {"cpu": 4096, "cuda": 32768}  # padded prompt tokens of a prefill
EXTEND_TOKENS = {"cpu": 2048, "cuda": 8192}  # of one behind cached rows, where each token attends to a whole row
ADMIT_BELOW = 0.75  # share of the rows in use: prompts that are prefilled a few at a time cost more
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)  # of CUDA graphs
FURTHER = 256  # between buckets of still more rows


class RowsCache(Protocol):
    """Rows of a cache. can_truncate: whether a row can be cut to its first tokens; one with recurrent states is
    continued whole or not at all.
    """

    can_truncate: bool

    def copy(self, source: int, to: int, tokens: int) -> None: ...

    def exchange(self, a: int, b: int, tokens: int) -> None: ...


class CachedDecoder(Protocol):
    """What a scheduler needs of a decoder (decoder.py, library_decoder.py). extends_images: whether tokens behind those
    in the cache may be of an image.
    """

    device: torch.device
    head: Head
    extends_images: bool

    @property
    def side_stream(self) -> Any: ...  # a torch.cuda.Stream, made at its first use

    def new_cache(self, rows: int, width: int) -> Any: ...

    def prefill(self, ids: Tensor, lengths: Tensor, *, cache: Any, rows: list[range]) -> Tensor: ...

    def extend(
        self, ids: Tensor, lengths: Tensor, start: Tensor | int, *, cache: Any, rows: list[int], width: int
    ) -> Tensor: ...

    def step(self, token: Tensor, position: Tensor, *, cache: Any, width: int) -> Tensor: ...


class StepGraphs:
    """Calls `step(*shape)` through a CUDA graph that is captured the first time a shape is seen: an eager step launches
    some twenty kernels a layer, which on a small model takes longer than the work.

    state: tensors that a step advances, which never move. Capturing runs the step once to warm up, and restores them.
    side: the stream of all captures. fails: a step could not be captured; eager: steps of the same shapes are run
    without graphs, for comparison.
    """

    def __init__(self, step: Callable[..., None], *, state: tuple[Tensor, ...], side: torch.cuda.Stream) -> None:
        self.step = step
        self.state = state
        self.side = side
        self.graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.fails = False
        self.eager = False

    def __call__(self, *shape: Any) -> None:
        """Replay the step; where it cannot be captured, warn once and run it eagerly from then on. Raises an error that
        reports a lack of memory.
        """
        eager = self.eager or self.fails
        if not eager and shape not in self.graphs:
            try:
                before = [tensor.clone() for tensor in self.state]
                self.side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.side):  # libraries make their workspaces now, not inside the capture
                    self.step(*shape)
                torch.cuda.current_stream().wait_stream(self.side)
                for tensor, value in zip(self.state, before, strict=True):
                    tensor.copy_(value)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self.pool, stream=self.side):
                    self.step(*shape)
                self.graphs[shape] = graph
            except RuntimeError as error:
                if no_memory(error) is not None:
                    raise
                self.fails = eager = True
                warnings.warn(f"sampling without CUDA graphs, as a step cannot be captured: {error}", stacklevel=2)
        if eager:
            self.step(*shape)
        else:
            self.graphs[shape].replay()


@dataclass(eq=False)
class CachedRow:
    """A row behind the live ones and the tokens it holds, in order. held: it waits for its sequence to be continued."""

    slot: int
    tokens: list[int]
    held: bool


def row_of(sequence: DecodedSequence) -> CachedRow:
    """Return the row that a sequence continues, or that is held for it."""
    assert sequence.row is not None
    return sequence.row


class Scheduler:
    """Rows of `width` tokens for at most `capacity` sequences. look_every: tokens between two looks at which rows have
    ended. by_graphs: steps are replayed from CUDA graphs.
    """

    def __init__(
        self,
        decoder: CachedDecoder,
        tokenizer: PreTrainedTokenizerBase,
        eos: set[int],
        *,
        capacity: int,
        width: int,
        look_every: int = 1,
        by_graphs: bool = False,
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.eos = eos
        self.device = decoder.device
        self.capacity = capacity
        self.width = width
        self.look_every = look_every
        self.cache: RowsCache = decoder.new_cache(capacity, width)
        device = self.device
        self.token, self.position = torch.zeros(2, capacity, dtype=torch.long, device=device).unbind()
        # Of the tokens between two looks: their uniforms, the tokens, their log-probabilities; the column to come.
        self.uniforms = torch.zeros(capacity, look_every, dtype=torch.float64, device=device)
        self.drawn = torch.zeros(capacity, look_every, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(capacity, look_every, device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.buffers: dict[str, Tensor] = {}  # sampling parameters that graphs read
        state = self.token, self.position, self.column
        self.graphs = StepGraphs(self._graph_step, state=state, side=decoder.side_stream) if by_graphs else None
        self.clear()

    def clear(self, *, admit_below: float = ADMIT_BELOW) -> None:
        """Drop all sequences and cached rows. admit_below: share of the rows in use up to which waiting sequences are
        admitted from now on.
        """
        self.admit_below = admit_below
        self.live: list[DecodedSequence] = []
        self.cached: list[CachedRow] = []  # the oldest first
        self.waiting: deque[DecodedSequence] = deque()
        self.resuming: deque[DecodedSequence] = deque()  # which continue a row of the cache
        self._admitting = False
        self._changed = True

    def replay_steps(self, replays: bool) -> None:
        """Replay steps from graphs from now on, or run steps of the same shapes eagerly."""
        assert self.graphs is not None
        self.graphs.eager = not replays

    @property
    def replays(self) -> bool:
        """Return whether steps are replayed from graphs."""
        return self.graphs is not None and not self.graphs.eager and not self.graphs.fails

    def add(self, sequences: list[DecodedSequence]) -> None:
        for sequence in sequences:
            assert sequence.request.limit >= 1
            assert sequence.room + self.look_every - 1 <= self.width
            (self.waiting if sequence.row is None else self.resuming).append(sequence)

    def drop(self, sequence: DecodedSequence) -> None:
        """Free the row that is held for this sequence."""
        self.cached.remove(row_of(sequence))

    @property
    def busy(self) -> bool:
        return bool(self.live or self.resuming or self.waiting)

    @property
    def free(self) -> int:
        """Count the rows that are neither live nor held."""
        return self.capacity - len(self.live) - sum(row.held for row in self.cached)

    @property
    def stalled(self) -> bool:
        """Return whether nothing can be done before a sequence that is held is continued."""
        return not self.live and not self.resuming and not (self.waiting and self.free)

    def step(self) -> list[DecodedSequence]:
        if not (self._resume() or self._admit()) and self.live:
            self._decode()
        return self._take_out([slot for slot, sequence in enumerate(self.live) if sequence.over])

    # ---- prefill ----

    def _resume(self) -> bool:
        """Prefill what sequences add to the rows that they continue; return whether there were any."""
        part = list[DecodedSequence]()
        longest = 0
        first = len(self.live)
        while self.resuming:
            longest = max(longest, len(self.resuming[0].request.prompt) - len(row_of(self.resuming[0]).tokens))
            if part and (len(part) + 1) * longest > EXTEND_TOKENS[self.device.type]:
                break
            part.append(self.resuming.popleft())
        if not part:
            return False
        for slot, sequence in enumerate(part, first):
            row = row_of(sequence)
            self.cached.remove(row)
            self._move(row, slot)
        known = [len(row_of(sequence).tokens) for sequence in part]
        new = [s.request.prompt[count:] for s, count in zip(part, known, strict=True)]
        start, lengths = to_device(torch.tensor([known, [len(n) for n in new]]), self.device)
        rows = [*range(first, first + len(part))]
        width = max(len(s.request.prompt) for s in part)
        states = self.decoder.extend(self._padded(new), lengths, start, cache=self.cache, rows=rows, width=width)
        self._begin(part, self.decoder.head.logits(states))
        return True

    def _admit(self) -> bool:
        """Prefill waiting sequences, in order, as many as there are rows for and fit into a prefill; return whether
        there were any. One that has a long prefix with a cached row in common continues that.
        """
        free = self.free
        enough = self._admitting or self.capacity - free <= self.admit_below * self.capacity or not self.live
        self._admitting = bool(self.waiting and free and enough)
        if not self._admitting:
            return False
        groups = list[list[DecodedSequence]]()
        longest = 0  # sequences with the same prompt
        while self.waiting and free:
            sequence = self.waiting[0]
            if (row := self._reusable(sequence.request.prompt)) is not None:
                row.held = True
                sequence.keep(row)
                self.resuming.append(sequence)
            elif groups and groups[-1][0].request.prompt == sequence.request.prompt:
                groups[-1].append(sequence)
            else:
                longest = max(longest, len(sequence.request.prompt))
                if groups and (len(groups) + 1) * longest > PREFILL_TOKENS[self.device.type]:
                    break
                groups.append([sequence])
            free -= 1
            self.waiting.popleft()
        if not groups:
            return self._resume()
        part = [s for group in groups for s in group]
        counts = [len(group) for group in groups]
        # The oldest cached rows that nobody waits for are evicted where the room is needed; others move out of the way.
        while len(self.live) + len(self.cached) + len(part) > self.capacity:
            self.cached.remove(next(row for row in self.cached if not row.held))
        end = len(self.live) + len(part)
        taken = {row.slot for row in self.cached}
        unused = (slot for slot in range(self.capacity - 1, end - 1, -1) if slot not in taken)
        for row in self.cached:
            if row.slot < end:
                self._move(row, next(unused))
        starts = list(accumulate(counts, initial=len(self.live)))
        rows = [range(start, start + count) for start, count in zip(starts, counts, strict=False)]
        states = self._prefill([group[0].request.prompt for group in groups], rows)
        source = to_device(torch.tensor([p for p, count in enumerate(counts) for _ in range(count)]), self.device)
        self._begin(part, self.decoder.head.logits(states)[source])
        return True

    def _reusable(self, prompt: list[int]) -> CachedRow | None:
        """Find the cached row with the longest common prefix, cut to that. None where a row would lose more than half
        of its tokens, since its own conversation may go on, or any of them if it cannot be cut, or the prefix is short.
        """
        free = [row for row in self.cached if not row.held]
        known = [common_length([row.tokens, prompt[:-1]]) for row in free]
        if not self.cache.can_truncate:
            known = [count if count == len(row.tokens) else 0 for row, count in zip(free, known, strict=True)]
        known = [count if self._continues(prompt, count) else 0 for count in known]
        best = max(range(len(free)), key=known.__getitem__, default=-1)
        if best < 0 or known[best] < max(LEAST_START, len(free[best].tokens) / 2):
            return None
        del free[best].tokens[known[best] :]
        return free[best]

    def _continues(self, prompt: list[int], count: int) -> bool:
        """Return whether a prompt may be continued behind its first `count` tokens, which are in the cache: the places
        of one image are read together, as their positions follow from its whole grid.
        """
        if is_image_id(prompt[count]) and place_of_id(prompt[count]) > 0:
            return False
        return self.decoder.extends_images or not any(map(is_image_id, prompt[count:]))

    def _prefill(self, prompts: list[list[int]], rows: list[range]) -> Tensor:
        """Prefill each prompt into its rows and return the hidden state of each last token. A start common to all of
        them (a system prompt, tools) is prefilled once and copied.
        """
        lengths = to_device(torch.tensor([len(p) for p in prompts]), self.device)
        start = shared_start(prompts) if len(prompts) > 1 else 0
        if not start or not all(self._continues(prompt, start) for prompt in prompts):
            return self.decoder.prefill(self._padded(prompts), lengths, cache=self.cache, rows=rows)
        everyone = range(rows[0].start, rows[-1].stop)
        behind = lengths.new_full((1,), start)
        self.decoder.prefill(self._padded([prompts[0][:start]]), behind, cache=self.cache, rows=[everyone])
        rest = self._padded([p[start:] for p in prompts])
        first = [span.start for span in rows]
        longest = max(map(len, prompts))
        states = self.decoder.extend(rest, lengths - start, start, cache=self.cache, rows=first, width=longest)
        for span, prompt in zip(rows, prompts, strict=True):
            for row in span[1:]:
                self.cache.copy(span.start, row, len(prompt))
        return states

    def _begin(self, part: list[DecodedSequence], logits: Tensor) -> None:
        """Draw the first token of sequences that are live from now on, from their logits (R, V)."""
        u = uniforms(np.array([s.request.key for s in part], dtype=np.uint64), num_tokens=1)[:, 0]
        params = row_params([s.request for s in part], self.device)
        token, logprob = sample_tokens(logits, to_device(u, self.device), params)
        for sequence, t, p in zip(part, token.tolist(), logprob.tolist(), strict=True):
            sequence.append([t], [p], eos=self.eos, tokenizer=self.tokenizer)
        self.live += part
        self._changed = True

    def _padded(self, rows: list[list[int]]) -> Tensor:
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        return to_device(ids, self.device)

    # ---- decode ----

    def _decode(self) -> None:
        """Decode every live row by `look_every` tokens, and look at which have ended. A row that will be continued and
        cannot be cut must not run past its end: it is looked at after every token.
        """
        live = len(self.live)
        if self._changed:
            self._place()
        runs_on = self.cache.can_truncate or all(sequence.request.after == "free" for sequence in self.live)
        look_every = self.look_every if runs_on else 1
        drawn = uniforms(advanced(self.keys, self.counts), num_tokens=look_every)
        self.counts += look_every
        self.uniforms[:live, :look_every] = to_device(drawn, self.device)
        self.column.zero_()
        for i in range(look_every):
            if self.graphs is None:
                self._step(live, min(self.longest + i, self.width), self.params)
            else:
                rows = next((rows for rows in ROW_BUCKETS if rows >= live), -(-live // FURTHER) * FURTHER)
                self.graphs(min(rows, self.capacity), *self.params)
        self.longest += look_every
        tokens = self.drawn[:live, :look_every].tolist()
        logprobs = self.logprobs[:live, :look_every].tolist()
        for sequence, t, p in zip(self.live, tokens, logprobs, strict=True):
            sequence.append(t, p, eos=self.eos, tokenizer=self.tokenizer)

    def _place(self) -> None:
        """Write the last token and position of every live row, how it is drawn, and where cached rows end. Until rows
        change again, each step adds its tokens to `counts` and `longest`.
        """
        rows = [(s.tokens[-1], s.length - 1) for s in self.live]
        self.token[: len(rows)], self.position[: len(rows)] = to_device(torch.tensor(rows), self.device).unbind(1)
        if self.cached:
            ends = to_device(torch.tensor([(row.slot, len(row.tokens)) for row in self.cached]), self.device)
            self.position[ends[:, 0]] = ends[:, 1]
        self.keys = np.array([s.request.key for s in self.live], dtype=np.uint64)
        self.counts = np.array([len(s.tokens) for s in self.live])
        self.longest = 1 + max(position for _, position in rows)
        self.params = row_params([s.request for s in self.live], self.device)
        for name, values in self.params.items() if self.graphs is not None else ():
            if name not in self.buffers:
                self.buffers[name] = torch.ones(self.capacity, dtype=values.dtype, device=self.device)
            self.buffers[name][: len(rows)] = values
        self._changed = False

    def _graph_step(self, rows: int, *params: str) -> None:
        """Run the step of a graph, which depends on its rows and on the parameters that they need."""
        self._step(rows, self.width, {name: self.buffers[name][:rows] for name in params})

    def _step(self, rows: int, width: int, params: dict[str, Tensor]) -> None:
        """Decode one token in each of the first `rows` rows, attending to `width` columns of the cache. Only tensors: a
        CUDA graph can hold it. Rows past the live ones may be computed too; their results are never used.
        """
        position = self.position[:rows].clamp(max=self.width - 1)
        states = self.decoder.step(self.token[:rows], position, cache=self.cache, width=width)
        u = self.uniforms[:rows].index_select(1, self.column).squeeze(1)
        token, logprob = sample_tokens(self.decoder.head.logits(states), u, params)
        self.drawn[:rows].index_copy_(1, self.column, token.unsqueeze(1))
        self.logprobs[:rows].index_copy_(1, self.column, logprob.unsqueeze(1))
        self.token[:rows] = token
        self.position[:rows] += 1
        self.column += 1

    # ---- rows of the cache ----

    def _move(self, row: CachedRow, slot: int) -> None:
        """Move a cached row to a slot; another that is cached there moves to the slot of this one."""
        there = next((other for other in self.cached if other.slot == slot), None)
        if there is not None:
            self.cache.exchange(row.slot, slot, max(len(row.tokens), len(there.tokens)))
            there.slot = row.slot
        elif row.slot != slot:
            self.cache.copy(row.slot, slot, len(row.tokens))
        row.slot = slot

    def _take_out(self, slots: list[int]) -> list[DecodedSequence]:
        """Take the sequences at `slots` out of the live ones: rows from the end move into the gaps."""
        if not slots:
            return []
        ended = [self.live[slot] for slot in slots]
        stay = len(self.live) - len(slots)
        movers = sorted({*range(stay, len(self.live))} - {*slots})
        for gap, mover in zip((slot for slot in slots if slot < stay), movers, strict=True):
            self.cache.exchange(mover, gap, max(self.live[gap].length, self.live[mover].length))
            self.live[gap], self.live[mover] = self.live[mover], self.live[gap]
        for slot, sequence in enumerate(self.live[stay:], stay):
            if sequence.request.after != "free":  # its last token is not in the cache
                known = [*sequence.request.prompt, *sequence.tokens][:-1]
                row = CachedRow(slot, known, held=sequence.request.after == "held")
                sequence.keep(row)
                self.cached.append(row)
        del self.live[stay:]
        self._changed = True
        return ended
