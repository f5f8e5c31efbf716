"""The fused sampling engine: its own decoder over a static cache, with continuous batching (continuous_batching.py).

On CUDA a step is replayed from a graph for its bucket of rows and cache width, and finished rows are looked for only
every few tokens, so that nothing waits for the host. Episodes of several turns are played in the same cache
(fast_turns.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinyrl.generation.continuous_batching import WIDTH_BUCKET, Answerer, Playing, Sampling
from tinyrl.generation.decoder import Decoder
from tinyrl.generation.engine import (
    LOOK_EVERY,
    Completion,
    HasRowLimit,
    Request,
    SampledRole,
    SamplingSettings,
    eos_token_ids,
    sample_in_fewer_rows,
)
from tinyrl.generation.slots import Slots
from tinyrl.models.device import free_bytes
from tinyrl.models.roles import Roles

# ---- CUDA graphs of a decoding step ----
# An eager step launches some twenty kernels a layer, and on a small model the launches take longer than the work; a
# graph is launched once. Shapes and addresses are frozen in it, so a step works on tensors that never move.


class StepGraphs:
    """Calls `step(rows, width)` through a graph that is captured the first time a shape is seen.

    `state`: the tensors that a step advances. Capturing runs the step once to warm up, and then restores them.
    """

    def __init__(self, step: Callable[[int, int], None], *, state: tuple[Tensor, ...]) -> None:
        self.step, self.state = step, state
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.side = torch.cuda.Stream()  # one for all: cuBLAS keeps a workspace for every stream it has seen

    def __call__(self, rows: int, width: int) -> None:
        if (rows, width) not in self.graphs:
            self.graphs[rows, width] = self._capture(rows, width)
        self.graphs[rows, width].replay()

    def _capture(self, rows: int, width: int) -> torch.cuda.CUDAGraph:
        before = [tensor.clone() for tensor in self.state]
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):  # libraries make their workspaces now, not inside the capture
            self.step(rows, width)
        torch.cuda.current_stream().wait_stream(self.side)
        for tensor, value in zip(self.state, before, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.side):
            self.step(rows, width)
        return graph


# ---- The fused sampling engine ----


CACHE_SHARE = 0.4  # of the memory that is free when sampling starts


@dataclass
class Kept:
    """What outlives a call where steps are replayed: slots for so many `rows` as were wanted of them, and the graphs
    that hold their addresses, for sampled and for greedy tokens.
    """

    decoder: Decoder
    rows: int
    slots: Slots
    graphs: dict[bool, StepGraphs] = field(default_factory=dict)


class FusedEngine(HasRowLimit):
    """Samples through a `Decoder`, whose weights are copied from the acting role at every call.

    by_graphs: whether steps are replayed from graphs, as on CUDA; deterministic algorithms may copy from the host,
    which no graph can.
    overlaps: whether rows go on while others wait for their environment. Which rows are decoded together then depends
    on the clock, and with it the rounding, so not where the same run is to give the same bits.
    """

    name = "fused"

    def __init__(
        self, roles: Roles, tokenizer: PreTrainedTokenizerBase, settings: SamplingSettings, *, dtype: torch.dtype
    ) -> None:
        self.roles, self.tokenizer, self.settings, self.dtype = roles, tokenizer, settings, dtype
        self.max_rows = settings.max_rows
        self.exact = dtype == torch.float32 and roles.causal.dtype == torch.float32
        self.eos = eos_token_ids(roles, tokenizer)
        self.look_every = LOOK_EVERY[roles.device.type]
        self.by_graphs = self.overlaps = (
            roles.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
        )
        self.decoders: dict[int, Decoder] = {}  # of each model that has sampled: the policy's, a frozen reference
        self._copy_bytes = 0
        self._kept: Kept | None = None

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
            width = max(len(r.prompt_tokens) for r in requests) + self.columns
            with self._decoding(role, greedy, rows=rows, width=width) as (slots, advance):
                return Sampling(self, slots, advance, requests, samples_per_request, key=(seed, step)).run()

        return sample_in_fewer_rows(self, len(requests) * samples_per_request, attempt)

    def play(
        self,
        requests: list[Request],
        samples_per_request: int,
        *,
        answer: Answerer,
        seed: int,
        step: int,
        greedy: bool = False,
        role: SampledRole = "policy",
    ) -> list[list[Completion]]:
        """As `sample`, for episodes of several turns: `answer` says what is read after each turn, and how long a turn
        may be (max_new_tokens of a request does not count). Sample i of request r is r * samples_per_request + i to it.

        A completion is a whole response; `chosen` says which of its tokens were drawn, and the finish reason is that of
        the last turn. Token t of it is drawn by the request's random number first_token + t.
        """
        if not requests:
            return []

        def attempt(rows: int) -> list[list[Completion]]:
            answer.restart()
            width = max(len(r.prompt_tokens) for r in requests) + answer.columns + self.look_every - 1
            with self._decoding(role, greedy, rows=rows, width=width) as (slots, advance):
                return Playing(
                    self, slots, advance, requests, samples_per_request, key=(seed, step), answer=answer
                ).run()

        return sample_in_fewer_rows(self, len(requests) * samples_per_request, attempt)

    @contextmanager
    def _decoding(
        self, role: SampledRole, greedy: bool, *, rows: int, width: int
    ) -> Iterator[tuple[Slots, Callable[[int, int], None]]]:
        """The slots of one attempt with at most so many rows at a time, and what advances them; one that fails holds no
        memory.
        """
        with self.roles.acting(role) as model:
            decoder = self.decoders.setdefault(id(model), Decoder(model, dtype=self.dtype))
            decoder.sync(self.roles.adapter_of(role))
            yield self._slots(decoder, greedy, rows=rows, width=width)
        self._hand_back(decoder)

    def adopt(self, decoder: Decoder) -> None:
        """Sample from the policy's model through this decoder, whose copy of the weights is already made."""
        self.decoders[id(self.roles.causal)] = decoder
        self._hand_back(decoder)

    def _hand_back(self, decoder: Decoder) -> None:
        """Free the copy for the update, as it is quickly made again, unless graphs still read it."""
        self._copy_bytes = decoder.weight_bytes
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
    def copy_bytes(self) -> int:
        """Bytes of the decoder's own weights, when it samples."""
        return self._copy_bytes

    @property
    def columns(self) -> int:
        """New tokens of one turn a row has room for: it may run past its end until the next look."""
        return self.settings.max_new_tokens + self.look_every - 1

    def _slots(
        self, decoder: Decoder, greedy: bool, *, rows: int, width: int
    ) -> tuple[Slots, Callable[[int, int], None]]:
        """Slots for as many rows as wanted, or as memory allows, and the function that advances them."""
        if not self.by_graphs:
            slots = self._new_slots(decoder, greedy, rows=rows, width=width)
            return slots, slots.advance
        kept = self._kept
        if kept is None or kept.decoder is not decoder or kept.rows < rows or kept.slots.width < width:
            kept = self._kept = None  # its memory serves the next
            width = -(-width // WIDTH_BUCKET) * WIDTH_BUCKET
            self._kept = kept = Kept(decoder, rows, self._new_slots(decoder, greedy, rows=rows, width=width))
        slots = kept.slots
        slots.greedy, self.capacity = greedy, slots.capacity
        if greedy not in kept.graphs:
            kept.graphs[greedy] = StepGraphs(slots.advance, state=(slots.token, slots.position, slots.count))
        return slots, kept.graphs[greedy]

    def _new_slots(self, decoder: Decoder, greedy: bool, *, rows: int, width: int) -> Slots:
        device = self.roles.device
        self.capacity = min(rows, rows_that_fit(decoder, width, free=free_bytes(device)))
        return Slots(
            decoder,
            self.settings,
            capacity=self.capacity,
            width=width,
            columns=self.columns,
            greedy=greedy,
            device=device,
        )


def rows_that_fit(decoder: Decoder, width: int, *, free: int) -> int:
    """How many sequences of `width` tokens the cache may hold with `free` bytes of memory."""
    return max(1, int(free * CACHE_SHARE / (decoder.cache_bytes_per_token * width)))
