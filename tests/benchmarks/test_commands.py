"""The benchmarks' commands: what they refuse, and that those without a peer run from the repository alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import COMMANDS, parse, problem
from benchmarks.processes import ROOT


def test_what_cannot_be_measured_is_refused():
    for what in (name for name, command in COMMANDS.items() if command.needs_a_peer):
        assert "--peer-python" in (problem(parse([what])) or "")
        assert problem(parse([what, "--peer-python", "python", "--real-model", "smollm2"])) is None
    assert "warm-up" in (problem(parse(["gpu", "--steps", "1"])) or "")
    assert "at most 10" in (problem(parse(["learning", "--peer-python", "python", "--pairs", "11"])) or "")


@pytest.mark.slow
def test_cells_of_a_gpu_are_measured_once_and_what_failed_is_tried_again(tmp_path: Path):
    """All cells at a tiny shape on a CPU; a second call has nothing left."""
    command = [sys.executable, "-m", "benchmarks", "gpu", "--shapes", "tiny", "--threads", "1", "--out", str(tmp_path)]
    words = [*command, "--only", "sampling"]
    broken = {"cell": "sampling tiny fused", "status": "failed", "why": "no reason"}
    (tmp_path / "cells.jsonl").write_text(json.dumps(broken) + "\n")
    for expected in (3, 0):
        before = len((tmp_path / "cells.jsonl").read_text().splitlines())
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        after = (tmp_path / "cells.jsonl").read_text().splitlines()
        assert len(after) - before == expected
    last = {record["cell"]: record for record in map(json.loads, after)}
    assert {record["status"] for record in last.values()} == {"done"}
    assert "tokens a second" in (tmp_path / "table.md").read_text()
