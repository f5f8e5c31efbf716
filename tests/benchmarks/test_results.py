"""The arithmetic of the benchmarks' tables and of what processes measured, by hand."""

import pytest

from benchmarks.learning import curve_table
from benchmarks.tables import (
    above_imports,
    interval,
    markdown,
    median_phases,
    pooled,
    spread,
    time_ratios,
    versions,
    within,
)


def test_table_cells_by_hand():
    assert (spread([1.5]), spread([3.0, 1.0, 2.0], digits=1)) == ("1.50", "2.0 (1.0-3.0)")
    assert median_phases([{"a": 1.0, "b": 4.0}, {"a": 3.0}, {"a": 2.0, "b": 2.0}]) == {"a": 2.0, "b": 2.0}
    assert markdown(["x", "y"], [[1, "z"]]) == "| x | y |\n| --- | --- |\n| 1 | z |"
    assert (within([100, 100], [104, 104]), within([100, 100], [106, 106])) == (True, False)
    ours = {"versions": {"tinyrl": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"}}
    peer = {"versions": {"trl": "1.16.0", "torch": "2.13.0", "transformers": "5.20.0"}}
    assert versions([ours, peer]) == "tinyrl 0.1.0, torch 2.13.0, transformers 5.23.0 and 5.20.0, TRL 1.16.0"
    seeds = [{"rewards": [0.0] * 10 + [0.5, 0.7]}, {"rewards": [0.2] * 10 + [0.9, 1.1]}]
    assert curve_table({"ours": seeds}, steps=12).splitlines()[-1] == "| ours | 0.100 | 0.800 |"


def test_ratios_memory_and_intervals_by_hand():
    peer = [{"seconds": [9.0, 10.0, 50.0]}, {"seconds": [6.0]}]
    ours = [{"seconds": [5.0, 1.0, 4.0]}, {"seconds": [2.0, 4.0]}]
    assert time_ratios(peer, ours) == [2.5, 2.0]  # of the medians of each pair
    assert pooled(ours, "seconds") == [5.0, 1.0, 4.0, 2.0, 4.0]
    assert above_imports([{"peak_mb": 900, "imports_mb": 400}, {"peak_mb": 950, "imports_mb": 410}]) == [500, 540]
    # Mean 2.5, standard deviation sqrt(5/3) = 1.29099, t = 3.182 with three degrees of freedom: 2.5 -+ 2.0540.
    assert interval([1.0, 2.0, 3.0, 4.0]) == (pytest.approx(0.4460, abs=1e-4), pytest.approx(4.5540, abs=1e-4))
