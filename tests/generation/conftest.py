"""Fixtures: the same random numbers for each test of this folder; what the decoder prefills; a scheduler of a chat."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from tests.generation.sampling import TEMPLATE, make_engine
from tests.tiny_models import TinyModels
from tinyrl.generation.decoder import Decoder
from tinyrl.generation.library_decoder import LibraryDecoder
from tinyrl.generation.live import LiveScheduler


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
