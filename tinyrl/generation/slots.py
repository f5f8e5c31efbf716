"""Slots of a batch that is being decoded: the last token, position and tokens so far of each row.

Tensors keep their addresses from the first token to the last, since a CUDA graph holds them: the last row moves into
the place of a finished one, and a new row is added at the end.
"""

from __future__ import annotations

from itertools import accumulate, chain

import torch
from torch import Tensor

from tinyrl.generation.decoder import Decoder
from tinyrl.generation.engine import SamplingSettings
from tinyrl.generation.token_sampling import sample_tokens


class Slots:
    """`capacity` rows, of which the first `live` are going; each has room for `columns` new tokens, and `width` for
    prompt and response. `sample[r]` says which sample row r is; `longest` is the most tokens any row has in the cache.
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
        self.token, self.position, self.count = (
            torch.zeros(capacity, dtype=torch.long, device=device) for _ in range(3)
        )  # the last token of each row, which is not in the cache yet; where it will go; tokens drawn so far
        self.uniforms = torch.zeros(capacity, columns, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(capacity, columns, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(capacity, columns, device=device)
        self.cache = decoder.new_cache(capacity, width)
        self.sample: list[int] = []
        self.longest = 0

    @property
    def live(self) -> int:
        return len(self.sample)

    def enter(self, samples: list[list[int]], prompts: list[list[int]], *, uniforms: Tensor) -> None:
        """New rows: samples[p] continue prompt p, which is read once; uniforms has a row for each of them."""
        counts = [len(of_prompt) for of_prompt in samples]
        starts = list(accumulate(counts, initial=self.live))
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True).to(self.device)
        rows = [range(start, start + count) for start, count in zip(starts, counts, strict=False)]
        states = self.decoder.prefill(ids, lengths, cache=self.cache, rows=rows)
        self.sample += chain.from_iterable(samples)
        self.longest = max(self.longest, ids.shape[1])
        source = torch.arange(len(prompts), device=self.device).repeat_interleave(torch.tensor(counts).to(self.device))
        where = torch.arange(starts[0], starts[-1], device=self.device)
        self.position[where], self.count[where], self.uniforms[where] = lengths[source], 0, uniforms.to(self.device)
        self._draw(self.decoder.head.logits(states)[source], where)

    def advance(self, live: int, width: int) -> None:
        """One token in each of the first `live` rows, reading `width` columns of the cache. Only tensors: a CUDA graph
        can hold it. Rows past the live ones may be computed too; their results are never read.
        """
        position = self.position[:live].clamp(max=width - 1)
        states = self.decoder.step(self.token[:live], position, cache=self.cache, width=width)
        self.position[:live] += 1
        self._draw(self.decoder.head.logits(states), torch.arange(live, device=self.device))

    def _draw(self, logits: Tensor, where: Tensor) -> None:
        """Draw the next token of the rows at `where`, and record it."""
        column = self.count[where].clamp(max=self.columns - 1)
        token, logprob = sample_tokens(
            logits,
            self.uniforms[where, column],
            temperature=self.settings.temperature,
            top_k=self.settings.top_k,
            top_p=self.settings.top_p,
            greedy=self.greedy,
        )
        self.tokens[where, column], self.logprobs[where, column] = token, logprob
        self.token[where] = token
        self.count[where] += 1

    def recent(self, most: int) -> list[list[int]]:
        """The last `most` tokens of each live row, oldest first (fewer where fewer were drawn)."""
        counts = self.count[: self.live]
        columns = counts.unsqueeze(1) - torch.arange(most, 0, -1, device=self.device)
        tokens = self.tokens[: self.live].gather(1, columns.clamp(0, self.columns - 1)).tolist()
        return [row[max(0, most - count) :] for row, count in zip(tokens, counts.tolist(), strict=True)]

    def leave(self, slots: list[int]) -> None:
        """Remove the rows at `slots`; rows from the end move into the gaps."""
        gone = set(slots)
        stay = self.live - len(gone)
        gaps = [p for p in sorted(gone) if p < stay]
        movers = [p for p in range(stay, self.live) if p not in gone]
        for to, source in zip(gaps, movers, strict=True):
            for part in (self.cache.keys, self.cache.values):
                part[:, to, :, : self.longest] = part[:, source, :, : self.longest]
            self.sample[to] = self.sample[source]
        if gaps:
            for tensor in (self.token, self.position, self.count, self.uniforms, self.tokens, self.logprobs):
                tensor[gaps] = tensor[movers]
        del self.sample[stay:]
        self.longest = int(self.position[: self.live].max()) if self.live else 0
