"""An endpoint that listens, and an agent's episode; fixtures of tests/generation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.generation.conftest import _seed, live, prefills  # noqa: F401  fixtures
from tinyrl.endpoint.agent_episode import AgentEpisode
from tinyrl.endpoint.endpoint import Endpoint, Listening
from tinyrl.generation.engine import SamplingParams


@contextmanager
def listening_to(scheduler: Any, *, positions: int = 128, **options: Any) -> Iterator[Listening]:
    """An endpoint of a policy and its base."""
    given: dict[str, Any] = {"defaults": SamplingParams(), "max_new_tokens": 12, "variables": {}, **options}
    listening = Listening(Endpoint(scheduler, {"policy": "policy", "base": "base"}, positions=positions, **given))
    try:
        yield listening
    finally:
        listening.stop()


def episode_of(
    tokenizer: Any, *, left: int = 64, call_tokens: int = 64, calls: int = 8, positions: int = 512
) -> AgentEpisode:
    """An agent's episode that has just begun."""
    return AgentEpisode(
        key=np.uint64(5),
        params=SamplingParams(),
        role="policy",
        left=left,
        call_tokens=call_tokens,
        calls_left=calls,
        tokenizer=tokenizer,
        positions=positions,
        row=0,
    )
