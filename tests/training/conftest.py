"""The small model that most tests of this folder train, and servers that are not waited for."""

from pathlib import Path

import pytest

from tests.tiny_models import TinyModels
from tinyrl.data import http_client


@pytest.fixture(scope="session")
def model(tiny: TinyModels) -> Path:
    return tiny("llama")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyrl.generation.server.WAITS_S", (0.01, 0.01))
    monkeypatch.setattr(http_client, "POLL_S", 0.02)
