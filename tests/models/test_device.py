"""Device, dtype and thread count of a run; errors of memory; random generators."""

import json
import os
import random

import numpy as np
import pytest
import torch

from tinyrl.models.device import (
    as_out_of_memory,
    chunk_tokens,
    cores_here,
    gpu_chunk_tokens,
    make_device,
    python_rng,
    restore_rng,
    restore_torch_rng,
    rng_tensors,
    seed_generators,
    threads_for,
    torch_rng,
    unused_bytes,
)


def test_threads_follow_from_the_width_and_the_cores(monkeypatch: pytest.MonkeyPatch):
    for width, cores, threads in ((255, 8, 1), (256, 1, 1), (256, 64, 4), (4096, 16, 16)):
        assert threads_for(width=width, cores=cores) == threads
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    for wanted, cores in (("", 8), ("3", 3), ("16", 8), ("0", 8), ("4,2", 8)):
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)
        assert cores_here() == cores


def test_the_device_is_there_and_autocast_follows_dtype(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "tpu"):
        with pytest.raises(ValueError, match=f"--device '?{device}"):
            make_device(device, dtype="auto")
    for dtype, product in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("auto", torch.float32)):
        run_device = make_device("cpu", dtype=dtype)
        with run_device.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == product == run_device.dtype


def test_every_error_of_memory_is_one_of_torch():
    with pytest.raises(torch.OutOfMemoryError), as_out_of_memory():
        torch.empty(1 << 50)
    with pytest.raises(torch.OutOfMemoryError), as_out_of_memory():
        bytearray(1 << 60)
    for message in ("CUDA error: out of memory\nCUDA kernel errors", "CUBLAS_STATUS_ALLOC_FAILED when calling"):
        with pytest.raises(torch.OutOfMemoryError), as_out_of_memory():
            raise RuntimeError(message)
    with pytest.raises(RuntimeError, match="size") as caught, as_out_of_memory():
        torch.add(torch.ones(2), torch.ones(3))
    assert not isinstance(caught.value, torch.OutOfMemoryError)


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))


def test_generators_are_seeded_and_restored_exactly_through_json() -> None:
    drawn = []
    for seed in (0, 10**17, 10**17):
        seed_generators(seed)
        drawn.append(draw())  # leaves a cached Gaussian in both of Python's and NumPy's generators
    assert drawn[1] == drawn[2]
    assert all(a != b for a, b in zip(*drawn[:2], strict=True))
    tensors, python = rng_tensors(), json.loads(json.dumps(python_rng()))
    expected = [draw() for _ in range(3)]
    seed_generators(1)
    restore_rng(tensors, python)
    assert [draw() for _ in range(3)] == expected


def test_a_run_on_the_cpu_opens_no_context_on_a_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def context(*_: object) -> torch.Tensor:
        raise AssertionError("a context was opened")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", context)
    monkeypatch.setattr(torch.cuda, "set_rng_state", context)
    states = torch_rng()
    assert states.keys() == {"torch"}
    restore_torch_rng({**states, "cuda": torch.zeros(16, dtype=torch.uint8)})  # of a checkpoint from a GPU


def test_memory_of_graphs_is_not_free() -> None:
    """Of 10 bytes of GPU 0 outside of graphs 4 are in use; 100 are those of graphs, 1,000 on another GPU."""
    segments = [
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 7, "allocated_size": 4},
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 3, "allocated_size": 0},
        {"device": 0, "segment_pool_id": (0, 1), "total_size": 100, "allocated_size": 0},
        {"device": 1, "segment_pool_id": (0, 0), "total_size": 1000, "allocated_size": 0},
    ]
    assert unused_bytes(segments, index=0) == 6


def test_a_chunk_of_the_head_follows_from_vocabulary_and_free_memory(monkeypatch: pytest.MonkeyPatch):
    """On a GPU a sixteenth of the free bytes at 12 a logit, 2,048 tokens at most and 2^25 logits at least; on a CPU
    2^22 logits; and 2^25 on a GPU whose runs are to give the same bits.
    """
    assert gpu_chunk_tokens(151_936, free=16 * 12 * 151_936 * 1_000) == 1_000
    assert gpu_chunk_tokens(4_096, free=80e9) == 8_192  # 2^25 logits are more than 2,048 tokens
    assert gpu_chunk_tokens(151_936, free=80e9) == 2_048
    assert gpu_chunk_tokens(151_936, free=0) == 220
    assert chunk_tokens(32_768, torch.device("cpu")) == 128
    assert chunk_tokens(1 << 23, torch.device("cpu")) == 1
    monkeypatch.setattr("tinyrl.models.device.free_bytes", lambda device: 16 * 12 * 151_936 * 1_000)
    assert chunk_tokens(151_936, torch.device("cuda")) == 1_000
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert chunk_tokens(151_936, torch.device("cuda")) == 220
