"""Continuous batching (Orca, OSDI 2022): waiting samples are admitted to slots that finished rows have left.

A prompt is read once for its group, so every product covers live rows only, and a batch larger than memory still
samples. Finished rows are looked for every `look_every` tokens; tokens past a row's end are cut off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from tinyrl.generation.engine import Completion, FinishReason, Request, max_new_tokens, row_keys
from tinyrl.generation.slots import Slots
from tinyrl.generation.token_sampling import stop_said_at, uniforms
from tinyrl.runs.signals import check_stop

if TYPE_CHECKING:
    from tinyrl.generation.fused import FusedEngine


PREFILL_TOKENS = {"cpu": 4096, "cuda": 32768}  # padded prompt tokens read at a time
ADMIT_BELOW = 0.75  # of the slots in use: prompts read a few at a time cost more
ROW_BUCKETS, WIDTH_BUCKET = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024), 256  # of CUDA graphs
FURTHER = 256  # between buckets of still more rows


def bucket(slots: Slots) -> tuple[int, int]:
    """The smallest graph shape (rows, cache columns) that holds the slots in use."""
    rows = next((b for b in ROW_BUCKETS if b >= slots.live), -(-slots.live // FURTHER) * FURTHER)
    width = -(-slots.longest // WIDTH_BUCKET) * WIDTH_BUCKET
    return min(rows, slots.capacity), min(width, slots.width)


class Sampling:
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
        slots.clear()
        while self.waiting or slots.used:
            self._resume()
            if self._may_admit():
                self._admit(slots.capacity - slots.used)
                self._retire()
            for _ in range(self.engine.look_every if slots.live else 0):
                check_stop()
                slots.longest += 1
                self.advance(*self._shape())
            self._retire()
        flat = [self.done[i] for i in range(len(self.requests) * self.group)]
        return [flat[i : i + self.group] for i in range(0, len(flat), self.group)]

    def _resume(self) -> None:
        """Let parked rows go on. A completion is one turn: no row is parked."""

    def _may_admit(self) -> bool:
        """Whether enough slots are free; any will do where nothing else can be decoded."""
        slots = self.slots
        enough = slots.used <= ADMIT_BELOW * slots.capacity or (not slots.live and slots.used < slots.capacity)
        return bool(self.waiting) and enough

    def _shape(self) -> tuple[int, int]:
        """Rows and cache columns of a step: those in use, or with graphs the bucket that holds them."""
        slots = self.slots
        return bucket(slots) if self.engine.by_graphs else (slots.live, slots.longest)

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
                uniforms=self._uniforms(rows),
            )

    def _uniforms(self, samples: list[int], after: list[int] | int = 0) -> Tensor:
        """The random numbers of these samples' next tokens, of which there are so many `after` the first."""
        first = self.first_tokens[samples] + np.array(after)
        return uniforms(self.keys[samples], num_tokens=self.slots.columns, first=first)

    def _retire(self) -> None:
        """Take finished rows out of those that are decoded."""
        slots = self.slots
        looks = slots.look(self.engine.look_every)
        said = self._said(max((count for count, _ in looks), default=0))
        ends: dict[int, tuple[int, FinishReason]] = {}  # by slot
        for slot, (count, recent) in enumerate(looks):
            eos_at = next((count - len(recent) + i + 1 for i, t in enumerate(recent) if t in self.engine.eos), None)
            limit = self._limit(slots.sample[slot])
            length, reason = self._end(said[slot] if said else [], eos_at, min(count, limit), limit)
            if reason is not None:
                ends[slot] = length, reason
        if ends:
            self._take_out(self._completions(ends))

    def _said(self, most: int) -> list[list[int]]:
        """Of each live row its first tokens, where stop strings are looked for in them; else nothing."""
        slots = self.slots
        return slots.tokens[: slots.live, :most].tolist() if self.settings.stop else []

    def _completions(self, ends: dict[int, tuple[int, FinishReason]]) -> dict[int, Completion]:
        """The completions of rows that have ended, by slot."""
        tokens, logprobs = self.slots.drawn(list(ends), max(length for length, _ in ends.values()))
        rows = zip(ends.items(), tokens, logprobs, strict=True)
        return {slot: Completion(t[:length], p[:length], reason) for (slot, (length, reason)), t, p in rows}

    def _limit(self, sample: int) -> int:
        """The most tokens the row of this sample may have."""
        return max_new_tokens(self.requests[sample // self.group], self.settings)

    def _take_out(self, ended: dict[int, Completion]) -> None:
        """Keep these completions, and free the slots they come from."""
        self.done |= {self.slots.sample[slot]: completion for slot, completion in ended.items()}
        self.slots.leave(list(ended))

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


# ---- Episodes of several turns in the fused engine's cache ----
# Then only the answer's tokens are read, not the prefix again. Where the engine `overlaps`, there is no barrier between
# turns: a row goes on as soon as its answer is there, while others decode or still wait. The same episodes come from
# sampling each turn anew from its whole prefix, with Request.first_token = the response's tokens so far.


EXTEND_TOKENS = {"cpu": 2048, "cuda": 8192}  # padded tokens of answers read at a time; each looks at a whole row


class Answerer(Protocol):
    """What follows each turn of the samples, by their number. Answers are made while others decode (in a thread)."""

    @property
    def columns(self) -> int:
        """The most tokens of a whole response, chosen and read."""
        ...

    def restart(self) -> None:
        """Every sample begins again, and answers under way are forgotten: memory ran out, or nothing has begun."""
        ...

    def limit(self, sample: int) -> int:
        """The most tokens of the sample's current turn: from 1 to SamplingSettings.max_new_tokens."""
        ...

    def ended(self, sample: int, tokens: list[int], finish_reason: FinishReason) -> None:
        """The sample's turn has ended, with these tokens; exactly one of the `answers` follows from it."""
        ...

    def answers(self, *, wait: bool) -> list[tuple[int, list[int] | None]]:
        """Samples whose answers have come since, each with the tokens to read next (None: the episode is over).

        wait: return when there is at least one, and call check_stop meanwhile.
        """
        ...


@dataclass
class Response:
    """What a sample has chosen and read so far, and why its last turn ended."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    chosen: list[bool] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    def chose(self, turn: Completion) -> None:
        """A turn of the policy."""
        self.tokens += turn.tokens
        self.logprobs += turn.logprobs
        self.chosen += [True] * len(turn.tokens)
        self.finish_reason = turn.finish_reason

    def read(self, tokens: list[int]) -> None:
        """An answer."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.chosen += [False] * len(tokens)


class Playing(Sampling):
    """One call of `play`: to the slots a turn is a completion of its own, so that nothing of the text before it can end
    it; the row is parked between two turns.
    """

    def __init__(self, *args: Any, answer: Answerer, **named: Any) -> None:
        super().__init__(*args, **named)
        self.answer = answer
        self.responses: dict[int, Response] = {}
        self.limits: dict[int, int] = {}  # of the turns that are being decoded

    def _limit(self, sample: int) -> int:
        """The most tokens of the sample's turn."""
        if sample not in self.limits:
            self.limits[sample] = self.answer.limit(sample)
            before = len(self.responses[sample].tokens) if sample in self.responses else 0
            assert 1 <= self.limits[sample] <= min(self.settings.max_new_tokens, self.answer.columns - before)
        return self.limits[sample]

    def _take_out(self, ended: dict[int, Completion]) -> None:
        """Park the rows whose turns have ended. Their last token is not in the cache: it is read with the answer."""
        turns = {self.slots.sample[slot]: turn for slot, turn in ended.items()}
        for sample, turn in turns.items():
            self.responses.setdefault(sample, Response()).chose(turn)
            del self.limits[sample]
        self.slots.park({slot: self._total(self.slots.sample[slot]) - 1 for slot in ended})
        for sample, turn in turns.items():
            self.answer.ended(sample, turn.tokens, turn.finish_reason)

    def _total(self, sample: int) -> int:
        """Tokens of the sample's prompt and response so far."""
        return len(self.requests[sample // self.group].prompt_tokens) + len(self.responses[sample].tokens)

    def _resume(self) -> None:
        """Read the answers that have come. Where nothing else can be decoded, wait for one."""
        slots = self.slots
        idle = not slots.live and not self._may_admit()
        if not slots.parked or not (idle or self.engine.overlaps):
            return
        answered = self.answer.answers(wait=idle)
        over = [sample for sample, tokens in answered if tokens is None]
        slots.drop(over)
        for sample in over:
            said = self.responses.pop(sample)
            self.done[sample] = Completion(said.tokens, said.logprobs, said.finish_reason, said.chosen)
        for batch in self._batches({sample: tokens for sample, tokens in answered if tokens is not None}):
            check_stop()
            before = [self.responses[sample].tokens[-1:] for sample in batch]
            for sample, tokens in batch.items():
                self.responses[sample].read(tokens)
                self._limit(sample)  # there is room
            samples, first = list(batch), [len(self.responses[sample].tokens) for sample in batch]
            tokens = [last + answer for last, answer in zip(before, batch.values(), strict=True)]
            slots.resume(samples, tokens, uniforms=self._uniforms(samples, after=first))
        if len(over) < len(answered):
            self._retire()

    def _batches(self, answers: dict[int, list[int]]) -> Iterator[dict[int, list[int]]]:
        """A few answers at a time."""
        limit = EXTEND_TOKENS[self.slots.device.type]
        batch: dict[int, list[int]] = {}
        for sample, tokens in answers.items():
            longest = max(len(t) for t in [*batch.values(), tokens]) + 1
            if batch and (len(batch) + 1) * longest > limit:
                yield batch
                batch = {}
            batch[sample] = tokens
        if batch:
            yield batch
