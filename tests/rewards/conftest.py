"""What the tests of judges share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.rewards.judge_server import Judge


@pytest.fixture
def serving() -> Iterator[Callable[..., Judge]]:
    judges: list[Judge] = []
    yield lambda reply: judges.append(Judge(reply)) or judges[-1]
    for judge in judges:
        judge.close()
