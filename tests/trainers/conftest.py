"""Fixture: runs in these tests draw no report.

It would take half of their time, and tests/report/ and tests/cli/test_commands.py look at it.
"""

import pytest


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyrl.training.launch.write_report", lambda path: [])
