"""Sampling for callers who come one by one, from many threads, decoded in one batch.

One thread owns the model and works in rounds. Requests that are drawn alike (role, temperature, top-p, top-k) share a
round and join it while it goes on (the fused engine; with the library's modules a round is one batch). The first in the
queue that is drawn otherwise ends admission, so that its round comes next. A request's random numbers are its own
(engine.py), so its completion does not depend on who shares its batch, to rounding.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinyrl.generation.decoder import Decoder
from tinyrl.generation.engine import (
    Completion,
    FinishReason,
    Request,
    SampledRole,
    SamplingSettings,
    eos_token_ids,
    row_keys,
    stop_said_at,
    uniforms,
)
from tinyrl.generation.fused import EXTEND_TOKENS, PREFILL_TOKENS, FusedEngine
from tinyrl.generation.hf import Decoding, HfEngine
from tinyrl.generation.slots import Slots, padded_parts
from tinyrl.models.batches import backbone_of
from tinyrl.models.device import HALVES, as_out_of_memory
from tinyrl.models.loading import embedding_rows
from tinyrl.models.logprobs import head_of
from tinyrl.models.packing import LEAST_START, common_length

LIVE_STEP = 1 << 40  # the step in the keys of these samples: no training step or evaluation reaches it
WIDTHS = 256  # new tokens of a row are a multiple of this, so that others fit into its batch
SCORED = 256  # positions whose logits are there at a time
LEAST = -9999.0  # in place of minus infinity, which JSON has not
HALF = "\ufffd"  # how a decoder writes bytes of a character that is not whole


@dataclass(frozen=True)
class Draw:
    """How tokens are drawn; temperature 0: the likeliest."""

    role: SampledRole = "policy"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass
class Wanted:
    """A completion that somebody waits for. `on_tokens` gets its tokens as they come, `on_end` all of it, or what went
    wrong; both are called in the sampler's thread. (seed, step): of its random numbers. given_up: nobody waits any
    more.
    """

    request: Request
    draw: Draw
    stop: list[str]
    on_end: Callable[[Completion | Exception], None]
    on_tokens: Callable[[list[int]], None] = lambda tokens: None
    seed: int = 0
    step: int = LIVE_STEP
    given_up: bool = False
    alone: bool = False  # a batch with it has failed
    tokens: list[int] = field(default_factory=list)
    told: int = 0  # how many of them `on_tokens` has been given

    @property
    def limit(self) -> int:
        assert self.request.max_new_tokens is not None
        return self.request.max_new_tokens

    @property
    def room(self) -> int:
        return len(self.request.prompt_tokens) + self.limit


@dataclass(frozen=True)
class Scored:
    """Log-probability of each token of a text given those before it (None for the first), and the most likely tokens at
    each place in descending order (none at the first).
    """

    logprobs: list[float | None]
    likeliest: list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Reading:
    """Tokens to score; on_end is called in the sampler's thread."""

    tokens: list[int]
    draw: Draw
    likeliest: int
    on_end: Callable[[Scored | Exception], None]


@dataclass
class Batch:
    """Rows that are drawn alike, round after round. `room`: tokens of one, its prompt's and its own, at most `limit`.

    A row that ends stays as long as nobody needs its place, so that a conversation that goes on, or a prompt that
    begins as it does, is read only from where they part.
    """

    draw: Draw
    limit: int
    slots: Slots
    advance: Callable[..., None]
    room: int
    numbers: Iterator[int] = field(default_factory=count)  # of the samples
    read: dict[int, list[int]] = field(default_factory=dict)  # of each that stays, what it has read; the oldest first

    def fits(self, wanted: Wanted) -> bool:
        return wanted.limit <= self.limit and wanted.room <= self.room

    def keep(self, ended: dict[int, Wanted]) -> None:
        """The rows at these slots have ended. Their last token is not in the cache."""
        read = {slot: [*wanted.request.prompt_tokens, *wanted.tokens][:-1] for slot, wanted in ended.items()}
        self.read |= {self.slots.sample[slot]: tokens for slot, tokens in read.items()}
        self.slots.park({slot: len(tokens) for slot, tokens in read.items()})

    def take(self, prompt: list[int]) -> tuple[int, int] | None:
        """The row that has read most of this prompt, and how much. Not one that has read more of something else, which
        may go on itself.
        """
        known = {number: common_length([tokens, prompt[:-1]]) for number, tokens in self.read.items()}
        number = max(known, key=known.__getitem__, default=-1)
        if number < 0 or known[number] < max(LEAST_START, len(self.read[number]) / 2):
            return None
        del self.read[number]
        self.slots.parked[number].cached = known[number]
        return number, known[number]

    def make_room(self, rows: int) -> None:
        while self.read and self.slots.used + rows > self.slots.capacity:
            self.slots.forget(oldest := next(iter(self.read)))
            del self.read[oldest]


class LiveSampler:
    """A queue before a sampling engine, and the thread that works it off. max_rows: sequences decoded together."""

    def __init__(self, engine: FusedEngine | HfEngine, *, max_rows: int, most_waiting: int = 4096) -> None:
        self.engine, self.max_rows, self.most_waiting = engine, max_rows, most_waiting
        self.tokenizer: PreTrainedTokenizerBase = engine.tokenizer
        self.vocabulary = embedding_rows(engine.roles.causal)  # ids that may be read; some have no text
        self.eos = eos_token_ids(engine.roles, engine.tokenizer)
        self._waiting: deque[Wanted | Reading] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._decoders: dict[SampledRole, Decoder] = {}
        self._stale: set[SampledRole] = set()  # whose weights have changed
        self._batch: Batch | None = None
        self._idle = threading.Lock()  # held while the thread is at work
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)
        self._thread.start()

    def ask(self, wanted: list[Wanted]) -> bool:
        """Queue them, all or none; False: too many wait already."""
        return self._queue(wanted)

    def _queue(self, wanted: Sequence[Wanted | Reading]) -> bool:
        with self._changed:
            if self._closed or len(self._waiting) + len(wanted) > self.most_waiting:
                return False
            self._waiting += wanted
            self._changed.notify()
        return True

    def score(
        self, tokens: list[int], draw: Draw, on_end: Callable[[Scored | Exception], None], *, likeliest: int = 1
    ) -> bool:
        """Queue a reading of `tokens` under softmax(logits / temperature); False: too many wait already."""
        return self._queue([Reading(tokens, draw, likeliest, on_end)])

    def renew(self) -> None:
        """Sample from the weights as they are now, from the next round on."""
        self._stale = set(self._decoders)

    def release(self) -> None:
        """Wait for the round in hand, and free the copies of weights, which the next one makes again. Requests that
        still wait end with an error.
        """
        with self._idle:
            self._turn_away(RuntimeError("the episode is over"))
            self._stale, self._batch = set(self._decoders), None
            if isinstance(self.engine, FusedEngine) and not self.engine.by_graphs:
                for decoder in self._decoders.values():
                    decoder.release()

    def close(self) -> None:
        """End the thread; whoever still waits is told."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._turn_away(RuntimeError("the server is closing"))

    def _turn_away(self, why: Exception) -> None:
        with self._changed:
            waiting = [*self._waiting]
            self._waiting.clear()
        for wanted in waiting:
            wanted.on_end(why)

    # ---- the thread ----

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # a thread has a number of its own
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            with self._idle:
                with self._changed:
                    first = self._waiting[0] if self._waiting else None
                    if isinstance(first, Reading):
                        self._waiting.popleft()
                if isinstance(first, Wanted):
                    self._round(first)
                elif first is not None:
                    self._read(first)

    def _round(self, first: Wanted) -> None:
        going: dict[int, Wanted] = {}
        try:
            with as_out_of_memory(), torch.inference_mode():
                if isinstance(self.engine, FusedEngine):
                    self._decode_as_they_come(self.engine, first, going)
                else:
                    self._decode_together(self.engine, first, going)
        except Exception as error:  # noqa: BLE001 whoever waits is told, and the next round begins
            self._batch = None
            self.engine.release()
            with self._changed:
                if not going and self._waiting and self._waiting[0] is first:
                    self._waiting.popleft()
                    going[0] = first
                if not first.alone:  # one of them has failed: each is run again, alone
                    for wanted in going.values():
                        wanted.alone = True
                        wanted.tokens.clear()
                    self._waiting.extendleft(reversed(going.values()))
                    return
            for wanted in going.values():
                wanted.on_end(error)

    def _next_like(self, first: Wanted, fits: Callable[[Wanted], bool]) -> Wanted | None:
        """The first that waits, where it is drawn as `first` is and fits; those given up are left out."""
        while True:
            with self._changed:
                wanted = self._waiting[0] if self._waiting and not self._closed else None
                if not isinstance(wanted, Wanted):
                    return None
                apart = wanted is not first and (wanted.alone or first.alone)
                if not wanted.given_up and (apart or wanted.draw != first.draw or not fits(wanted)):
                    return None
                self._waiting.popleft()
            if not wanted.given_up:
                return wanted

    # ---- the fused engine ----

    def _decode_as_they_come(self, engine: FusedEngine, first: Wanted, going: dict[int, Wanted]) -> None:
        with engine.roles.acting(first.draw.role) as model:
            batch = self._batch_for(engine, first, self._decoder(engine, first.draw.role, model))
            slots = batch.slots
            while True:
                joining = []
                while slots.live + len(joining) < slots.capacity:
                    if (wanted := self._next_like(first, batch.fits)) is None:
                        break
                    joining.append(wanted)
                if joining:
                    self._enter(batch, going, joining)
                    self._look(engine, batch, going)
                if not slots.live:
                    return
                for _ in range(engine.look_every):
                    engine.step(slots, batch.advance)
                self._look(engine, batch, going)

    def _batch_for(self, engine: FusedEngine, first: Wanted, decoder: Decoder) -> Batch:
        """The batch of the last round, where it is drawn alike and has the room; else another."""
        with self._changed:
            alike = [w for w in self._waiting if isinstance(w, Wanted) and w.draw == first.draw][: self.max_rows]
            alike = [first] if first.alone else alike
        look = engine.look_every - 1  # a row may run past its end until the next look
        limit, room = max(w.limit for w in alike), max(w.room for w in alike) + look
        batch = self._batch
        if batch is None or batch.draw != first.draw or batch.limit < limit or batch.slots.width < room:
            self._batch = batch = None  # its memory serves the next
            limit, width = -(-limit // WIDTHS) * WIDTHS, max(WIDTHS, 1 << (room - 1).bit_length())
            engine.settings = settings_of(first.draw, limit)
            greedy = first.draw.temperature == 0
            slots, advance = engine.slots(decoder, greedy, rows=self.max_rows, width=width)
            slots.clear()
            self._batch = batch = Batch(first.draw, limit, slots, advance, room=slots.width - look)
        return batch

    def _decoder(self, engine: FusedEngine, role: SampledRole, model: Any) -> Decoder:
        if role not in self._decoders or role in self._stale:
            self._batch = None  # what it has read was read by other weights
            decoder = self._decoders.setdefault(role, engine.decoder(model))
            decoder.sync(engine.roles.adapter_of(role))
            self._stale.discard(role)
        return self._decoders[role]

    def _enter(self, batch: Batch, going: dict[int, Wanted], joining: list[Wanted]) -> None:
        """Read their prompts: behind what an ended row has read of them, or else whole, once for those that follow one
        another with the same.
        """
        slots = batch.slots
        most = PREFILL_TOKENS[slots.device.type], EXTEND_TOKENS[slots.device.type]
        behind: dict[int, list[int]] = {}
        samples: list[list[int]] = []
        prompts: list[list[int]] = []
        for wanted in joining:
            tokens = wanted.request.prompt_tokens
            if (found := batch.take(tokens)) is not None:
                number, known = found
                behind[number] = tokens[known:]
            else:
                number = next(batch.numbers)
                if prompts and tokens == prompts[-1]:
                    samples[-1].append(number)
                else:
                    samples.append([number])
                    prompts.append(tokens)
            going[number] = wanted
        batch.make_room(sum(map(len, samples)))
        each, texts = list(behind), list(behind.values())
        for part in padded_parts(texts, most[1]):
            slots.resume(each[part], texts[part], uniforms=self._uniforms(going, each[part], slots.columns))
        for part in padded_parts(prompts, most[0]):
            drawn = self._uniforms(going, [n for of in samples[part] for n in of], slots.columns)
            slots.enter(samples[part], prompts[part], uniforms=drawn)

    def _uniforms(self, going: dict[int, Wanted], samples: list[int], columns: int) -> Tensor:
        each = [going[number] for number in samples]
        found = [row_keys([wanted.request], 1, seed=wanted.seed, step=wanted.step) for wanted in each]
        keys, first = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return uniforms(keys, num_tokens=columns, first=first)

    def _look(self, engine: FusedEngine, batch: Batch, going: dict[int, Wanted]) -> None:
        slots = batch.slots
        ended: dict[int, tuple[Wanted, FinishReason | None]] = {}  # by slot
        for slot, (drawn, recent) in enumerate(slots.look(engine.look_every)):
            wanted = going[slots.sample[slot]]
            new = recent[len(recent) - (drawn - len(wanted.tokens)) :]
            reason = self._told(wanted, new)
            if reason is not None or wanted.given_up:
                ended[slot] = wanted, reason
        if not ended:
            return
        tokens, logprobs = slots.drawn(list(ended), max(len(wanted.tokens) for wanted, _ in ended.values()))
        for (wanted, reason), drawn, scores in zip(ended.values(), tokens, logprobs, strict=True):
            size = len(wanted.tokens)
            if reason is not None:
                wanted.on_end(Completion(drawn[:size], scores[:size], reason))
        batch.keep({slot: going.pop(slots.sample[slot]) for slot in ended})

    def _told(self, wanted: Wanted, new: list[int]) -> FinishReason | None:
        """Add new tokens to what is there, up to the end, which is returned where it has come."""
        reason: FinishReason | None = None
        for token in new:
            wanted.tokens.append(token)
            if token in self.eos:
                reason = "eos"
            elif wanted.stop and stop_said_at(wanted.tokens, wanted.stop, self.tokenizer, look_at=1) is not None:
                reason = "stop"
            elif len(wanted.tokens) >= wanted.limit:
                reason = "length"
            if reason is not None:
                break
        if len(wanted.tokens) > wanted.told and not wanted.given_up:
            wanted.on_tokens(wanted.tokens[wanted.told :])
            wanted.told = len(wanted.tokens)
        return reason

    # ---- the library's modules ----

    def _decode_together(self, engine: HfEngine, first: Wanted, going: dict[int, Wanted]) -> None:
        key = (first.stop, first.seed, first.step)
        while len(going) < self.max_rows:
            wanted = self._next_like(first, lambda other: (other.stop, other.seed, other.step) == key)
            if wanted is None:
                break
            going[len(going)] = wanted
        if not going:
            return

        def on_token(rows: Tensor, alive: Tensor, tokens: Tensor) -> None:
            for row, lives, token in zip(rows.tolist(), alive.tolist(), tokens.tolist(), strict=True):
                if lives:
                    self._told(going[row], [token])

        engine.settings = settings_of(first.draw, max(w.limit for w in going.values()), first.stop)
        engine.on_token = on_token
        acting = engine.roles.acting_merged if engine.merged else engine.roles.acting
        options: Any = {"seed": first.seed, "step": first.step, "greedy": first.draw.temperature == 0}
        try:
            with acting(first.draw.role) as model:
                completions = Decoding(engine, model, [w.request for w in going.values()], 1, options).run()
        finally:
            del engine.on_token
        for wanted, completion in zip(going.values(), completions, strict=True):
            wanted.on_end(completion)

    # ---- reading ----

    def _read(self, reading: Reading) -> None:
        try:
            result = self._scored(reading.tokens, reading.draw, reading.likeliest)
        except Exception as error:  # noqa: BLE001 whoever waits is told
            result = error
        reading.on_end(result)

    @torch.inference_mode()
    def _scored(self, tokens: list[int], draw: Draw, count: int) -> Scored:
        roles, engine = self.engine.roles, self.engine
        dtype = engine.dtype if isinstance(engine, FusedEngine) else roles.causal.dtype
        logprobs, likeliest = list[float | None]([None]), list[list[tuple[int, float]]]([[]])
        ids = torch.tensor([tokens], device=roles.device)
        with roles.acting(draw.role) as model, torch.autocast(roles.device.type, dtype=dtype, enabled=dtype in HALVES):
            states = backbone_of(model)(input_ids=ids).last_hidden_state[0]
            for start in range(0, len(tokens) - 1, SCORED):
                part = states[start : min(start + SCORED, len(tokens) - 1)]
                log_p = (head_of(model).logits(part).float() / (draw.temperature or 1.0)).log_softmax(-1)
                log_p = log_p.clamp_min(LEAST)
                following = ids[0, start + 1 : start + 1 + len(part)]
                logprobs += log_p.gather(1, following.unsqueeze(1)).squeeze(1).tolist()
                most, which = log_p.topk(min(count, log_p.shape[-1]))
                likeliest += [[*zip(*row, strict=True)] for row in zip(which.tolist(), most.tolist(), strict=True)]
        return Scored(logprobs, likeliest)


def settings_of(draw: Draw, max_new_tokens: int, stop: list[str] | None = None) -> SamplingSettings:
    return SamplingSettings(draw.temperature or 1.0, max_new_tokens, stop or [], draw.top_p, draw.top_k)


class Spelling:
    """Text of tokens as they come, handed out once it is whole: half a character waits for its other half."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._before, self._said = 0, 0  # text is decoded from `before`; up to `said` it was handed out

    def add(self, token: int) -> str:
        self._tokens.append(token)
        return self._whole(at_end=False)

    def end(self) -> str:
        return self._whole(at_end=True)

    def _whole(self, *, at_end: bool) -> str:
        # A tokenizer may join or drop spaces by what stands before, so that is decoded along.
        known = self._decoded(self._tokens[self._before : self._said])
        text = self._decoded(self._tokens[self._before :])
        if len(text) <= len(known) or (text.endswith(HALF) and not at_end):
            return ""
        self._before, self._said = self._said, len(self._tokens)
        return text[len(known) :]

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
