"""Cells of `benchmarks gpu` on a CPU: their order, what a variant has to equal, and that all of them run."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks import processes
from benchmarks.__main__ import main, parse
from benchmarks.gpu import attention, command, decode, pointwise, profiling, variants
from benchmarks.gpu.command import Cell, cells, left_of, read_records, record_of, show
from benchmarks.gpu.table import table
from benchmarks.work import prepare

HAS_TRITON = variants.has_triton()
THREADS = ["--threads", "1"]


def tiny_cells(out: Path, *words: str) -> list[Cell]:
    return cells(parse(["gpu", "--shapes", "tiny", *THREADS, "--out", str(out), *words]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model."""
    out = tmp_path_factory.mktemp("gpu")
    options = parse(["gpu", "--shapes", "tiny", *THREADS, "--out", str(out)])
    plan = command.ON_A_CPU
    prepare(command.SHAPES["tiny"], options=options, words=(plan.prompt_tokens, plan.prompt_tokens))
    return out


def settings_of(folder: Path, name: str, *, dtype: str = "float32") -> dict[str, Any]:
    """Settings of the cell of this name as a process gets them, in a dtype."""
    cell = next(cell for cell in tiny_cells(folder) if cell.name == name)
    settings = json.loads(json.dumps(cell.settings))
    settings["recipe"]["model"]["dtype"] = dtype
    return {**settings, "threads": 1, "folder": str(folder / "here" / name.replace(" ", "-")), "repeats": 1}


# ---- the list ----


def test_the_first_cells_of_a_card_are_those_that_choose(tmp_path: Path):
    names = [cell.name for cell in cells(parse(["gpu", "--real-model", "smollm2", "--out", str(tmp_path)]))]
    assert names[:8] == [
        "tests, quick half",
        "profile 0.5b",
        "head 0.5b",
        "attention 0.5b",
        "pointwise 0.5b",
        "decode 0.5b",
        "drawing 0.5b",
        "real model, bfloat16, seed 0",
    ]
    assert len(names) == len(set(names))


def test_the_first_cells_fit_into_ten_minutes(tmp_path: Path):
    first = cells(parse(["gpu", "--real-model", "smollm2", "--out", str(tmp_path)]))[:8]
    assert sum(cell.minutes for cell in first) <= 9.0


def test_a_peer_has_the_tokens_of_our_micro_batches(tmp_path: Path):
    """Rows of 256 and 256 tokens: 16 of them are 8,192, and 64 are 32,768."""
    found = {cell.name: cell.settings for cell in cells(parse(["gpu", "--peer-python", "python", "--out", "x"]))}
    for tokens, rows in (("8,192", 16), ("32,768", 64)):
        ours = found[f"grpo 0.5b tinyrl, micro-batches of {tokens} tokens"]
        theirs = found[f"grpo 0.5b TRL, micro-batches of {tokens} tokens"]
        assert ours["overrides"] == [f"run.micro_batch_tokens={tokens.replace(',', '')}"]
        assert theirs["micro_batch"] == rows


def test_what_is_done_is_not_left_and_what_was_tried_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TINYRL_REAL_MODEL", raising=False)
    every = tiny_cells(tmp_path, "--only", "head", "attention", "decode", "real")
    records = {
        "head tiny": {"cell": "head tiny", "status": "wrong"},
        "decode tiny": {"cell": "decode tiny", "status": "done"},
    }
    assert [cell.name for cell in left_of(every, records)] == ["attention tiny", "head tiny"]
    lines = show(every, records).splitlines()
    assert [line.split("min")[1].strip() for line in lines[:2]] == ["attention tiny", "head tiny"]
    assert "needs --real-model" in lines[-1]


# ---- running them ----


def test_a_call_measures_what_is_left_each_with_its_line_and_the_next_call_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Three cells, of which one failed before, one fails now, and one is done."""
    path = tmp_path / "cells.jsonl"
    path.write_text(json.dumps({"cell": "decode tiny", "status": "failed", "why": "no reason"}) + "\n")
    lines: list[int] = []

    def run(script: str, settings: dict[str, Any], **options: Any) -> dict[str, Any]:
        if script == "work":
            return {}
        lines.append(len(path.read_text().splitlines()))
        if settings["kind"] == "sample" and len(lines) == 1:
            raise processes.Failed("it failed", "the end")
        if settings["kind"] == "sample":
            return {"seconds": [2.0], "tokens": [6], "peak_gb": 1.5, "adapter": "a path"}
        return {"rows": {}, "wrong": {}, "skipped": {"a": "no card"}}

    monkeypatch.setattr(processes, "run", run)
    words = ["gpu", "--shapes", "tiny", "--out", str(tmp_path), "--only", "decode", "sampling tiny fused"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    main()
    assert lines == [1, 2, 3]
    records = read_records(path)
    statuses = {name: record["status"] for name, record in records.items()}
    assert statuses == {
        "decode tiny": "done",
        "sampling tiny fused": "failed",
        "sampling tiny fused without graphs": "done",
    }
    assert records["sampling tiny fused without graphs"]["result"] == {"seconds": [2.0], "tokens": [6], "peak_gb": 1.5}
    assert "| sampling tiny fused without graphs | 3 | 1.5 |" in (tmp_path / "table.md").read_text()
    main()
    assert lines == [1, 2, 3, 4]  # the one that failed
    main()
    assert lines == [1, 2, 3, 4]


def test_a_cell_whose_estimate_does_not_fit_is_left_for_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of 1.9 minutes a quarter of one is kept to end in: 1.5 minutes fit, and 1.7 do not."""
    started: list[str] = []

    def run(script: str, settings: dict[str, Any], **options: Any) -> dict[str, Any]:
        started.append(settings.get("kind", script))
        return {"parts": {}}

    monkeypatch.setattr(processes, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = ["gpu", "--out", str(tmp_path), "--minutes", "1.9", "--only", "profile", "1.5b"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    main()
    assert started == ["work", "profile"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention tiny", "pointwise tiny", "offload tiny", "decode tiny"])
def test_a_variant_equals_todays_path_in_float32(folder: Path, name: str):
    """Log-probabilities, gradients of all LoRA matrices, or states: to 1e-4 of a float32 pass."""
    result = variants.measure(settings_of(folder, name))
    assert not result["wrong"]
    assert not result["skipped"]
    assert len(result["rows"]) == (3 if name == "attention tiny" else 2)
    for row in result["rows"].values():
        assert max(row["gaps"].values()) <= 1e-4
        assert all(timing["seconds"] for timing in row["parts"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["head tiny", "drawing tiny"])
def test_kernels_equal_todays_path_or_are_skipped_with_a_reason(folder: Path, name: str):
    """In a process of its own: triton's interpreter is chosen when triton is first imported."""
    options = parse(["gpu", "--shapes", "tiny", *THREADS, "--out", str(folder)])
    result = processes.run("gpu.runs", settings_of(folder, name), options=options)
    assert not result["wrong"]
    variant = "one pass" if name == "head tiny" else "two levels"
    assert (variant in result["rows"]) == HAS_TRITON
    assert result["skipped"] == ({} if HAS_TRITON else {variant: "triton is not installed"})


def shifted_keys() -> AbstractContextManager[Any]:
    """Ragged attention in which each row reads the key before its own last one twice."""
    right = attention.GatheredKeys.__init__

    def wrong(self: attention.GatheredKeys, packing: Any) -> None:
        right(self, packing)
        ends = self.rows.cu_k[1:].long() - 1
        self.keys[ends] = self.keys[(ends - 1).clamp(min=0)]

    return patch.object(attention.GatheredKeys, "__init__", wrong)


def one_entry_short() -> AbstractContextManager[Any]:
    """Flash decoding in which a row does not see the key that it has just written."""
    right = decode.flash.forward

    def wrong(*tensors: Any, lengths: torch.Tensor, **options: Any) -> Any:
        return right(*tensors, lengths=lengths - 1, **options)

    return patch.object(decode.flash, "forward", wrong)


def without_the_mean() -> AbstractContextManager[Any]:
    """A backward pass of the norm that leaves out its second term."""

    def wrong(dh: Any, x: Any, r: Any, weight: Any, residual: Any) -> Any:
        dx = dh.float() * weight.float() * r
        return (dx if residual is None else dx + residual.float()).to(x.dtype)

    return patch.object(pointwise, "frozen_norm_backward", wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variant", "fault"),
    [
        ("attention tiny", "one ragged call", shifted_keys),
        ("decode tiny", "each row's length", one_entry_short),
        ("pointwise tiny", "fused", without_the_mean),
    ],
)
def test_a_wrong_variant_is_named_with_its_gap_and_not_timed(folder: Path, name: str, variant: str, fault: Any):
    """In bfloat16, where the right one is as far from float32 as today's path."""
    settings = settings_of(folder, name, dtype="bfloat16")
    assert variant in variants.measure(settings)["rows"]
    with fault():
        result = variants.measure(settings)
    assert variant not in result["rows"]
    assert list(result["wrong"]) == [variant]
    cell = next(cell for cell in tiny_cells(folder) if cell.name == name)
    record = record_of(cell, result)
    assert record["status"] == "wrong"
    assert variant in record["why"]
    assert "**wrong**" in table([cell], {cell.name: record})


@pytest.mark.slow
def test_a_profile_has_kernels_launches_and_gaps_of_each_part(folder: Path):
    parts = profiling.measure(settings_of(folder, "profile tiny", dtype="bfloat16"))["parts"]
    assert len(parts) == 6
    for part in parts.values():
        assert part["launches"] > 0
        assert 0 < part["busy"] <= part["seconds"]
        assert part["kernels"][0][1] >= part["kernels"][-1][1]
    tokens = parts["25 tokens a row, then"]
    assert tokens["launches_a_layer"] == pytest.approx(tokens["launches"] / (2 * 25))
    cell = next(cell for cell in tiny_cells(folder) if cell.name == "profile tiny")
    assert "aten::" in table([cell], {cell.name: {"status": "done", "result": {"parts": parts}}})


def test_busy_seconds_count_what_overlaps_once():
    """[0, 2] and [1, 3] are 3 seconds, [5, 6] one more; the one inside the first adds nothing."""
    spans = [profiling.Span(name, start, end) for name, start, end in (("a", 5, 6), ("b", 0, 2), ("a", 1, 3))]
    assert profiling.busy_seconds([*spans, profiling.Span("c", 0.5, 1)]) == 4
    assert profiling.by_name(spans) == [("a", 3, 2), ("b", 2, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo tiny tinyrl, in 4 bits", "sampling tiny fused without graphs"])
def test_a_cell_runs_in_a_process_of_its_own(folder: Path, name: str):
    pytest.importorskip("bitsandbytes")
    options = parse(["gpu", "--shapes", "tiny", *THREADS, "--out", str(folder)])
    cell = next(cell for cell in cells(options) if cell.name.startswith(name))
    record = command.measure_cell(cell, command.ON_A_CPU, options, timeout=900)
    assert record["status"] == "done", record
    assert len(record["result"]["seconds"]) == command.ON_A_CPU.repeats


@pytest.mark.release
@pytest.mark.real
def test_the_real_model_cell_runs(tmp_path: Path):
    options = parse(["gpu", "--shapes", "tiny", *THREADS, "--out", str(tmp_path)])
    cell = next(cell for cell in cells(options) if cell.section == "real")
    if cell.needs is not None:
        pytest.skip("TINYRL_REAL_MODEL names no folder; python examples/smollm2.py makes one")
    record = command.measure_cell(cell, command.ON_A_CPU, options, timeout=900)
    assert record["status"] == "done", record
    assert 0 <= record["result"]["before"] <= 1
