"""The fused sampling engine: a scheduler over our own decoder (decoder.py), for models that are built like Llama.

On CUDA a step is replayed from a graph for its bucket of rows, and finished rows are looked for only every few tokens,
so that nothing waits for the host. Episodes of several turns are played in the same cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.generation.decoder import Decoder, Held
from tinyrl.generation.draws import advanced
from tinyrl.generation.engine import (
    LOOK_EVERY,
    LocalEngine,
    Request,
    SampledRole,
    SampleOptions,
    SamplingSettings,
    Sequence,
    eos_token_ids,
)
from tinyrl.generation.scheduler import ADMIT_BELOW, Scheduler
from tinyrl.generation.turns import Episodes
from tinyrl.models.device import free_bytes
from tinyrl.models.roles import Roles
from tinyrl.runs.signals import check_stop

CACHE_SHARE = 0.4  # of the memory that is free when sampling starts
WIDTH_BUCKET = 256  # graphs outlive a call whose longest row is a little longer


@dataclass
class Kept:
    """A scheduler that outlives a call, with the rows that were wanted of it. role: whose weights its decoder still
    has, for calls of serving.
    """

    rows: int
    scheduler: Scheduler
    role: SampledRole | None


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
        self.roles, self.tokenizer, self.settings, self.dtype = roles, tokenizer, settings, dtype
        self.held: Held = held
        self.max_rows = settings.max_rows
        self.exact = dtype == torch.float32 and roles.causal.dtype == torch.float32
        self.eos = eos_token_ids(roles, tokenizer)
        self.look_every = LOOK_EVERY[roles.device.type]
        self.by_graphs = roles.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
        self.overlaps = self.by_graphs
        self.decoders: dict[int, Decoder] = {}  # of each model that has sampled: the policy's, a frozen reference
        self._kept: Kept | None = None

    @contextmanager
    def scheduler(self, role: SampledRole, *, rows: int, width: int, serving: bool = False) -> Iterator[Scheduler]:
        kept, width = self._kept, width + self.look_every - 1
        if serving and kept is not None and kept.role == role and kept.rows >= rows and kept.scheduler.width >= width:
            yield kept.scheduler
            return
        with self.roles.acting(role) as model:
            decoder = self.decoders.get(id(model)) or self.decoder(model)
            self.decoders[id(model)] = decoder
            decoder.sync(self.roles.adapter_of(role))
            if (
                kept is None
                or kept.scheduler.decoder is not decoder
                or kept.rows < rows
                or kept.scheduler.width < width
            ):
                kept = self._kept = None  # its memory serves the next
                width = -(-width // WIDTH_BUCKET) * WIDTH_BUCKET if self.by_graphs else width
                kept = Kept(rows, self._new_scheduler(decoder, rows, width), None)
            scheduler = kept.scheduler
            scheduler.clear()
            scheduler.admit_below = 1.0 if serving else ADMIT_BELOW
            self.capacity, kept.role = scheduler.capacity, role if serving else None
            self._kept = kept if serving or self.by_graphs else None
            yield scheduler
        self.keep(decoder)

    def _new_scheduler(self, decoder: Decoder, rows: int, width: int) -> Scheduler:
        self.capacity = min(rows, rows_that_fit(decoder, width, free=free_bytes(self.roles.device)))
        shape = {"capacity": self.capacity, "width": width, "look_every": self.look_every}
        return Scheduler(decoder, self.tokenizer, self.eos, **shape, by_graphs=self.by_graphs)

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
        if self._kept is not None:
            self._kept.role = None
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
            turns = dict(enumerate(self.sequences(requests, samples_per_request, options)))
            keys, begins = [s.key for s in turns.values()], [s.prompt for s in turns.values()]
            width = max(map(len, begins)) + episodes.max_episode_tokens
            with self.scheduler(options.get("role", "policy"), rows=rows, width=width) as scheduler:
                for sample, sequence in turns.items():
                    sequence.after, sequence.limit = "held", episodes.limit(sample)
                numbers = {sequence: sample for sample, sequence in turns.items()}
                scheduler.add(list(turns.values()))
                waiting = set[int]()  # for their answers
                while scheduler.busy or waiting:
                    check_stop()
                    stalled, going = scheduler.stalled, list[Sequence]()
                    for sample, answer in episodes.answers(wait=stalled) if stalled or self.overlaps else []:
                        waiting.discard(sample)
                        before = turns[sample]
                        if answer is None:
                            scheduler.drop(before)
                            continue
                        said = episodes.responses[sample].tokens
                        [key] = advanced(np.array([keys[sample]]), np.array([len(said)]))
                        turns[sample] = Sequence(
                            [*begins[sample], *said],
                            before.params,
                            key,
                            episodes.limit(sample),
                            before.stop,
                            after="held",
                            row=before.row,
                        )
                        numbers[turns[sample]] = sample
                        going.append(turns[sample])
                    scheduler.add(going)
                    for sequence in scheduler.step():
                        sample = numbers.pop(sequence)
                        episodes.ended(sample, sequence.completion)
                        waiting.add(sample)

        if requests:
            self.in_fewer_rows(len(requests) * samples_per_request, attempt)


def rows_that_fit(decoder: Decoder, width: int, *, free: int) -> int:
    """How many sequences of `width` tokens the cache may hold with `free` bytes of memory."""
    return max(1, int(free * CACHE_SHARE / (decoder.cache_bytes_per_token * width)))
