"""The tiny model that these runs train, made once."""

from pathlib import Path

import pytest

from tests.tiny_models import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")
