"""The fused sampling engine: its own decoder over a static cache, with continuous batching.

A prompt is read once for its group. A finished row leaves at once and the last row takes its place, so every product
covers live rows only; waiting samples are admitted as slots become free (Orca, OSDI 2022), so a batch larger than
memory still samples. On CUDA a step is replayed from a graph for its bucket of rows and cache width, and finished
rows are looked for only every few tokens, so that nothing waits for the host; tokens past a row's end are cut off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain

import psutil
import torch
from transformers import PreTrainedTokenizerBase

from tinyrl.generation.decoder import Decoder
from tinyrl.generation.engine import (
    Completion,
    FinishReason,
    Request,
    SampledRole,
    SamplingSettings,
    eos_token_ids,
    max_new_tokens,
    row_keys,
    sample_in_fewer_rows,
)
from tinyrl.generation.graphs import StepGraphs
from tinyrl.generation.rng import uniforms
from tinyrl.generation.slots import Slots
from tinyrl.generation.token_sampling import stop_said_at
from tinyrl.models.roles import Roles
from tinyrl.runs.signals import check_stop

PREFILL_TOKENS = {"cpu": 4096, "cuda": 32768}  # padded prompt tokens read at a time
LOOK_EVERY = {"cpu": 1, "cuda": 16}  # tokens between two looks at which rows have finished
CACHE_SHARE = 0.4  # of the memory that is free when sampling starts
ADMIT_BELOW = 0.75  # of the slots in use: prompts read a few at a time cost more
ROW_BUCKETS, WIDTH_BUCKET = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024), 256  # of CUDA graphs


class FusedEngine:
    """Samples through a `Decoder`, whose weights are copied from the acting role at every call."""

    name = "fused"

    def __init__(
        self, roles: Roles, tokenizer: PreTrainedTokenizerBase, settings: SamplingSettings, *, dtype: torch.dtype
    ) -> None:
        self.roles, self.tokenizer, self.settings, self.dtype = roles, tokenizer, settings, dtype
        self.max_rows = settings.max_rows
        self.exact = dtype == torch.float32 and roles.causal.dtype == torch.float32
        self.eos = eos_token_ids(roles, tokenizer)
        self.look_every = LOOK_EVERY[roles.device.type]
        self.decoders: dict[int, Decoder] = {}  # of each model that has sampled: the policy's, a frozen reference
        self._copy_bytes = 0
        self._kept: tuple[tuple[object, ...], Slots, StepGraphs] | None = None  # CUDA: graphs outlive a call

    def sample(
        self,
        requests: list[Request],
        samples_per_request: int,
        *,
        seed: int,
        step: int,
        greedy: bool = False,
        role: SampledRole = "policy",
    ) -> list[list[Completion]]:
        """`samples_per_request` completions for every request, in order.

        Out of memory halves the number of rows decoded at a time and starts over: keyed randomness gives the same
        samples again. Raises torch.OutOfMemoryError when a single row does not fit.
        """
        if not requests:
            return []

        def attempt(rows: int) -> list[list[Completion]]:
            return self._sample(requests, samples_per_request, rows, (seed, step), greedy, role)

        return sample_in_fewer_rows(self, len(requests) * samples_per_request, attempt)

    def _sample(
        self,
        requests: list[Request],
        samples_per_request: int,
        rows: int,
        key: tuple[int, int],
        greedy: bool,
        role: SampledRole,
    ) -> list[list[Completion]]:
        """One attempt with at most so many rows at a time; a failed one holds no memory."""
        with self.roles.acting(role) as model:
            decoder = self.decoders.setdefault(id(model), Decoder(model, dtype=self.dtype))
            decoder.sync(self.roles.adapter_of(role))
            width = max(len(r.prompt_tokens) for r in requests) + self.columns
            slots, advance = self._slots(decoder, greedy, rows=rows, width=width)
            completions = _Sampling(self, slots, advance, requests, samples_per_request, key=key).run()
        self._hand_back(decoder)
        return completions

    def adopt(self, decoder: Decoder) -> None:
        """Sample from the policy's model through this decoder, whose copy of the weights is already made."""
        self.decoders[id(self.roles.causal)] = decoder
        self._hand_back(decoder)

    def _hand_back(self, decoder: Decoder) -> None:
        """On a CPU, free the copy for the update, as it is quickly made again; on CUDA, graphs still read it."""
        self._copy_bytes = decoder.weight_bytes
        if self.roles.device.type == "cpu":
            decoder.release()

    def release(self) -> bool:
        """Free the cache, the graphs and the copies of the weights; the next call makes them again."""
        kept = self._kept is not None
        self._kept = None
        for decoder in self.decoders.values():
            decoder.release()
        return kept

    @property
    def copy_bytes(self) -> int:
        """Bytes of the decoder's own weights, when it samples."""
        return self._copy_bytes

    @property
    def columns(self) -> int:
        """New tokens a row has room for: it may run past its end until the next look."""
        return self.settings.max_new_tokens + self.look_every - 1

    def _slots(
        self, decoder: Decoder, greedy: bool, *, rows: int, width: int
    ) -> tuple[Slots, Callable[[int, int], None]]:
        """Slots for as many rows as wanted, or as memory allows, and the function that advances them."""
        device, columns = self.roles.device, self.columns
        if device.type != "cuda":
            rows = min(rows, rows_that_fit(decoder, width, free=psutil.virtual_memory().available))
            slots = Slots(
                decoder, self.settings, capacity=rows, width=width, columns=columns, greedy=greedy, device=device
            )
            return slots, slots.advance
        width = -(-width // WIDTH_BUCKET) * WIDTH_BUCKET
        key = (id(decoder), greedy, rows, width)
        if self._kept is None or self._kept[0] != key:
            self._kept = None
            fit = min(rows, rows_that_fit(decoder, width, free=torch.cuda.mem_get_info(device)[0]))
            slots = Slots(
                decoder, self.settings, capacity=fit, width=width, columns=columns, greedy=greedy, device=device
            )
            graphs = StepGraphs(slots.advance, state=(slots.token, slots.position, slots.count))
            self._kept = (key, slots, graphs)
        return self._kept[1], self._kept[2]


def rows_that_fit(decoder: Decoder, width: int, *, free: int) -> int:
    """How many sequences of `width` tokens the cache may hold with `free` bytes of memory."""
    return max(1, int(free * CACHE_SHARE / (decoder.cache_bytes_per_token * width)))


def bucket(slots: Slots) -> tuple[int, int]:
    """The smallest graph shape (rows, cache columns) that holds the slots in use."""
    rows = next((b for b in ROW_BUCKETS if b >= slots.live), slots.live)
    width = -(-slots.longest // WIDTH_BUCKET) * WIDTH_BUCKET
    return min(rows, slots.capacity), min(width, slots.width)


class _Sampling:
    """One call of `sample`: the waiting samples and the finished completions."""

    def __init__(
        self,
        engine: FusedEngine,
        slots: Slots,
        advance: Callable[[int, int], None],
        requests: list[Request],
        group: int,
        *,
        key: tuple[int, int],
    ) -> None:
        self.engine, self.slots, self.advance, self.requests, self.group = engine, slots, advance, requests, group
        self.settings = engine.settings
        seed, step = key
        self.keys, self.first_tokens = row_keys(requests, group, seed=seed, step=step)
        self.waiting = deque(range(len(requests) * group))
        self.done: dict[int, Completion] = {}

    def run(self) -> list[list[Completion]]:
        slots = self.slots
        slots.sample, slots.longest = [], 0
        while self.waiting or slots.live:
            if self.waiting and slots.live <= ADMIT_BELOW * slots.capacity:
                self._admit(slots.capacity - slots.live)
                self._retire()
            for _ in range(self.engine.look_every if slots.live else 0):
                check_stop()
                slots.longest += 1
                self.advance(*self._shape())
            self._retire()
        flat = [self.done[i] for i in range(len(self.requests) * self.group)]
        return [flat[i : i + self.group] for i in range(0, len(flat), self.group)]

    def _shape(self) -> tuple[int, int]:
        """Rows and cache columns of a step: those in use, or on CUDA the bucket that holds them."""
        slots = self.slots
        return bucket(slots) if slots.device.type == "cuda" else (slots.live, slots.longest)

    def _admit(self, free: int) -> None:
        """Admit as many waiting samples as there are free slots, a few prompts at a time."""
        limit = PREFILL_TOKENS[self.slots.device.type]
        while free and self.waiting:
            samples: dict[int, list[int]] = {}  # by request
            longest = 0
            while self.waiting and free:
                request = self.waiting[0] // self.group
                longest = max(longest, len(self.requests[request].prompt_tokens))
                if samples and len({*samples, request}) * longest > limit:
                    break
                samples.setdefault(request, []).append(self.waiting.popleft())
                free -= 1
            check_stop()
            rows = list(chain.from_iterable(samples.values()))
            self.slots.enter(
                list(samples.values()),
                [self.requests[i].prompt_tokens for i in samples],
                uniforms=uniforms(self.keys[rows], num_tokens=self.slots.columns, first=self.first_tokens[rows]),
            )

    def _retire(self) -> None:
        """Turn finished rows into completions and free their slots."""
        slots = self.slots
        counts = slots.count[: slots.live].tolist()
        leaving = []
        for slot, (recent, count) in enumerate(zip(slots.recent(self.engine.look_every), counts, strict=True)):
            eos_at = next((count - len(recent) + i + 1 for i, t in enumerate(recent) if t in self.engine.eos), None)
            limit = max_new_tokens(self.requests[slots.sample[slot] // self.group], self.settings)
            length, reason = self._end(slot, eos_at, min(count, limit), limit)
            if reason is not None:
                tokens, logprobs = slots.tokens[slot, :length].tolist(), slots.logprobs[slot, :length].tolist()
                self.done[slots.sample[slot]] = Completion(tokens, logprobs, reason)
                leaving.append(slot)
        if leaving:
            slots.leave(leaving)

    def _end(self, slot: int, eos_at: int | None, count: int, limit: int) -> tuple[int, FinishReason | None]:
        """The length of a row and why it has ended; None while it goes on."""
        length, reason = (eos_at, "eos") if eos_at is not None and eos_at <= count else (count, "length")
        if self.settings.stop:
            said = self.slots.tokens[slot, :length].tolist()
            look_at = self.engine.look_every
            stopped = stop_said_at(said, self.settings.stop, self.engine.tokenizer, look_at=look_at)
            if stopped is not None and (reason != "eos" or stopped < length):
                return stopped, "stop"
        ended = reason == "eos" or count >= limit
        return length, reason if ended else None
