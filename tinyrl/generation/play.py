"""Episodes of several turns through a scheduler: when a turn has ended the environment answers, and the next begins."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tinyrl.generation.drawing import advanced
from tinyrl.generation.request import DecodedSequence, Request
from tinyrl.process.signals import check_stop

if TYPE_CHECKING:
    from tinyrl.generation.engine import BatchScheduler
    from tinyrl.generation.scheduler import Scheduler
    from tinyrl.generation.turns import Episodes


class Play:
    """One episode for each request, whose limit does not count: `episodes` says how long a turn may be.

    A turn is a sequence of its own, so that nothing of the text before it can end it; a scheduler with a cache of rows
    holds its row meanwhile, and prefills the reply only. last: the last turn of each episode; numbers: the episodes of
    turns under way; unanswered: how many wait for the environment.
    """

    def __init__(self, requests: list[Request], *, episodes: Episodes, scheduler: Scheduler | BatchScheduler) -> None:
        self.requests = requests
        self.episodes = episodes
        self.scheduler = scheduler
        self.last: list[DecodedSequence] = []
        self.numbers: dict[DecodedSequence, int] = {}
        self.unanswered = 0

    def run(self, *, overlaps: bool) -> None:
        """Play to the end. overlaps: turns go on while others wait for the environment."""
        self.begin()
        while self.scheduler.busy or self.unanswered:
            check_stop()
            stalled = self.scheduler.stalled
            if stalled or overlaps:
                for number, answer in self.episodes.answers(wait=stalled):
                    self.resume(number, answer)
            for turn in self.scheduler.step():
                self.unanswered += 1
                self.episodes.ended(self.numbers.pop(turn), turn)

    def begin(self) -> None:
        """Begin the first turn of every episode."""
        for number, request in enumerate(self.requests):
            first = replace(request, limit=self.episodes.limit(number), after="held")
            self.last.append(DecodedSequence(first))
        self.numbers = {turn: number for number, turn in enumerate(self.last)}
        self.scheduler.add(self.last)

    def resume(self, number: int, answer: list[int] | None) -> None:
        """Begin an episode's next turn behind an answer, or free its row if it is over. Token t of the whole response
        is drawn by the request's random number t.
        """
        self.unanswered -= 1
        before = self.last[number]
        if answer is None:
            self.scheduler.drop(before)
            return
        request = self.requests[number]
        response = self.episodes.samples[number].response
        [key] = advanced(np.array([request.key]), np.array([len(response)]))
        continued = replace(
            request,
            prompt=[*request.prompt, *response],
            key=key,
            limit=self.episodes.limit(number),
            after="held",
        )
        turn = DecodedSequence(continued, row=before.row)
        self.last[number] = turn
        self.numbers[turn] = number
        self.scheduler.add([turn])
