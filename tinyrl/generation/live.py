"""The scheduler in a thread of its own, for callers who come one by one from many threads: `serve` and agents.

Rows with any temperature, top-p and top-k are decoded together; only requests to other weights (another role), or for
longer rows than there are, wait until those before them have ended. A request's random numbers are its own (draws.py),
so its completion does not depend on who shares its batch, to rounding.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from tinyrl.generation.engine import LocalEngine, SampledRole, Sequence
from tinyrl.models.batches import backbone_of
from tinyrl.models.device import HALVES, as_out_of_memory
from tinyrl.models.loading import embedding_rows
from tinyrl.models.logprobs import head_of

LIVE_STEP = 1 << 40  # the step in the keys of these samples: no training step or evaluation reaches it
MOST_WAITING = 4096
WIDTHS = 256  # tokens of a row at least
SCORED = 256  # positions whose logits are there at a time
LEAST = -9999.0  # in place of minus infinity, which JSON has not

Result = TypeVar("Result")


class LiveScheduler:
    """A queue before an engine's scheduler, and the thread that works it off. max_rows: sequences decoded together.

    on_tokens and on_end of a sequence are called in that thread.
    """

    def __init__(self, engine: LocalEngine, *, max_rows: int) -> None:
        self.engine, self.max_rows = engine, max_rows
        self.tokenizer: PreTrainedTokenizerBase = engine.tokenizer
        self.vocabulary = embedding_rows(engine.roles.causal)  # ids that may be read; some have no text
        self._waiting: deque[Sequence] = deque()
        self._alone: set[Sequence] = set()  # that were in a batch which failed
        self._changed, self._closed, self._runs = threading.Condition(), False, 0
        self._idle = threading.Lock()  # held while a round is in hand, or a function runs
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, sequences: Iterable[Sequence]) -> bool:
        """Queue all or nothing; False: too many wait already."""
        sequences = list(sequences)
        with self._changed:
            if self._closed or len(self._waiting) + len(sequences) > MOST_WAITING:
                return False
            self._waiting += sequences
            self._changed.notify()
        return True

    def run(self, function: Callable[[], Result]) -> Result:
        """Run a function between two rounds; the round in hand takes nobody in meanwhile."""
        with self._changed:
            self._runs += 1
        try:
            with self._idle:
                torch.set_num_threads(self._threads)  # a thread has a number of its own
                return function()
        finally:
            with self._changed:
                self._runs -= 1
                self._changed.notify()

    def release(self) -> None:
        """Free the copies of weights; the next round copies them as they then are. Requests that still wait end with an
        error.
        """
        self.run(lambda: (self._turn_away("the episode is over"), self.engine.forget()))

    def close(self) -> None:
        """End the thread; requests that still wait end with an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._turn_away("the server is closing")

    def _turn_away(self, why: str) -> None:
        with self._changed:
            waiting, self._waiting = self._waiting, deque()
        for sequence in waiting:
            sequence.on_end(RuntimeError(why))

    # ---- the thread ----

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._waiting and not self._runs))
                if self._closed:
                    return
            with self._idle:
                with self._changed:
                    first = self._waiting.popleft() if self._waiting else None
                if first is not None and not first.cancelled:
                    self._round(first)

    def _round(self, first: Sequence) -> None:
        """Decode the first that waits, and those that come until none is left that can join. Where that fails, each of
        them is run again, alone.
        """
        going, beyond = [first], self.engine.look_every - 1  # a row may run past its end until the next look
        with self._changed:
            alike = [s for s in self._waiting if s.role == first.role][: self.max_rows]
        room = max(s.room for s in [first, *alike]) + beyond
        width = max(WIDTHS, 1 << (room - 1).bit_length()) - beyond
        try:
            with (
                as_out_of_memory(),
                torch.inference_mode(),
                self.engine.scheduler(first.role, rows=self.max_rows, width=width, serving=True) as scheduler,
            ):
                scheduler.add(going)
                while scheduler.busy:
                    with self._changed:  # the first that wait join, as long as they can
                        while self._waiting and not (self._closed or self._runs) and len(going) < scheduler.capacity:
                            s = self._waiting[0]
                            fits = s.role == first.role and s.room <= scheduler.width - beyond
                            if not s.cancelled and (not fits or self._alone & {s, first}):
                                break
                            self._waiting.popleft()
                            if not s.cancelled:
                                going.append(s)
                                scheduler.add([s])
                    for sequence in scheduler.step():
                        going.remove(sequence)
                        if sequence.finish_reason is not None:
                            sequence.on_end(sequence.completion)
            self._alone.discard(first)
        except Exception as error:  # noqa: BLE001 whoever waits gets it, and the next round begins
            self.engine.release()
            if first in self._alone:
                self._alone.discard(first)
                first.on_end(error)
                return
            self._alone.update(going)
            for sequence in going:
                sequence.row, sequence.finish_reason = None, None
                sequence.tokens, sequence.logprobs = [], []
            with self._changed:
                self._waiting.extendleft(reversed(going))


@dataclass(frozen=True)
class TokenScores:
    """Log-probability of each token of a text given those before it (None for the first), and the most likely tokens at
    each place in descending order (none at the first).
    """

    logprobs: list[float | None]
    likeliest: list[list[tuple[int, float]]]


@torch.inference_mode()
def score(engine: Any, tokens: list[int], *, role: SampledRole, temperature: float, likeliest: int = 1) -> TokenScores:
    """Score tokens under softmax(logits / temperature) by one forward pass."""
    roles, dtype = engine.roles, getattr(engine, "dtype", engine.roles.causal.dtype)
    logprobs, places = list[float | None]([None]), list[list[tuple[int, float]]]([[]])
    ids = torch.tensor([tokens], device=roles.device)
    with roles.acting(role) as model, torch.autocast(roles.device.type, dtype=dtype, enabled=dtype in HALVES):
        states = backbone_of(model)(input_ids=ids).last_hidden_state[0]
        for part, following in zip(states[:-1].split(SCORED), ids[0, 1:].split(SCORED), strict=True):
            log_p = (head_of(model).logits(part).float() / temperature).log_softmax(-1).clamp_min(LEAST)
            logprobs += log_p.gather(1, following.unsqueeze(1)).squeeze(1).tolist()
            most, which = log_p.topk(min(likeliest, log_p.shape[-1]))
            places += [[*zip(*row, strict=True)] for row in zip(which.tolist(), most.tolist(), strict=True)]
    return TokenScores(logprobs, places)


class IncrementalDetokenizer:
    """Text of tokens as they come, handed out once it is whole: half a character waits for its other half."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._before, self._out = 0, 0  # text is decoded from `before`; up to `out` it was handed out

    def add(self, tokens: list[int], *, at_end: bool = False) -> str:
        self._tokens += tokens
        # A tokenizer may join or drop spaces by what stands before, so that is decoded along.
        known, text = (
            str(self._tokenizer.decode(part, skip_special_tokens=True))
            for part in (self._tokens[self._before : self._out], self._tokens[self._before :])
        )
        if len(text) <= len(known) or (text.endswith("\ufffd") and not at_end):  # bytes of half a character
            return ""
        self._before, self._out = self._out, len(self._tokens)
        return text[len(known) :]

    def end(self) -> str:
        return self.add([], at_end=True)
