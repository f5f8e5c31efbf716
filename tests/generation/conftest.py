"""Fixtures: the same random numbers for each test of this folder; what the decoder prefills; a scheduler of a chat."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.generation.sampling import TEMPLATE, make_engine
from tests.tiny_models import TinyModels
from tinyrl.generation.agent_episode import AgentEpisode
from tinyrl.generation.decoder import Decoder
from tinyrl.generation.endpoint import Endpoint, Listening
from tinyrl.generation.engine import SamplingParams
from tinyrl.generation.library_decoder import LibraryDecoder
from tinyrl.generation.scheduler import LiveScheduler


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """The lengths of texts as they are prefilled: whole, or behind what a row has in the cache."""
    seen: list[tuple[str, list[int]]] = []
    for decoder, name in product((Decoder, LibraryDecoder), ("prefill", "extend")):
        method: Any = getattr(decoder, name)

        def noted(self: Any, ids: Any, lengths: Any, *rest: Any, name: str = name, method: Any = method, **named: Any):
            seen.append((name, lengths.tolist()))
            return method(self, ids, lengths, *rest, **named)

        monkeypatch.setattr(decoder, name, noted)
    return seen


@pytest.fixture(scope="module")
def live(tiny: TinyModels) -> Iterator[LiveScheduler]:
    engine = make_engine(tiny("llama"), "fused", lora=True)
    engine.tokenizer.chat_template = TEMPLATE
    scheduler = LiveScheduler(engine, max_rows=4)
    yield scheduler
    scheduler.close()


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
