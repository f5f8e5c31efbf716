"""The benchmark of a GPU: its floor by hand, its slices, and all of its cells on a CPU at tiny shapes."""

import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import parse, problem
from benchmarks.gpu import slices
from benchmarks.gpu.attention import KINDS, tensors
from benchmarks.gpu.cells import Cell, cells, profile_of
from benchmarks.gpu.command import NAMES
from benchmarks.gpu.roofline import Ceilings, floors, sampling_bytes
from benchmarks.gpu.shapes import QWEN, Work, parameters
from benchmarks.gpu.slices import Records, Slice, run_slice
from benchmarks.gpu.table import Results, table
from benchmarks.processes import ROOT, Failed
from benchmarks.sizes import Shape

TOY = Shape("toy", hidden=2, layers=1, intermediate=3, heads=1, kv_heads=1, head_size=2, vocabulary=5)


def test_shapes_are_qwen_s():
    """Weights in matrices by the published counts (in all, and without the embedding): 0.49B, 0.36B; 1.54B, 1.31B;
    3.09B, 2.77B; 7.61B, 6.53B, whose embedding and head are two matrices.
    """
    billions = {shape.name: parameters(shape) / 1e9 for shape in QWEN}
    assert billions == pytest.approx({"0.5b": 0.494, "1.5b": 1.544, "3b": 3.086, "7b": 7.615}, rel=2e-3)


def test_floor_by_hand():
    """One prompt of 4 tokens, two completions of 3; 34 weights in the layer and 10 in the embedding, 2 bytes each.

    A token's key and value are 4 numbers, 8 bytes. At each of three steps 88 bytes of weights and 32 of the prompt; of
    the rows 0, then 1, then 2 tokens each: 2 * 8 * (0 + 1 + 2) = 48.
    """
    work = Work(prompts=1, group=2, prompt=4, new=3)
    assert sampling_bytes(TOY, work) == 3 * (88 + 32) + 48
    assert sampling_bytes(TOY, work, weight=0.5) == 3 * (22 + 32) + 48
    slow_memory = floors(TOY, work, Ceilings(rate=1e9, bandwidth=408.0))
    assert slow_memory["sampling"] == 1.0
    assert slow_memory["bound"] == "bytes"
    slow_products = floors(TOY, work, Ceilings(rate=1128.0, bandwidth=1e9))  # 680 + 120 + 328 (test_floor.py)
    assert slow_products["sampling"] == 1.0
    assert slow_products["bound"] == "arithmetic"
    assert slow_products["step"] == slow_products["sampling"] + slow_products["rest"]
    ppo = floors(TOY, work, Ceilings(rate=1e9, bandwidth=1e9), method="ppo")
    assert ppo["rest"] > 8 * slow_products["rest"] * 1128.0 / 1e9  # prompts are read twice, and eight passes made


@pytest.mark.parametrize("kind", ["packed", "flex"])
def test_attention_of_a_group_is_that_of_padded_rows(kind: str):
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    inputs = tensors(4, 2, 16, 5 + 3 + 6 + 4, device=cpu, dtype=torch.float32)
    ours, padded = (KINDS[name](5, [3, 6, 4], device=cpu)(*inputs) for name in (kind, "padded"))
    assert ours.shape == (18, 4, 16)
    torch.testing.assert_close(ours, padded, atol=1e-5, rtol=1e-5)


def options_of(tmp_path: Path, *, minutes: float = 10.0, again: bool = False) -> Namespace:
    sides = {"peer_python": None, "ppo_peer_python": None}
    return Namespace(out=tmp_path, minutes=minutes, again=again, shapes=["1.5b"], threads=1, **sides)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Replaces the measuring: which cells were asked for; `what` does a cell's work."""

    def replace(what: Callable[[dict[str, Any]], dict[str, Any]]) -> list[str]:
        asked: list[str] = []

        def measure(self: Any, module: str, settings: dict[str, Any], **named: Any) -> dict[str, Any]:
            asked.append(settings["name"])
            return what(settings)

        monkeypatch.setattr(slices.Runner, "measure", measure)
        return asked

    return replace


def named(*names: str, **seconds: float) -> list[Cell]:
    return [Cell(n, "sampling", "sampling", {"name": n}, seconds=seconds.get(n, 1.0)) for n in names]


def test_a_slice_goes_on_where_the_last_one_was(
    tmp_path: Path, measured: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
):
    """One cell fails for good, one is cut by its slice and begins the next one; what is done is not done again."""
    outcomes: dict[str, list[Any]] = {
        "a": [{"seconds": [1.0]}],
        "b": [Failed("b failed", "Traceback\ntorch.OutOfMemoryError: 1 GB")],
        "c": [Failed("too long", "", too_long=True), {"seconds": [3.0]}],
        "d": [{"seconds": [4.0]}],
    }

    def what(settings: dict[str, Any]) -> dict[str, Any]:
        outcome = outcomes[settings["name"]].pop(0)
        if isinstance(outcome, Failed):
            raise outcome
        return outcome

    asked, path, all_cells = measured(what), tmp_path / "cells.jsonl", named("a", "b", "c", "d", d=10000.0)
    seen: list[int] = []

    def run(minutes: float = 10.0) -> tuple[int, int]:
        records = Records(path)
        options = options_of(tmp_path, minutes=minutes)
        return run_slice(all_cells, records, options=options, after_each=lambda: seen.append(len(records.by_name)))

    with monkeypatch.context() as patch:
        patch.setattr(slices, "FULL", 2.0)  # as if the cell that is cut had begun late
        assert run() == (2, 4)
    assert asked == ["a", "b", "c"]  # d would take longer than the slice
    statuses = [json.loads(line)["status"] for line in path.read_text().splitlines()]
    assert statuses == ["done", "failed", "cut"]
    assert seen == [1, 2, 3]
    assert run() == (3, 4)
    assert asked[3:] == ["c"]
    assert run() == (4, 4)  # the first of a slice may take as long as it needs
    assert asked[4:] == ["d"]
    assert run() == (4, 4)
    assert len(asked) == 5
    assert Records(path).by_name["b"]["why"] == "torch.OutOfMemoryError: 1 GB"


def test_a_cell_that_a_whole_slice_is_too_short_for(tmp_path: Path, measured: Callable[..., list[str]]):
    def what(settings: dict[str, Any]) -> dict[str, Any]:
        raise Failed("took longer", "", too_long=True)

    asked, records = measured(what), Records(tmp_path / "cells.jsonl")
    for again in (False, False, True):
        options = options_of(tmp_path, again=again)
        run_slice(named("a"), records, options=options, after_each=lambda: None)
    assert records.by_name["a"]["status"] == "too long"
    assert asked == ["a", "a"]  # at first, and with --again


def test_a_slice_leaves_time_to_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "monotonic", lambda: 130.0)
    assert Slice(60.0, 100.0).left == 60.0 - 30.0 - slices.RESERVE_S


def test_cells_of_the_table():
    """Both sides of everything the table compares; each cell has a name of its own."""
    profile = profile_of(NAMES, device="cuda")
    every = cells(profile)
    names = [each.name for each in every]
    assert len(set(names)) == len(names)
    sampled = [name for name in names if name.startswith("sampling 1.5b")]
    assert sampled == [
        "sampling 1.5b fused", "sampling 1.5b fused without graphs", "sampling 1.5b hf", "sampling 1.5b generate",
        "sampling 1.5b continuous batching",
    ]  # fmt: skip
    four_bit = [each for each in every if each.name.startswith("sampling 7b")]
    assert {each.settings["quantization"] for each in four_bit} == {"4bit"}
    assert not any("fused" in each.name for each in four_bit)
    assert {"grpo 0.5b TRL", "ppo 3b tinyrl", "response length 8192", "group size 64"} <= set(names)
    learnt = [each for each in every if each.section == "learning"]
    assert len(learnt) == 5 * (3 + 2)


def test_the_table_says_what_is_missing():
    profile = profile_of(["tiny"], device="cpu")
    some = [each for each in cells(profile) if each.name in ("sampling tiny fused", "sampling tiny generate")]
    found = {"seconds": [2.0], "tokens": [100], "peak_gb": 0.5, "versions": {"torch": "2"}, "machine": "CPU"}
    records = {"sampling tiny fused": {"status": "done", "result": {**found, "graphs": 3}}}
    text = table(Results(profile, some, records))
    assert "| tiny | tinyrl, fused | 50 | 2.00 | - |" in text
    assert "| sampling tiny generate | not yet |  |" in text
    slower = {"status": "done", "result": {**found, "seconds": [5.0]}}
    text = table(Results(profile, some, {**records, "sampling tiny generate": slower}))
    assert "| tiny | tinyrl, fused | 50 | 2.00 | 2.50 |" in text
    assert "Without a result" not in text


def test_words_of_the_command():
    options = parse(["gpu"])
    assert (options.minutes, options.shapes) == (10.0, NAMES)
    assert problem(options) is None
    assert "by itself" in (problem(parse(["gpu", "--shapes", "tiny", "7b"])) or "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_how_to_try_it(tmp_path: Path):
    done = command("--out", str(tmp_path))
    assert done.returncode == 2
    assert "--shapes tiny" in done.stderr


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "benchmarks", "gpu", "--threads", "1", *words]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_cell_runs_on_a_cpu(tmp_path: Path):
    """Tiny shapes, in two slices."""
    tiny = ["--shapes", "tiny", "--out", str(tmp_path)]
    first = command(*tiny, "--minutes", str((slices.RESERVE_S + 1.0) / 60))
    assert first.returncode == 0, first.stderr[-2000:]
    begun = (tmp_path / "cells.jsonl").read_text()
    done = command(*tiny)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (tmp_path / "cells.jsonl").read_text()
    assert lines.startswith(begun)
    assert len(begun) < len(lines)
    records = [json.loads(line) for line in lines.splitlines()]
    assert {record["status"] for record in records} == {"done"}
    every = [each.name for each in cells(profile_of(["tiny"], device="cpu")) if each.peer is None]
    assert {record["cell"] for record in records} >= set(every)
    text = (tmp_path / "table.md").read_text()
    for row in ("| tiny | tinyrl, fused without graphs |", "| tiny | transformers, continuous batching |", "## PPO"):
        assert row in text
