"""Fixture: a reported run, made once for all modules that look at it."""

from pathlib import Path

import pytest

from tests.tools.report.runs import grpo_run
from tinyrl.tools.report import write_report


@pytest.fixture(scope="session")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A reported GRPO run and its page."""
    run = grpo_run(tmp_path_factory.mktemp("runs") / "grpo-sorting-1")
    write_report(run)
    return run, (run / "report.html").read_text("utf-8")
