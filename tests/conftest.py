"""What test modules of several folders share: tiny models made once, and where optional real data lies."""

from pathlib import Path

import pytest

from tests.tiny_models import TinyModels


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))


def shared_data() -> Path | None:
    """The folder of real data beside the repository, or None where a clone stands alone."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None
