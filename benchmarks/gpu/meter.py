"""Seconds and peak memory of work on a device, inside a cell's process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import measuring


def peak_gb(device: torch.device, imports_mb: float) -> float:
    """The most that was allocated on a GPU; on a CPU what the process held beyond its imports."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return (measuring.peak_mb() - imports_mb) / 1e3


def timed(work: Callable[[int], int], device: torch.device, *, repeats: int) -> dict[str, Any]:
    """Seconds and tokens of each call work(number) -> tokens after a first one; the device is waited for."""
    seconds, tokens = [], []
    for number in range(repeats + 1):
        start = time.perf_counter()
        count = work(number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        tokens.append(count)
    return {"seconds": seconds[1:], "tokens": tokens[1:], "first": seconds[0]}
