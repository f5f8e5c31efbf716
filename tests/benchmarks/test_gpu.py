"""The benchmark of a GPU: its floor by hand, its slices, and all of its cells on a CPU at tiny shapes."""

import json
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from benchmarks.__main__ import parse, problem
from benchmarks.gpu import slices
from benchmarks.gpu.attention import KINDS, tensors
from benchmarks.gpu.cells import Cell, cells, profile_of
from benchmarks.gpu.command import BEGIN, END, NAMES, write_into
from benchmarks.gpu.roofline import Ceilings, floors, sampling_bytes
from benchmarks.gpu.shapes import DEVIATION, QWEN, TINY, Work, parameters, sharpen
from benchmarks.gpu.slices import Records, Slice, run_slice
from benchmarks.gpu.suite import outcomes
from benchmarks.gpu.table import Results, table
from benchmarks.processes import ROOT, Failed, module_path
from benchmarks.sizes import FIRST_WORD, Shape
from tests.tiny_models import TinyModels
from tinyrl.models.loading import load_tokenizer

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


def options_of(tmp_path: Path, *, minutes: float = 10.0, again: bool = False, **others: Any) -> Namespace:
    words = ["gpu", "--out", str(tmp_path), "--minutes", str(minutes), "--shapes", "1.5b", *(["--again"] * again)]
    options = parse(words)
    options.real_model = None
    vars(options).update(others)
    return options


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


def statuses(path: Path) -> list[tuple[str, str]]:
    return [(line["cell"], line["status"]) for line in map(json.loads, path.read_text().splitlines())]


def test_a_slice_goes_on_where_the_last_one_was(
    tmp_path: Path, measured: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
):
    """One cell is cut by its slice and begins the next one; one fails, and is tried again after what is new, once a
    slice; what is done is not done again.
    """
    memory = Failed("b failed", "Traceback\ntorch.OutOfMemoryError: 1 GB")
    outcomes: dict[str, list[Any]] = {
        "a": [{"seconds": [1.0]}],
        "b": [memory, memory, {"seconds": [2.0]}],
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

    def run() -> None:
        records = Records(path, "GPU")
        after = lambda: seen.append(len(records.by_name))  # noqa: E731
        assert run_slice(all_cells, records, options=options_of(tmp_path), after_each=after)

    with monkeypatch.context() as patch:
        patch.setattr(slices, "FULL", 2.0)  # as if the cell that is cut had begun late
        run()
    assert asked == ["a", "b", "c"]  # d would take longer than the slice
    assert statuses(path) == [("a", "done"), ("b", "failed"), ("c", "cut")]
    assert seen == [1, 2, 3]
    assert Records(path, "GPU").by_name["b"]["why"] == "torch.OutOfMemoryError: 1 GB"
    run()
    assert asked[3:] == ["c", "b"]
    run()
    assert asked[5:] == ["d", "b"]  # the first of a slice may take as long as it needs
    run()
    assert len(asked) == 7


def test_a_cell_that_a_whole_slice_is_too_short_for(tmp_path: Path, measured: Callable[..., list[str]]):
    def what(settings: dict[str, Any]) -> dict[str, Any]:
        raise Failed("took longer", "", too_long=True)

    asked, records = measured(what), Records(tmp_path / "cells.jsonl", "GPU")
    for again in (False, False, True):
        options = options_of(tmp_path, again=again)
        run_slice(named("a"), records, options=options, after_each=lambda: None)
    assert records.by_name["a"]["status"] == "too long"
    assert asked == ["a", "a"]  # at first, and with --again


def test_cells_that_fail_alike_end_the_slice(tmp_path: Path, measured: Callable[..., list[str]]):
    """A machine on which nothing works does not cost its minutes; failures of different kinds do not end one."""

    def what(settings: dict[str, Any]) -> dict[str, Any]:
        raise Failed("failed", "ModuleNotFoundError: pydantic" if settings["name"] > "b" else settings["name"])

    asked, records = measured(what), Records(tmp_path / "cells.jsonl", "GPU")
    every = named("a", "b", "c", "d", "e", "f")
    assert not run_slice(every, records, options=options_of(tmp_path), after_each=lambda: None)
    assert asked == ["a", "b", "c", "d", "e"]


def test_what_needs_something_that_is_not_there_is_skipped_until_it_is(
    tmp_path: Path, measured: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(slices, "_asked", {})
    asked, path = measured(lambda settings: {}), tmp_path / "cells.jsonl"
    with_peer = Cell("peer", "ppo", "peers", {"name": "peer"}, peer="peer_of_a_test.ppo")
    real = Cell("real", "real", "real", {"name": "real"}, needs="real_model")
    records = Records(path, "GPU")
    for _ in range(2):
        records = Records(path, "GPU")
        assert run_slice([with_peer, real], records, options=options_of(tmp_path), after_each=lambda: None)
    assert statuses(path) == [("peer", "skipped"), ("real", "skipped")]  # said once
    assert "peer_of_a_test.ppo is not installed" in records.by_name["peer"]["why"]
    assert records.by_name["real"]["why"] == "needs --real-model"
    (tmp_path / "front" / "peer_of_a_test").mkdir(parents=True)
    (tmp_path / "front" / "peer_of_a_test" / "ppo.py").touch()
    there = options_of(tmp_path, ppo_peer_path=str(tmp_path / "front"), real_model=tmp_path)
    run_slice([with_peer, real], Records(path, "GPU"), options=there, after_each=lambda: None)
    assert asked == ["peer", "real"]


def test_another_gpu_begins_anew_and_what_is_done_stays_done(tmp_path: Path):
    path, [cell] = tmp_path / "cells.jsonl", named("a")
    Records(path, "H100").add({"cell": "a", "status": "done", "result": {}})
    Records(path, "H100").add({"cell": "a", "status": "failed", "why": "later"})
    assert Records(path, "H100").left([cell], again=True) == []
    assert Records(path, "H200").left([cell], again=False) == [cell]


def test_processes_have_this_checkout_and_the_packages_of_this_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A bare machine keeps them in a folder; another Python has its own, and a process begins elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"packages:{ROOT}")
    packages = str(tmp_path / "packages")
    assert module_path(sys.executable) == f"{ROOT}:{packages}"
    assert module_path(sys.executable, before=["other"]) == f"{ROOT}:{tmp_path / 'other'}:{packages}"
    assert module_path("/other/bin/python") == str(ROOT)


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
        "sampling 1.5b fused", "sampling 1.5b hf", "sampling 1.5b continuous batching", "sampling 1.5b vLLM",
        "sampling 1.5b generate", "sampling 1.5b fused without graphs",
    ]  # fmt: skip
    four_bit = [each for each in every if each.name.startswith("sampling 7b")]
    assert {each.settings["quantization"] for each in four_bit} == {"4bit"}
    assert not any("fused" in each.name for each in four_bit)
    assert {"grpo 0.5b TRL", "ppo 3b tinyrl", "response length 8192", "group size 64"} <= set(names)
    learnt = [each for each in every if each.section == "learning"]
    assert len(learnt) == 5 * (3 + 2)


def test_half_an_hour_has_some_of_each_kind():
    """By the seconds that cells are said to take: where the two peers are not both installed, more fits."""
    seconds, begun = 0.0, list[str]()
    for each in cells(profile_of(["1.5b", "0.5b", "3b", "7b"], device="cuda")):
        seconds += each.seconds if each.peer != "vllm" else 0.0
        if seconds > 30 * 60:
            break
        begun.append(each.name)
    assert begun[:2] == ["tests of graphs", "ceilings"]
    assert {"sampling 1.5b fused", "sampling 0.5b continuous batching", "grpo 1.5b TRL", "ppo 0.5b TRL"} <= {*begun}
    assert {"real model, seed 0", "response length 8192"} <= {*begun}
    assert all(each.seconds < 0.9 * 600 for each in cells(profile_of(["1.5b", "0.5b"], device="cuda")))


def test_logits_have_a_deviation_of_four():
    """On other words than those by which it was set."""
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(TINY.qwen2(tie_word_embeddings=True, pad_token_id=0)).eval()
    sharpen(model)
    with torch.no_grad():
        logits = model(input_ids=torch.randint(FIRST_WORD, TINY.vocabulary, (20, 64))).logits
    assert float(logits.std()) == pytest.approx(DEVIATION, rel=0.05)


def test_outcomes_of_tests_are_read_from_their_report(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><skipped/></testcase>'
        '<testcase name="c"><failure message="assert 1 == 2">long</failure></testcase>'
        '<testcase name="d"><error message="no"/></testcase></testsuite></testsuites>'
    )
    assert outcomes(report) == {"passed": 1, "skipped": 1, "failed": {"c": "assert 1 == 2", "d": "no"}}


def test_results_go_into_a_page_in_the_place_of_earlier_ones(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Measured\n\nOnce.\n")
    write_into(page, "## On one\n")
    assert page.read_text() == f"# Measured\n\nOnce.\n\n{BEGIN}\n\n## On one\n\n{END}\n"
    page.write_text(page.read_text() + "\nAfter.\n")
    write_into(page, "## On another\n")
    assert page.read_text() == f"# Measured\n\nOnce.\n\n{BEGIN}\n\n## On another\n\n{END}\n\nAfter.\n"


def test_the_table_says_what_is_missing():
    profile = profile_of(["tiny"], device="cpu")
    some = [each for each in cells(profile) if each.name in ("sampling tiny fused", "sampling tiny generate")]
    found = {"seconds": [2.0], "tokens": [100], "peak_gb": 0.5, "versions": {"torch": "2"}, "machine": "CPU"}
    records = {"sampling tiny fused": {"machine": "CPU", "status": "done", "result": {**found, "graphs": 3}}}
    text = table(Results(profile, some, records))
    assert "| tiny | tinyrl, fused | 50 | 2.00 | - |" in text
    assert "| sampling tiny generate | not yet |  |" in text
    slower = {"machine": "CPU", "status": "done", "result": {**found, "seconds": [5.0]}}
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
def test_every_cell_runs_on_a_cpu(tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tiny shapes, a tiny model for the real one, in two slices."""
    tokenizer, real_model = load_tokenizer(str(tiny("llama"))), shutil.copytree(tiny("llama"), tmp_path / "model")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(real_model)
    monkeypatch.setenv("TINYRL_REAL_MODEL", str(real_model))
    words = ["--shapes", "tiny", "--out", str(tmp_path), "--peer-python", "/nowhere/python"]
    first = command(*words, "--minutes", str((slices.RESERVE_S + 1.0) / 60))
    assert first.returncode == 0, first.stderr[-2000:]
    begun = (tmp_path / "cells.jsonl").read_text()
    done = command(*words)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (tmp_path / "cells.jsonl").read_text()
    assert lines.startswith(begun)
    assert len(begun) < len(lines)
    records = [json.loads(line) for line in lines.splitlines()]
    assert {record["status"] for record in records} <= {"done", "skipped", "cut"}  # cut by the first slice
    every = [each.name for each in cells(profile_of(["tiny"], device="cpu")) if not each.peer]
    assert {record["cell"] for record in records if record["status"] == "done"} >= set(every)
    assert not (tmp_path / "page.md").exists()
    (tmp_path / "page.md").touch()
    assert command(*words, "--into", str(tmp_path / "page.md")).returncode == 0
    assert "## On CPU" in (tmp_path / "page.md").read_text()
    text = (tmp_path / "table.md").read_text()
    for row in ("| tiny | tinyrl, fused without graphs |", "| tiny | transformers, continuous batching |", "### PPO"):
        assert row in text
