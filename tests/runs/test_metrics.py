"""The table of metrics: each statistic of rewards has its line, and what a chart says is found by any of its keys."""

import re
from pathlib import Path

import pytest

import tinyrl
from tinyrl.runs.metrics import TABLE, meaning_of

SOURCES = [path for path in Path(tinyrl.__file__).parent.rglob("*.py") if path.name != "metrics.py"]


def test_every_statistic_of_rewards_that_the_code_writes_has_a_line() -> None:
    """Without one it would be drawn, and compared, as a reward function of that name."""
    written = {key for path in SOURCES for key in re.findall(r'"(reward/[a-z_]+)"', path.read_text(encoding="utf-8"))}
    assert "reward/zero_spread_kept" in written
    assert written <= {metric.key for metric in TABLE}


def test_no_two_lines_have_the_same_key() -> None:
    keys = [metric.key for metric in TABLE]
    assert len(keys) == len({*keys})


@pytest.mark.parametrize("key", ["loss", "eval/loss", "preference/loss"])
def test_a_loss_is_explained_under_each_of_its_keys(key: str) -> None:
    assert meaning_of(key).startswith("What is minimised. Healthy:")


def test_an_unknown_metric_has_no_meaning() -> None:
    assert meaning_of("reward/lengths") == ""
