"""Running out of memory for real, on a CPU: a limit on a process's address space.

The model wants most of it in one place: feed-forward layers, or keys and values, a hundred times as wide as the rest.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests import running
from tests.faults.children import Child
from tests.tiny_models import tiny_tokenizer
from tinyrl.config.schema import Config
from tinyrl.models import device
from tinyrl.models.micro_batches import MicroBatches, SequenceLengths, Work
from tinyrl.process.launched import Options
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.run_dir import RunDir
from tinyrl.training.launch import start

MB = 1 << 20


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="address space is limited as Linux does it")


def model_of(folder: Path, *, seed: int = 0, **shape: Any) -> Path:
    """A model of hidden size 32 and one layer, apart from `shape`; close to uniform, so completions are long."""
    tokenizer = tiny_tokenizer()
    few: Any = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    few |= {"vocab_size": len(tokenizer), "max_position_embeddings": 8192, "bos_token_id": None}
    few |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**few, **shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token takes 32 kB in each of three matrices of its only layer, where the update keeps them."""
    return model_of(tmp_path_factory.mktemp("wide"), intermediate_size=8192)


@pytest.fixture(scope="module")
def deep_cache_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token takes 64 kB of keys and values."""
    return model_of(tmp_path_factory.mktemp("cache"), seed=7, intermediate_size=64, head_dim=2048)


def train_within(settings: Config, folder: Path, name: str, room_mb: int | None, facts: Path) -> None:
    """Load everything, then allow so many megabytes more, and train; `facts` gets what was made smaller.

    Freed memory is not kept in this process: otherwise its amount would decide, and not the limit.
    """
    device.keep_freed_memory = lambda: False  # freed memory is returned at once
    options: Any = {"options": Options(device="cpu"), "overwrite": False, "command": ["test"]}
    launch = start(prepare(settings), output_dir=str(folder), name=name, **options)
    if room_mb is not None:
        gc.collect()  # what loading left behind would be room for the run
        ctypes.CDLL(None).malloc_trim(0)
        limit = address_space() + room_mb * MB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    code = launch.go(report=lambda _: None)
    rows, tokens = getattr(launch.method, "collector").engine.max_rows, launch.policy.micro_batches.tokens  # noqa: B009
    facts.write_text(json.dumps({"max_rows": rows, "micro_batch_tokens": tokens}))
    sys.exit(code)


def address_space() -> int:
    """Bytes of this process's address space."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmSize:")) * 1024


def end_of(settings: Config, folder: Path, *, room_mb: int | None) -> SimpleNamespace:
    """Train in a child that may take so many megabytes more than at its start (None: no limit): exit code, output, and
    what was made smaller.
    """
    name = "whole" if room_mb is None else "within"
    facts = folder / f"{name}.json"
    child = Child(train_within, settings, folder, name, room_mb, facts, output=folder / f"{name}.txt")
    ended: Any = {"code": child.end(), "said": child.said, "run": RunDir(folder / name)}
    return SimpleNamespace(**ended, **json.loads(facts.read_text()))


def settings_for(model: Path, **sections: Any) -> Config:
    few = {"num_steps": 1, "eval_prompts": 4, "micro_batch_tokens": 100_000, **sections.pop("run", {})}
    return running.config("grpo", model, run=few, **sections)


def assert_alike(run: RunDir, whole: RunDir) -> None:
    """Samples before the only update are the same, and so are the numbers, up to a difference of micro-batches."""
    ours, theirs = ([json.loads(line) for line in r.samples.read_text().splitlines()] for r in (run, whole))
    kept = [[line for line in lines if line["step"] == 0 or line["kind"] == "train"] for lines in (ours, theirs)]
    assert kept[0] == kept[1]
    for line, other in zip(running.lasting(run), running.lasting(whole), strict=True):
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
        assert numbers == pytest.approx({key: other[key] for key in numbers}, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_an_update_that_does_not_fit_is_redone_in_smaller_micro_batches(wide_model: Path, tmp_path: Path) -> None:
    """Sixteen completions of 64 tokens take some 130 MB; samples and losses are as with room for all."""
    settings = settings_for(wide_model, generation={"max_new_tokens": 64})
    whole, within = (end_of(settings, tmp_path, room_mb=room) for room in (None, 70))
    assert (whole.code, within.code) == (0, 0), within.said
    assert whole.micro_batch_tokens == 100_000
    assert within.micro_batch_tokens < 1000
    assert_alike(within.run, whole.run)


# ---- memory that is freed ----


def resident_mb() -> float:
    """Return the megabytes that this process has allocated: pages of libraries come when they are used."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def free_tensors(rows: list[int]) -> None:
    """Make 64 tensors of 2 MB, free them, and print how many megabytes this process still has of them."""
    before = resident_mb()
    tensors = [torch.ones(1 << 19) for _ in range(64)]
    del tensors
    print(resident_mb() - before)


def run_a_long_and_a_shorter_micro_batch() -> None:
    """Free tensors within a micro-batch of 1,536 tokens, and within one of 1,535."""
    micro_batches = MicroBatches(device.make_device("cpu", dtype="float32").device, 4096)
    for tokens in (1536, 1535):
        lengths = SequenceLengths([8], [tokens - 8], [0], packed=True)
        micro_batches.run(Work(lengths, free_tensors))


def test_a_long_micro_batch_returns_the_memory_of_its_tensors(tmp_path: Path) -> None:
    """64 tensors of 2 MB in micro-batches of 1,536 and of 1,535 tokens: the shorter one keeps them for the next."""
    child = Child(run_a_long_and_a_shorter_micro_batch, output=tmp_path / "said.txt")
    assert child.end() == 0, child.said
    long, short = map(float, child.said.split())
    assert long < 16
    assert short > 112
