"""Episodes of several turns for the tests of this folder: scripted answers, and the plain way to play."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from tests.generation.sampling import Engine
from tinyrl.generation.engine import Completion, FinishReason, Request, Response
from tinyrl.generation.turns import play_plainly

Answer = tuple[int, list[int] | None]
Respond = Callable[[int, list[list[int]]], list[int] | None]
TURNS, BUDGET, LONGEST = 3, 20, 9  # of an episode: turns, tokens chosen in all; tokens of an answer


def echo(sample: int, turns: list[list[int]]) -> list[int] | None:
    """A function of what was said: 0 to LONGEST tokens; about one episode in eight ends before its last turn."""
    number = sum((i + 1) * t for i, t in enumerate(turns[-1])) + 31 * len(turns)
    return None if number % 8 == 7 else [(number + 7 * i) % 200 + 2 for i in range(number % (LONGEST + 1))]


class Scripted:
    """Answers `respond(sample, turns so far)` as soon as it is asked; over after TURNS turns or BUDGET tokens."""

    max_episode_tokens = BUDGET + (TURNS - 1) * LONGEST

    def __init__(self, respond: Respond = echo, *, limits: tuple[int, ...] = (5, 9, 3, 20, 12)) -> None:
        self.respond, self.limits = respond, limits
        self.restarts = 0
        self.log: list[tuple[str, int]] = []

    def restart(self) -> None:
        self.restarts += 1
        self.responses: defaultdict[int, Response] = defaultdict(Response)
        self.turns: dict[int, list[list[int]]] = {}
        self.reasons: dict[int, list[FinishReason]] = {}
        self.ready: list[Answer] = []

    def limit(self, sample: int) -> int:
        said = sum(len(turn) for turn in self.turns.get(sample, []))
        return min(self.limits[(sample + len(self.turns.get(sample, []))) % len(self.limits)], BUDGET - said)

    def ended(self, sample: int, turn: Completion) -> None:
        turns = self.turns.setdefault(sample, [])
        turns.append(turn.tokens)
        self.responses[sample].add(turn.tokens, turn.logprobs)
        self.reasons.setdefault(sample, []).append(turn.finish_reason)
        self.log.append(("ended", sample))
        over = len(turns) == TURNS or sum(map(len, turns)) == BUDGET
        self.answered(sample, None if over else self.respond(sample, list(turns)))

    def answered(self, sample: int, tokens: list[int] | None) -> None:
        self.ready.append((sample, tokens))

    def answers(self, *, wait: bool) -> list[Answer]:
        assert self.ready or not wait, "waiting for answers that never come"
        came, self.ready = self.ready, []
        self.log += [("answered", sample) for sample, _ in came]
        return self.read(came)

    def read(self, came: list[Answer]) -> list[Answer]:
        for sample, tokens in came:
            self.responses[sample].add(tokens or [])
        return came

    def completions(self, group: int) -> list[list[Completion]]:
        said = [self.responses[i] for i in range(len(self.responses))]
        flat = [Completion(r.tokens, r.logprobs, self.reasons[i][-1], r.action_mask) for i, r in enumerate(said)]
        return [flat[i : i + group] for i in range(0, len(flat), group)]


class Delayed(Scripted):
    """Each answer comes after a few polls, or when waited for, in an order of its own."""

    def restart(self) -> None:
        super().restart()
        self.random = random.Random(0)

    def answers(self, *, wait: bool) -> list[Answer]:
        assert self.ready or not wait
        come = [i for i in range(len(self.ready)) if self.random.random() < 0.15]
        come = come or ([self.random.randrange(len(self.ready))] if wait else [])
        self.random.shuffle(come)
        answers = [self.ready[i] for i in come]
        self.ready = [answer for i, answer in enumerate(self.ready) if i not in come]
        return self.read(answers)


def plain(
    engine: Engine, requests: list[Request], group: int, answer: Scripted, **options: Any
) -> list[list[Completion]]:
    """Each turn sampled anew from its whole prefix, all of a turn before the next; answers come at once."""
    key: Any = {"seed": 0, "step": 0, **options}
    play_plainly(requests, group, engine=engine, episodes=answer, options=key)  # pyright: ignore[reportArgumentType]
    return answer.completions(group)
