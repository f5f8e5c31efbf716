"""Fixtures: the same random numbers for each test of this folder; what the decoder prefills."""

from typing import Any

import pytest
import torch

from tinyrl.generation.decoder import Decoder


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """The lengths of texts as they are prefilled: whole, or behind what a row has in the cache."""
    seen: list[tuple[str, list[int]]] = []
    for name in ("prefill", "extend"):
        method: Any = getattr(Decoder, name)

        def noted(self: Any, ids: Any, lengths: Any, *rest: Any, name: str = name, method: Any = method, **named: Any):
            seen.append((name, lengths.tolist()))
            return method(self, ids, lengths, *rest, **named)

        monkeypatch.setattr(Decoder, name, noted)
    return seen
