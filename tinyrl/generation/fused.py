"""The fused sampling engine: its own decoder over a static cache, with continuous batching (Orca, OSDI 2022).

On CUDA a step is replayed from a graph for its bucket of rows, and finished rows are looked for only every few tokens,
so that nothing waits for the host. Episodes of several turns are played in the same cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Unpack

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.generation.decoder import Decoder, Held
from tinyrl.generation.engine import (
    LOOK_EVERY,
    Completion,
    FinishReason,
    LocalEngine,
    Request,
    SampleOptions,
    SamplingSettings,
    eos_token_ids,
    grouped,
    max_new_tokens,
    row_keys,
    stop_said_at,
    uniforms,
)
from tinyrl.generation.slots import Slots, padded_parts
from tinyrl.generation.turns import Episodes
from tinyrl.models.device import free_bytes
from tinyrl.models.roles import Roles
from tinyrl.runs.signals import check_stop

CACHE_SHARE = 0.4  # of the memory that is free when sampling starts
PREFILL_TOKENS = {"cpu": 4096, "cuda": 32768}  # padded prompt tokens read at a time
ADMIT_BELOW = 0.75  # of the slots in use: prompts read a few at a time cost more
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)  # of CUDA graphs
WIDTH_BUCKET = 256  # they outlive a call whose longest row is a little longer
FURTHER = 256  # between buckets of still more rows
EXTEND_TOKENS = {"cpu": 2048, "cuda": 8192}  # padded tokens of answers read at a time; each looks at a whole row


class StepGraphs:
    """Calls `step(rows)` through a CUDA graph that is captured the first time so many rows are seen.

    An eager step launches some twenty kernels a layer, which on a small model takes longer than the work. `state`: the
    tensors that a step advances, which never move. Capturing runs the step once to warm up, and then restores them.
    """

    def __init__(self, step: Callable[[int], None], *, state: tuple[Tensor, ...]) -> None:
        self.step, self.state = step, state
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.side = torch.cuda.Stream()  # one for all: cuBLAS keeps a workspace for every stream it has seen

    def __call__(self, rows: int) -> None:
        if rows not in self.graphs:
            self.graphs[rows] = self._capture(rows)
        self.graphs[rows].replay()

    def _capture(self, rows: int) -> torch.cuda.CUDAGraph:
        before = [tensor.clone() for tensor in self.state]
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):  # libraries make their workspaces now, not inside the capture
            self.step(rows)
        torch.cuda.current_stream().wait_stream(self.side)
        for tensor, value in zip(self.state, before, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.side):
            self.step(rows)
        return graph


@dataclass
class Kept:
    """What outlives a call where steps are replayed: slots for so many `rows` as were wanted of them, and the graphs
    that hold their addresses, for sampled and for greedy tokens.
    """

    rows: int
    slots: Slots
    graphs: dict[bool, StepGraphs] = field(default_factory=dict)


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
        graphs = roles.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
        self.by_graphs = self.overlaps = graphs
        self.decoders: dict[int, Decoder] = {}  # of each model that has sampled: the policy's, a frozen reference
        self._kept: Kept | None = None

    def sample(
        self, requests: list[Request], samples_per_request: int, **options: Unpack[SampleOptions]
    ) -> list[list[Completion]]:
        return self._sampled(requests, samples_per_request, options)

    def play(
        self, requests: list[Request], samples_per_request: int, *, episodes: Episodes, **options: Unpack[SampleOptions]
    ) -> None:
        """As `sample`, for `episodes` of several turns, which gather what was said, and say what is read after a turn
        and how long the next may be (max_new_tokens of a request does not count). Sample i of request r is episode
        r * samples_per_request + i. Token t of it is drawn by the request's random number first_token + t.
        """
        self._sampled(requests, samples_per_request, options, episodes)

    def _sampled(
        self, requests: list[Request], group: int, options: SampleOptions, episodes: Episodes | None = None
    ) -> list[list[Completion]]:
        def attempt(rows: int) -> list[list[Completion]]:
            columns = self.columns
            if episodes is not None:
                episodes.restart()
                columns = episodes.max_episode_tokens + self.look_every - 1
            width = max(len(r.prompt_tokens) for r in requests) + columns
            with self._decoding(options, rows=rows, width=width) as (slots, advance):
                return Sampling(self, slots, advance, requests, group, options, episodes).run()

        return self.in_fewer_rows(len(requests) * group, attempt) if requests else []

    @contextmanager
    def _decoding(
        self, options: SampleOptions, *, rows: int, width: int
    ) -> Iterator[tuple[Slots, Callable[..., None]]]:
        """The slots of one attempt with at most so many rows at a time, and what advances them; one that fails holds no
        memory.
        """
        role = options.get("role", "policy")
        with self.roles.acting(role) as model:
            decoder = self.decoders.setdefault(id(model), self.decoder(model))
            decoder.sync(self.roles.adapter_of(role))
            yield self.slots(decoder, options.get("greedy", False), rows=rows, width=width)
        self.keep(decoder)

    def decoder(self, model: PreTrainedModel) -> Decoder:
        return Decoder(model, dtype=self.dtype, held=self.held)

    def keep(self, decoder: Decoder) -> None:
        """Sample from its model through this decoder from now on. Its copy of the weights is freed for the update, as
        it is quickly made again, unless graphs still read it.
        """
        self.decoders[id(decoder.model)] = decoder
        self.copy_bytes = decoder.weight_bytes
        if not self.by_graphs:
            decoder.release()

    def release(self) -> bool:
        """Free the cache, the graphs and the copies of the weights; the next call makes them again."""
        kept = self._kept is not None
        self._kept = None
        for decoder in self.decoders.values():
            decoder.release()
        return kept

    @property
    def columns(self) -> int:
        """New tokens of one turn a row has room for: it may run past its end until the next look."""
        return self.settings.max_new_tokens + self.look_every - 1

    def slots(self, decoder: Decoder, greedy: bool, *, rows: int, width: int) -> tuple[Slots, Callable[..., None]]:
        """Slots for at most `rows` sequences of `width` tokens, and what advances them."""
        kept, device = self._kept, self.roles.device
        like = kept is not None and (kept.slots.decoder, kept.slots.settings) == (decoder, self.settings)
        if kept is None or not like or kept.rows < rows or kept.slots.width < width:
            kept = self._kept = None  # its memory serves the next
            width = -(-width // WIDTH_BUCKET) * WIDTH_BUCKET if self.by_graphs else width
            self.capacity = min(rows, rows_that_fit(decoder, width, free=free_bytes(device)))
            shape = {"capacity": self.capacity, "width": width, "columns": self.columns}
            kept = Kept(rows, Slots(decoder, self.settings, **shape, greedy=greedy, device=device))
        slots = kept.slots
        slots.greedy = greedy
        self.capacity = slots.capacity
        if not self.by_graphs:
            return slots, slots.advance
        self._kept = kept
        if greedy not in kept.graphs:
            kept.graphs[greedy] = StepGraphs(slots.advance, state=(slots.token, slots.position, slots.count))
        return slots, kept.graphs[greedy]

    def step(self, slots: Slots, advance: Callable[..., None]) -> None:
        """Advance every live row by one token."""
        slots.grow()
        if self.by_graphs:
            advance(bucket(slots))
        else:
            advance(slots.live, slots.longest)


def rows_that_fit(decoder: Decoder, width: int, *, free: int) -> int:
    """How many sequences of `width` tokens the cache may hold with `free` bytes of memory."""
    return max(1, int(free * CACHE_SHARE / (decoder.cache_bytes_per_token * width)))


def bucket(slots: Slots) -> int:
    """The rows of the graph that advances the live ones."""
    rows = next((b for b in ROW_BUCKETS if b >= slots.live), -(-slots.live // FURTHER) * FURTHER)
    return min(rows, slots.capacity)


class Sampling:
    """One call of the engine: the waiting samples and the finished completions. With `episodes` a completion is one
    turn, so that nothing of the text before it can end it, and its row is parked until the answer can be read.
    """

    def __init__(
        self,
        engine: FusedEngine,
        slots: Slots,
        advance: Callable[..., None],
        requests: list[Request],
        group: int,
        options: SampleOptions,
        episodes: Episodes | None = None,
    ) -> None:
        self.engine, self.slots, self.advance, self.requests, self.group = engine, slots, advance, requests, group
        self.settings, self.episodes = engine.settings, episodes
        self.keys, self.first_tokens = row_keys(requests, group, seed=options["seed"], step=options["step"])
        self.waiting = deque(range(len(requests) * group))
        self.done: dict[int, Completion] = {}

    def run(self) -> list[list[Completion]]:
        """The completions of each request; none of `episodes`, which have them."""
        slots = self.slots
        slots.clear()
        while self.waiting or slots.used:
            if self.episodes is not None:
                self._resume(self.episodes)
            if self._may_admit():
                self._admit(slots.capacity - slots.used)
                self._retire()
            for _ in range(self.engine.look_every if slots.live else 0):
                check_stop()
                self.engine.step(slots, self.advance)
            self._retire()
        return grouped([self.done[i] for i in sorted(self.done)], self.group)

    def _may_admit(self) -> bool:
        """Whether enough slots are free; any will do where nothing else can be decoded."""
        slots = self.slots
        enough = slots.used <= ADMIT_BELOW * slots.capacity
        return bool(self.waiting) and (enough or (not slots.live and slots.used < slots.capacity))

    def _admit(self, free: int) -> None:
        """Let as many waiting samples enter as there are slots free."""
        slots = self.slots
        samples: dict[int, list[int]] = {}  # by request
        for _ in range(min(free, len(self.waiting))):
            sample = self.waiting.popleft()
            samples.setdefault(sample // self.group, []).append(sample)
        each, prompts = list(samples.values()), [self.requests[r].prompt_tokens for r in samples]
        for part in padded_parts(prompts, PREFILL_TOKENS[slots.device.type]):
            check_stop()
            drawn = self._uniforms(list(chain.from_iterable(each[part])))
            slots.enter(each[part], prompts[part], uniforms=drawn)

    def _uniforms(self, samples: list[int], after: list[int] | int = 0) -> Tensor:
        """The random numbers of these samples' next tokens, of which there are so many `after` the first."""
        first = self.first_tokens[samples] + np.array(after)
        return uniforms(self.keys[samples], num_tokens=self.slots.columns, first=first)

    def _retire(self) -> None:
        slots = self.slots
        looks = slots.look(self.engine.look_every)
        most = max((count for count, _ in looks), default=0)
        said = slots.tokens[: slots.live, :most].tolist() if self.settings.stop else []
        ends: dict[int, tuple[int, FinishReason]] = {}  # by slot
        for slot, (count, recent) in enumerate(looks):
            eos_at = next((count - len(recent) + i + 1 for i, t in enumerate(recent) if t in self.engine.eos), None)
            limit = self._limit(slots.sample[slot])
            length, reason = self._end(said[slot] if said else [], eos_at, min(count, limit), limit)
            if reason is not None:
                ends[slot] = length, reason
        if ends:
            tokens, logprobs = slots.drawn(list(ends), max(length for length, _ in ends.values()))
            rows = zip(ends.items(), tokens, logprobs, strict=True)
            self._take_out({slot: Completion(t[:n], p[:n], reason) for (slot, (n, reason)), t, p in rows})

    def _limit(self, sample: int) -> int:
        if self.episodes is None:
            return max_new_tokens(self.requests[sample // self.group], self.settings)
        return self.episodes.limit(sample)

    def _end(self, said: list[int], eos_at: int | None, count: int, limit: int) -> tuple[int, FinishReason | None]:
        """The length of a row and why it has ended; None while it goes on. said: its tokens, for stop strings."""
        length, reason = (eos_at, "eos") if eos_at is not None and eos_at <= count else (count, "length")
        if self.settings.stop:
            look_at = self.engine.look_every
            stopped = stop_said_at(said[:length], self.settings.stop, self.engine.tokenizer, look_at=look_at)
            if stopped is not None and (reason != "eos" or stopped < length):
                return stopped, "stop"
        ended = reason == "eos" or count >= limit
        return length, reason if ended else None

    def _take_out(self, ended: dict[int, Completion]) -> None:
        """The rows at these slots are done, or wait for what is read after their turns."""
        samples = {slot: self.slots.sample[slot] for slot in ended}
        if self.episodes is None:
            self.done |= {samples[slot]: completion for slot, completion in ended.items()}
            self.slots.leave(list(ended))
            return
        cached: dict[int, int] = {}
        for slot, turn in ended.items():
            self.episodes.ended(samples[slot], turn)
            prompt = self.requests[samples[slot] // self.group].prompt_tokens
            # The last token of a turn is not in the cache: it is read with the answer.
            cached[slot] = len(prompt) + len(self.episodes.responses[samples[slot]].tokens) - 1
        self.slots.park(cached)

    def _resume(self, episodes: Episodes) -> None:
        """Read the answers that have come. Where nothing else can be decoded, wait for one."""
        slots = self.slots
        idle = not slots.live and not self._may_admit()
        if not slots.parked or not (idle or self.engine.overlaps):
            return
        going: dict[int, list[int]] = {}  # by sample, what is read
        for sample, answer in episodes.answers(wait=idle):
            if answer is None:
                slots.forget(sample)
                continue
            response = episodes.responses[sample].tokens
            room = episodes.max_episode_tokens - len(response)
            assert 1 <= episodes.limit(sample) <= min(self.settings.max_new_tokens, room)
            going[sample] = response[-len(answer) - 1 :]
        each, answers = list(going), list(going.values())
        for part in padded_parts(answers, EXTEND_TOKENS[slots.device.type]):
            check_stop()
            after = [len(episodes.responses[sample].tokens) for sample in each[part]]
            slots.resume(each[part], answers[part], uniforms=self._uniforms(each[part], after=after))
        if going:
            self._retire()
