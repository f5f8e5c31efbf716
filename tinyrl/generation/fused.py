"""The fused sampling engine: a scheduler over our own decoder (decoder.py), for models that are built like Llama.

On CUDA a step is replayed from a graph for its bucket of rows, and finished rows are looked for only every few tokens,
so that nothing waits for the host. Episodes of several turns are played in the same cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Unpack

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.generation.decoder import Decoder, Held
from tinyrl.generation.engine import (
    LocalEngine,
    Request,
    SampledRole,
    SampleOptions,
    SamplingSettings,
    Sequence,
    advanced,
)
from tinyrl.generation.scheduler import ADMIT_BELOW, Scheduler
from tinyrl.generation.turns import Episodes
from tinyrl.models.device import free_bytes
from tinyrl.models.roles import Roles
from tinyrl.runs.signals import check_stop

CACHE_SHARE = 0.4  # of the memory that is free when sampling starts
WIDTH_BUCKET = 256  # graphs outlive a call whose longest row is a little longer


class FusedEngine(LocalEngine):
    """Samples through a `Decoder`, whose weights are copied from the acting role at every call.

    by_graphs: whether steps are replayed from graphs, as on CUDA; deterministic algorithms may copy from the host,
    which no graph can.
    overlaps: whether rows go on while others wait for their environment. Which rows are decoded together then depends
    on the clock, and with it the rounding, so not where the same run is to give the same bits.
    """

    name = "fused"

    def __init__(
        self,
        roles: Roles,
        tokenizer: PreTrainedTokenizerBase,
        settings: SamplingSettings,
        *,
        dtype: torch.dtype,
        held: Held,
    ) -> None:
        super().__init__(roles, tokenizer, settings)
        self.dtype = dtype
        self.held: Held = held
        self.exact = dtype == torch.float32 and roles.causal.dtype == torch.float32
        self.by_graphs = roles.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
        self.overlaps = self.by_graphs
        self.decoders: dict[int, Decoder] = {}  # of each model that has sampled: the policy's, a frozen reference
        self._kept: Scheduler | None = None  # outlives a call
        self._kept_for: tuple[int, SampledRole | None] = (0, None)  # rows wanted of it; a serving call's weights in it

    @contextmanager
    def scheduler(self, role: SampledRole, *, rows: int, width: int, serving: bool = False) -> Iterator[Scheduler]:
        kept, width = self._kept, width + self.look_every - 1
        fits = kept is not None and self._kept_for[0] >= rows and kept.width >= width
        if kept is not None and fits and serving and self._kept_for[1] == role:
            yield kept
            return
        with self.roles.acting(role) as model:
            decoder = self.decoders.get(id(model)) or self.decoder(model)
            self.decoders[id(model)] = decoder
            decoder.sync(self.roles.adapter_of(role))
            if kept is None or not fits or kept.decoder is not decoder:
                kept = self._kept = None  # its memory serves the next
                width = -(-width // WIDTH_BUCKET) * WIDTH_BUCKET if self.by_graphs else width
                self.capacity = min(rows, rows_that_fit(decoder, width, free=free_bytes(self.roles.device)))
                shape = {"capacity": self.capacity, "width": width, "look_every": self.look_every}
                kept = Scheduler(decoder, self.tokenizer, self.eos, **shape, by_graphs=self.by_graphs)
                self._kept_for = (rows, None)
            kept.clear()
            kept.admit_below = 1.0 if serving else ADMIT_BELOW
            self.capacity, self._kept_for = kept.capacity, (self._kept_for[0], role if serving else None)
            self._kept = kept if serving or self.by_graphs else None
            yield kept
        self.keep(decoder)

    def decoder(self, model: PreTrainedModel) -> Decoder:
        return Decoder(model, dtype=self.dtype, held=self.held)

    def keep(self, decoder: Decoder) -> None:
        """Sample from its model through this decoder from now on. Its copy of the weights is freed for the update, as
        it is quickly made again, unless a scheduler that outlives the call reads it.
        """
        self.decoders[id(decoder.model)] = decoder
        self.copy_bytes = decoder.weight_bytes
        if self._kept is None:
            decoder.release()

    def forget(self) -> None:
        self._kept_for = (self._kept_for[0], None)
        if not self.by_graphs:
            self.release()

    def release(self) -> bool:
        """Free the cache, the graphs and the copies of the weights; the next call makes them again."""
        kept, self._kept = self._kept is not None, None
        for decoder in self.decoders.values():
            decoder.release()
        return kept

    def play(
        self, requests: list[Request], samples_per_request: int, *, episodes: Episodes, **options: Unpack[SampleOptions]
    ) -> None:
        """Play `episodes` of several turns, which gather what was said, and say what is prefilled after a turn and how
        long the next may be (max_new_tokens of a request does not count). Sample i of request r is episode
        r * samples_per_request + i. Token t of it is drawn by the request's random number first_token + t.

        A turn is a sequence of its own, so that nothing of the text before it can end it; its row is held meanwhile.
        """

        def attempt(rows: int) -> None:
            episodes.restart()
            turns = self.sequences(requests, samples_per_request, options)
            firsts, numbers = [*turns], {turn: sample for sample, turn in enumerate(turns)}
            width = max(len(first.prompt) for first in firsts) + episodes.max_episode_tokens
            with self.scheduler(options.get("role", "policy"), rows=rows, width=width) as scheduler:
                for sample, turn in enumerate(turns):
                    turn.after, turn.limit = "held", episodes.limit(sample)
                scheduler.add(turns)
                waiting = set[int]()  # for their answers
                while scheduler.busy or waiting:
                    check_stop()
                    stalled, going = scheduler.stalled, list[Sequence]()
                    for sample, answer in episodes.answers(wait=stalled) if stalled or self.overlaps else []:
                        waiting.discard(sample)
                        first, before, said = firsts[sample], turns[sample], episodes.responses[sample].tokens
                        if answer is None:
                            scheduler.drop(before)
                            continue
                        [key] = advanced(np.array([first.key]), np.array([len(said)]))
                        prompt, most = [*first.prompt, *said], episodes.limit(sample)
                        turn = Sequence(prompt, first.params, key, most, first.stop, "held", row=before.row)
                        turns[sample], numbers[turn] = turn, sample
                        going.append(turn)
                    scheduler.add(going)
                    for turn in scheduler.step():
                        sample = numbers.pop(turn)
                        episodes.ended(sample, turn.completion)
                        waiting.add(sample)

        if requests:
            self.in_fewer_rows(len(requests) * samples_per_request, attempt)


def rows_that_fit(decoder: Decoder, width: int, *, free: int) -> int:
    """How many sequences of `width` tokens the cache may hold with `free` bytes of memory."""
    return max(1, int(free * CACHE_SHARE / (decoder.cache_bytes_per_token * width)))
