"""Fixtures for test modules of several folders: tiny models made once, and the folder of optional real data.

Runs inside the test process draw no report at their end (it takes longer than they do) unless a test says
`@pytest.mark.report`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running import draw_reports
from tests.tiny_models import TinyModels

draw_reports(False)


@pytest.fixture(autouse=True)
def _report(request: pytest.FixtureRequest) -> Iterator[None]:
    marked = request.node.get_closest_marker("report") is not None
    draw_reports(marked)
    yield
    draw_reports(False)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))


def shared_data() -> Path | None:
    """The folder of real data beside the repository, or None where there is none."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None
