"""Requests that come while others are being sampled, as those of `serve` and of agents do: a queue before an engine's
scheduler, and the thread that works it off.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from tinyrl.generation.engine import SamplingEngine
from tinyrl.generation.request import DecodedSequence, SampledRole
from tinyrl.models.device import as_out_of_memory
from tinyrl.models.loading import embedding_rows

LIVE_STEP = 1 << 40  # the step in the keys of these samples: no training step reaches it
WIDTHS = 256  # tokens of a row at least

Result = TypeVar("Result")


class LiveScheduler:
    """A queue before an engine's scheduler, and the thread that works it off; max_rows: sequences decoded together.
    Requests to other weights (another role), or for longer rows than there are, wait until those before have ended.
    When sampling fails, each sequence is sampled again alone, so that only those at fault end with the error.

    on_tokens and on_end of a request are called in that thread.
    """

    def __init__(self, engine: SamplingEngine, *, max_rows: int) -> None:
        self.engine = engine
        self.max_rows = max_rows
        self.tokenizer: PreTrainedTokenizerBase = engine.tokenizer
        self.vocabulary = embedding_rows(engine.policy.causal)  # ids that may be read; some have no text
        self._waiting: deque[DecodedSequence] = deque()
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        threads = torch.get_num_threads()  # a thread has a number of its own
        self._thread = threading.Thread(target=self._work, args=[threads], name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, sequences: list[DecodedSequence]) -> None:
        with self._changed:
            self._waiting += sequences
            self._changed.notify()
        if self._closed:
            self._turn_away("the server is closing")

    def run(self, function: Callable[[], Result]) -> Result:
        """Run a function between two rounds; until then the round in hand admits nobody."""
        result: Future[Result] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the scheduler is closed")
            self._jobs.append((function, result))
            self._changed.notify()
        return result.result()

    def release(self) -> None:
        """Free the copies of weights, so that the next round copies them as they then are. Requests that still wait end
        with an error.
        """

        def forget() -> None:
            self._turn_away("the episode is over")
            self.engine.forget()

        self.run(forget)

    def close(self) -> None:
        """End the thread; requests that wait or are being sampled end with an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._turn_away("the server is closing")

    def _turn_away(self, why: str) -> None:
        with self._changed:
            waiting = self._waiting
            self._waiting = deque()
        for sequence in waiting:
            sequence.request.on_end(RuntimeError(why))

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._jobs or self._waiting)
                if self._closed and not self._jobs:
                    return
                job = self._jobs.popleft() if self._jobs else None
                first = self._waiting.popleft() if job is None else None
            if job is not None:
                function, result = job
                try:
                    result.set_result(function())
                except Exception as error:  # noqa: BLE001 raised where the function was handed in
                    result.set_exception(error)
            elif first is not None and not first.cancelled:
                self._round(first)

    def _round(self, first: DecodedSequence) -> None:
        """Sample the first that waits, and those that come until none is left that can join. After an error each is
        sampled alone, and gets the error that it meets there.
        """
        going = [first]
        error = self._try(going, joined=True)
        if error is None:
            return
        if len(going) == 1 or self._closed:
            for sequence in going:
                if not sequence.cancelled:
                    sequence.request.on_end(error)
            return
        for sequence in going:
            sequence.restart()
            if not sequence.cancelled and (error := self._try([sequence], joined=False)) is not None:
                sequence.request.on_end(error)

    def _try(self, going: list[DecodedSequence], *, joined: bool) -> Exception | None:
        """Sample sequences, and with `joined` those that wait; return the error that ended it, if any, with the
        sequences that have not ended left in `going`.
        """
        try:
            self._sample(going, joined=joined)
        except Exception as error:  # noqa: BLE001 whoever waits gets it, and the next round begins
            self.engine.release()
            return error
        return None

    def _sample(self, going: list[DecodedSequence], *, joined: bool) -> None:
        beyond = self.engine.look_every - 1  # a row may run past its end until the next look
        role = going[0].request.role
        with self._changed:
            alike = [s for s in self._waiting if s.request.role == role][: self.max_rows] if joined else []
        room = max(s.room for s in [*going, *alike]) + beyond
        width = max(WIDTHS, 1 << (room - 1).bit_length()) - beyond
        with (
            as_out_of_memory(),
            torch.inference_mode(),
            self.engine.scheduler(role, rows=self.max_rows, width=width, serving=True) as scheduler,
        ):
            scheduler.add([*going])
            while scheduler.busy:
                if self._closed:
                    raise RuntimeError("the server is closing")
                while joined and len(going) < scheduler.capacity:
                    sequence = self._next_that_fits(role, scheduler.width - beyond)
                    if sequence is None:
                        break
                    going.append(sequence)
                    scheduler.add([sequence])
                for sequence in scheduler.step():
                    going.remove(sequence)
                    if sequence.finish_reason is not None:
                        sequence.request.on_end(None)

    def _next_that_fits(self, role: SampledRole, width: int) -> DecodedSequence | None:
        """Take the first that waits from the queue if it can join; None while a job waits for the round to end."""
        with self._changed:
            while self._waiting and not self._jobs:
                first = self._waiting[0]
                if not first.cancelled and (first.request.role != role or first.room > width):
                    return None
                self._waiting.popleft()
                if not first.cancelled:
                    return first
        return None
