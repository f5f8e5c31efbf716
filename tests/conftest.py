"""Fixtures for test modules of several folders: tiny models made once, and the folder of optional real data."""

from pathlib import Path

import pytest

from tests.tiny_models import TinyModels


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))


def shared_data() -> Path | None:
    """The folder of real data beside the repository, or None where there is none."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None
