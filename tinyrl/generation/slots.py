"""Slots of a batch that is being decoded: the last token, position and tokens so far of each row.

Tensors keep their addresses from the first token to the last, since a CUDA graph holds them: the last row moves into
the place of a finished one, and a new row is added at the end.

A row can be parked: it keeps its part of the cache, somewhere behind the live rows, until more tokens are read into it.
A graph may compute rows behind the live ones as well. That does a parked row no harm: its position is that of its next
token or later, so whatever is written to its cache lies behind what it has read, and is written again when it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from tinyrl.generation.decoder import Decoder
from tinyrl.generation.engine import SamplingSettings, sample_tokens
from tinyrl.models.device import to_device
from tinyrl.models.packing import shared_start


@dataclass
class Parked:
    slot: int
    cached: int


def padded_parts(rows: Sequence[Sequence[int]], most: int) -> Iterator[slice]:
    """Parts of `rows`, in order, of at most `most` tokens once padded, or of one row."""
    start, longest = 0, 0
    for end, row in enumerate(rows):
        longest = max(longest, len(row))
        if end > start and (end + 1 - start) * longest > most:
            yield slice(start, end)
            start, longest = end, len(row)
    if rows:
        yield slice(start, len(rows))


class Slots:
    """At most `capacity` rows, of which the first `live` are going; each has room for `columns` new tokens, and `width`
    for prompt and response. `sample[r]` says which sample row r is, `held[r]` how many tokens of it the cache holds.
    `parked`: the samples that wait, in slots behind the live ones.
    """

    def __init__(
        self,
        decoder: Decoder,
        settings: SamplingSettings,
        *,
        capacity: int,
        width: int,
        columns: int,
        greedy: bool,
        device: torch.device,
    ) -> None:
        self.decoder, self.settings, self.greedy, self.device = decoder, settings, greedy, device
        self.capacity, self.width, self.columns = capacity, width, columns
        # The last token of each row, which is not in the cache yet; where it will go; tokens drawn so far.
        self.token, self.position, self.count = torch.zeros(3, capacity, dtype=torch.long, device=device).unbind()
        self.uniforms = torch.zeros(capacity, columns, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(capacity, columns, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(capacity, columns, device=device)
        self.cache = decoder.new_cache(capacity, width)
        self.sample: list[int] = []
        self.held: list[int] = []
        self.parked: dict[int, Parked] = {}

    @property
    def live(self) -> int:
        return len(self.sample)

    @property
    def used(self) -> int:
        return len(self.sample) + len(self.parked)

    @property
    def longest(self) -> int:
        """The most tokens that a live row has in the cache."""
        return max(self.held, default=0)

    def clear(self) -> None:
        self.sample, self.held, self.parked = [], [], {}

    def enter(self, samples: list[list[int]], prompts: list[list[int]], *, uniforms: Tensor) -> None:
        """New rows: samples[p] continue prompt p, which is prefilled once; uniforms has a row for each of them."""
        counts = [len(of_prompt) for of_prompt in samples]
        self._make_room(sum(counts))
        starts = list(accumulate(counts, initial=self.live))
        lengths = to_device(torch.tensor([len(p) for p in prompts]), self.device)
        rows = [range(start, start + count) for start, count in zip(starts, counts, strict=False)]
        states = self._read(prompts, lengths, rows)
        self.sample += chain.from_iterable(samples)
        self.held += [len(p) for p, count in zip(prompts, counts, strict=True) for _ in range(count)]
        source = to_device(torch.tensor([p for p, count in enumerate(counts) for _ in range(count)]), self.device)
        logits = self.decoder.head.logits(states)[source]
        self._begin(logits, slice(starts[0], starts[-1]), position=lengths[source], uniforms=uniforms)

    def _read(self, prompts: list[list[int]], lengths: Tensor, rows: list[range]) -> Tensor:
        """Prefill the prompts and return the hidden state of each last token. A prefix common to all prompts (a system
        prompt, tools) is prefilled once and copied.
        """
        start = shared_start(prompts) if len(prompts) > 1 else 0
        if not start:
            return self.decoder.prefill(self._padded(prompts), lengths, cache=self.cache, rows=rows)
        everyone, behind = range(rows[0].start, rows[-1].stop), lengths.new_full((len(prompts),), start)
        self.decoder.prefill(self._padded([prompts[0][:start]]), behind[:1], cache=self.cache, rows=[everyone])
        rest, first = self._padded([p[start:] for p in prompts]), [span.start for span in rows]
        longest = max(map(len, prompts))
        states = self.decoder.extend(rest, lengths - start, behind, cache=self.cache, rows=first, width=longest)
        for span, prompt in zip(rows, prompts, strict=True):
            for row in span[1:]:
                self.cache.copy(span.start, row, len(prompt))
        return states

    def grow(self) -> None:
        """The live rows are about to advance."""
        self.held = [held + 1 for held in self.held]

    def advance(self, live: int, width: int | None = None) -> None:
        """One token in each of the first `live` rows, reading `width` columns of the cache (None: all there are). Only
        tensors: a CUDA graph can hold it. Rows past the live ones may be computed too; their results are never read.
        """
        position = self.position[:live].clamp(max=self.width - 1)
        states = self.decoder.step(self.token[:live], position, cache=self.cache, width=width or self.width)
        self.position[:live] += 1
        self._draw(self.decoder.head.logits(states), slice(live))

    def _begin(self, logits: Tensor, rows: slice, *, position: Tensor, uniforms: Tensor) -> None:
        """Draw the first token of a completion, or of a turn, in these rows; it goes to `position`."""
        self.position[rows], self.count[rows], self.uniforms[rows] = position, 0, to_device(uniforms, self.device)
        self._draw(logits, rows)

    def _draw(self, logits: Tensor, rows: slice) -> None:
        column = self.count[rows].clamp(max=self.columns - 1).unsqueeze(-1)
        token, logprob = sample_tokens(
            logits,
            self.uniforms[rows].gather(1, column).squeeze(-1),
            temperature=self.settings.temperature,
            top_k=self.settings.top_k,
            top_p=self.settings.top_p,
            greedy=self.greedy,
        )
        self.tokens[rows].scatter_(1, column, token.unsqueeze(-1))
        self.logprobs[rows].scatter_(1, column, logprob.unsqueeze(-1))
        self.token[rows] = token
        self.count[rows] += 1

    def look(self, most: int) -> list[tuple[int, list[int]]]:
        """Of each live row how many tokens were drawn, and the last `most` of them, oldest first (fewer where there are
        fewer). One copy from the device.
        """
        counts = self.count[: self.live].unsqueeze(1)
        columns = (counts - torch.arange(most, 0, -1, device=self.device)).clamp(0, self.columns - 1)
        seen = torch.cat([counts, self.tokens[: self.live].gather(1, columns)], 1).tolist()
        return [(count, row[max(0, most - count) :]) for count, *row in seen]

    def drawn(self, slots: list[int], most: int) -> tuple[list[list[int]], list[list[float]]]:
        """The first `most` tokens of the rows at `slots`, and their log-probabilities. Two copies from the device."""
        where = to_device(torch.tensor(slots), self.device)
        return self.tokens[where, :most].tolist(), self.logprobs[where, :most].tolist()

    def leave(self, slots: list[int]) -> None:
        self._move_behind(slots, self.cache.copy)

    def forget(self, sample: int) -> None:
        """A parked sample does not go on."""
        del self.parked[sample]

    def park(self, cached: dict[int, int]) -> None:
        """Let the rows at these slots wait, of which so many tokens in the cache count."""
        rows = {self.sample[slot]: count for slot, count in cached.items()}
        behind = self._move_behind(list(cached), self.cache.exchange)
        self.parked |= {sample: Parked(slot, rows[sample]) for slot, sample in enumerate(behind, self.live)}
        self._keep_positions()

    def resume(self, samples: list[int], tokens: list[list[int]], *, uniforms: Tensor) -> None:
        """Parked samples go on: tokens[i] are read behind what samples[i] has in the cache, and the next one is drawn.
        uniforms has a row for each of them; count and columns begin again.
        """
        rows = [self._to_front(sample, slot) for slot, sample in enumerate(samples, self.live)]
        self._keep_positions()
        where = range(self.live, self.live + len(rows))
        start, lengths = to_device(torch.tensor([[row.cached for row in rows], [len(t) for t in tokens]]), self.device)
        ends = [row.cached + len(t) for row, t in zip(rows, tokens, strict=True)]
        ids = self._padded(tokens)
        states = self.decoder.extend(ids, lengths, start, cache=self.cache, rows=where, width=max(ends))
        self.sample += samples
        self.held += ends
        places = slice(where.start, where.stop)
        self._begin(self.decoder.head.logits(states), places, position=start + lengths, uniforms=uniforms)

    def _padded(self, rows: list[list[int]]) -> Tensor:
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        return to_device(ids, self.device)

    def _to_front(self, sample: int, slot: int) -> Parked:
        """Move a parked sample to `slot`, where it no longer waits; another that waits there moves to its slot."""
        row = self.parked.pop(sample)
        other = next((parked for parked in self.parked.values() if parked.slot == slot), None)
        if other is not None:
            self.cache.exchange(row.slot, slot, max(row.cached, other.cached))
            other.slot = row.slot
        elif row.slot != slot:
            self.cache.copy(row.slot, slot, row.cached)
        return row

    def _make_room(self, rows: int) -> None:
        """Move parked rows out of the slots right behind the live ones."""
        end = self.live + rows
        taken = {parked.slot for parked in self.parked.values()}
        free = (slot for slot in range(self.capacity - 1, end - 1, -1) if slot not in taken)
        for row in self.parked.values():
            if row.slot < end:
                to = next(free)
                self.cache.copy(row.slot, to, row.cached)
                row.slot = to
        self._keep_positions()

    def _keep_positions(self) -> None:
        """What a graph writes to the cache of a parked row goes behind the tokens that count."""
        if self.parked:
            rows = [(row.slot, row.cached) for row in self.parked.values()]
            slots, cached = to_device(torch.tensor(rows), self.device).unbind(1)
            self.position[slots] = cached

    def _move_behind(self, slots: list[int], move: Callable[[int, int, int], None]) -> list[int]:
        """Take the rows at `slots` out of the live ones: rows from the end move into the gaps, by moving their part of
        the cache (from, to, columns). Returns the samples that now belong to the slots behind, by `_exchange`.
        """
        gone = set(slots)
        stay = self.live - len(gone)
        gaps = [p for p in sorted(gone) if p < stay]
        movers = [p for p in range(stay, self.live) if p not in gone]
        for to, source in zip(gaps, movers, strict=True):
            move(source, to, self.longest)
            for of in (self.sample, self.held):
                of[to], of[source] = of[source], of[to]
        if gaps:
            places, sources = to_device(torch.tensor([gaps, movers]), self.device)
            for tensor in (self.token, self.position, self.count, self.uniforms, self.tokens, self.logprobs):
                tensor[places] = tensor[sources]
        behind = self.sample[stay:]
        del self.sample[stay:], self.held[stay:]
        return behind
