"""The arithmetic of the benchmarks' tables and of what processes measured, by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.learning import curve_table
from benchmarks.tables import (
    above_imports,
    alternate,
    interval,
    markdown,
    median_phases,
    pooled,
    spread,
    time_ratios,
    versions,
    within,
)


def test_spread_shows_a_range_only_where_there_is_one():
    assert spread([1.5]) == "1.50"
    assert spread([3.0, 1.0, 2.0], digits=1) == "2.0 (1.0-3.0)"


def test_phases_of_steps_that_lack_one():
    assert median_phases([{"a": 1.0, "b": 4.0}, {"a": 3.0}, {"a": 2.0, "b": 2.0}]) == {"a": 2.0, "b": 2.0}


def test_a_table_is_aligned_markdown():
    assert markdown(["x", "y"], [[1, "z"]]) == "| x | y |\n| --- | --- |\n| 1 | z |"


def test_a_table_names_the_peer_with_its_version_and_both_versions_where_sides_differ():
    ours = {"versions": {"tinyrl": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"}}
    peer = {"versions": {"trl": "1.16.0", "torch": "2.13.0", "transformers": "5.20.0"}}
    assert versions([ours, peer]) == "tinyrl 0.1.0, torch 2.13.0, transformers 5.23.0 and 5.20.0, TRL 1.16.0"


def test_token_counts_agree_within_a_twentieth():
    assert within([100, 100], [104, 104])
    assert not within([100, 100], [106, 106])


def test_sides_take_turns():
    calls: list[tuple[str, int]] = []

    def side(name: str):
        def once(pair: int):
            calls.append((name, pair))
            return {"seconds": [float(pair)]}

        return once

    results = alternate({"a": side("a"), "b": side("b")}, 2)
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert results == {name: [{"seconds": [0.0]}, {"seconds": [1.0]}] for name in "ab"}


def test_ratios_are_of_the_medians_of_each_pair():
    peer = [{"seconds": [9.0, 10.0, 50.0]}, {"seconds": [6.0]}]
    ours = [{"seconds": [5.0, 1.0, 4.0]}, {"seconds": [2.0, 4.0]}]
    assert time_ratios(peer, ours) == [2.5, 2.0]
    assert pooled(ours, "seconds") == [5.0, 1.0, 4.0, 2.0, 4.0]


def test_memory_is_above_the_imports_of_each_process():
    assert above_imports([{"peak_mb": 900, "imports_mb": 400}, {"peak_mb": 950, "imports_mb": 410}]) == [500, 540]


def test_interval_of_a_mean_of_four():
    # Mean 2.5, standard deviation sqrt(5/3) = 1.29099, t = 3.182 with three degrees of freedom: 2.5 -+ 2.0540.
    low, high = interval([1.0, 2.0, 3.0, 4.0])
    assert (low, high) == (pytest.approx(0.4460, abs=1e-4), pytest.approx(4.5540, abs=1e-4))


def test_a_curve_is_averaged_over_seeds_and_ten_steps():
    seeds = [{"rewards": [0.0] * 10 + [0.5, 0.7]}, {"rewards": [0.2] * 10 + [0.9, 1.1]}]
    assert curve_table({"ours": seeds}, steps=12) == (
        "| steps | 1-10 | 11-12 |\n| --- | --- | --- |\n| ours | 0.100 | 0.800 |"
    )


def test_the_versions_are_those_that_run_in_a_process(tmp_path: Path):
    """Not of what is installed beside them, nor found later on the path."""
    for folder, version in (("runs", "1.12.0"), ("other", "1.16.0")):
        (tmp_path / folder / f"trl-{version}.dist-info").mkdir(parents=True)
        (tmp_path / folder / f"trl-{version}.dist-info" / "METADATA").write_text(f"Name: trl\nVersion: {version}\n")
        (tmp_path / folder / "trl.py").write_text(f"__version__ = '{version}'\n")
    path = os.pathsep.join([str(tmp_path / "runs"), str(tmp_path / "other"), str(Path(__file__).parents[2])])
    for code, wanted in (("import trl; ", {"trl": "1.12.0"}), ("", {})):
        code += "import json; from benchmarks.measuring import versions; print(json.dumps(versions()))"
        said = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=True
        )
        assert json.loads(said.stdout) == wanted
