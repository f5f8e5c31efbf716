"""Fixtures for test modules of several folders: tiny models made once, and the folder of optional real data.

Nothing here imports torch before a test does: of `pytest -n 2` three processes read this file, and one runs no test.
Runs inside the test process draw no report (it takes longer than they do) and wait for no disk (hundreds of runs flush
some forty times each, of 2 to 10 ms) unless a test is marked `@pytest.mark.whole`.
Tests compute with one thread, as tiny models are slower with two, and several tests run at a time.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from tinyrl.tasks.own import close_workers

gc.disable()  # until all is imported: each collection would look through all objects of the libraries

if TYPE_CHECKING:
    from tests.tiny_models import TinyModels


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test marked `wide`, the first is fast, and stands for the others in a newcomer's check. A case
    that is marked itself is slow.
    """
    seen = set[tuple[Path, str]]()
    for item in items:
        if item.get_closest_marker("wide") is None or item.get_closest_marker("slow") is not None:
            continue
        name = (item.path, item.name.partition("[")[0])
        call = getattr(item, "callspec", None)
        is_marked_itself = call is not None and any(mark.name == "wide" for mark in call.marks)
        if name in seen or is_marked_itself:
            item.add_marker("slow")
        seen.add(name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Before the first test: never collect garbage among the libraries' objects, and fork the server of children."""
    gc.freeze()
    gc.enable()
    children = sys.modules.get("tests.faults.children")
    if children is not None and not session.config.option.collectonly:
        children.start_server()


@pytest.fixture(autouse=True)
def _whole(request: pytest.FixtureRequest) -> Iterator[None]:
    from tests.running import wait_for_disk, whole_runs

    marked = request.node.get_closest_marker("whole") is not None
    whole_runs(marked)
    wait_for_disk(marked)
    yield
    whole_runs(False)
    wait_for_disk(False)


@pytest.fixture(autouse=True)
def _no_workers() -> Iterator[None]:
    """Leave no worker of an own task to the next test, which may count those that are left."""
    yield
    close_workers()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    from tests.tiny_models import TinyModels

    return TinyModels(tmp_path_factory.mktemp("tiny"))


def shared_data() -> Path | None:
    """The folder of real data beside the repository, or None where there is none."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None
