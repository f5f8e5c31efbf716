"""The arithmetic of the benchmark's tables, by hand."""

import pytest

from tests.benchmarks.same_work import within
from tests.benchmarks.tables import exponent, markdown, median_phases, spread


def test_exponent_of_a_power_law():
    assert exponent([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2.0)
    assert exponent([10, 1000], [5, 5]) == pytest.approx(0.0)


def test_spread_shows_a_range_only_where_there_is_one():
    assert spread([1.5]) == "1.50"
    assert spread([3.0, 1.0, 2.0], digits=1) == "2.0 (1.0-3.0)"


def test_phases_of_steps_that_lack_one():
    assert median_phases([{"a": 1.0, "b": 4.0}, {"a": 3.0}, {"a": 2.0, "b": 2.0}]) == {"a": 2.0, "b": 2.0}


def test_a_table_is_aligned_markdown():
    assert markdown(["x", "y"], [[1, "z"]]) == "| x | y |\n| --- | --- |\n| 1 | z |"


def test_token_counts_agree_within_a_twentieth():
    assert within([100, 100], [104, 104])
    assert not within([100, 100], [106, 106])
