"""An endpoint that listens, and an agent's episode; fixtures of tests/generation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.generation.conftest import _seed, live, prefills  # noqa: F401  fixtures
from tinyrl.config.sections import GenerationConfig
from tinyrl.endpoint.agent_episode import AgentEpisode, SideConversations
from tinyrl.endpoint.endpoint import NO_LIMIT, Endpoint
from tinyrl.endpoint.server import Listening
from tinyrl.generation.request import Request


@contextmanager
def listening_to(scheduler: Any, *, positions: int = 128, **options: Any) -> Iterator[Listening]:
    """An endpoint of a policy and its base."""
    given: dict[str, Any] = {"defaults": GenerationConfig(max_new_tokens=12), "variables": {}, **options}
    listening = Listening(Endpoint(scheduler, {"policy": "policy", "base": "base"}, positions=positions, **given))
    try:
        yield listening
    finally:
        listening.stop()


def episode_of(
    tokenizer: Any,
    *,
    left: int = 64,
    call_tokens: int = 64,
    calls: int = 8,
    positions: int = 512,
    side: SideConversations | None = None,
) -> AgentEpisode:
    """An agent's episode that has just begun."""
    return AgentEpisode(
        request=Request([5, 6], np.uint64(5), limit=left),
        left=left,
        call_tokens=call_tokens,
        calls_left=calls,
        tokenizer=tokenizer,
        positions=positions,
        side=side or SideConversations(),
    )


def call_of(prompt: list[int], *, limit: int = NO_LIMIT, stop: list[str] | None = None) -> Request:
    """A call of an agent's, as its endpoint reads it."""
    return Request(prompt, np.uint64(0), limit, stop=stop or [], after="cached")
