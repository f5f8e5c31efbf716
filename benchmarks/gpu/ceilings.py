"""The two ceilings of this machine: a large matrix product and a large copy, on random numbers, medians of repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def seconds_of(work: Callable[[], object], device: torch.device, *, repeats: int = 20) -> float:
    """The median of repeats after three to warm up: by events on a GPU, by the clock on a CPU."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        taken = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Operations a second in bfloat16 on a GPU, float32 on a CPU; bytes a second, read and written."""
    device = torch.device(settings["device"])
    gpu = device.type == "cuda"
    dtype, side, room = (torch.bfloat16, 8192, 1 << 31) if gpu else (torch.float32, 512, 1 << 24)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = seconds_of(lambda: left @ right, device)
    source = torch.randn(room // 4, device=device)
    target = torch.empty_like(source)
    copy = seconds_of(lambda: target.copy_(source), device)
    assert torch.equal(source, target)
    name = torch.cuda.get_device_name() if gpu else "cpu"
    return {"rate": 2 * side**3 / product, "bandwidth": 2 * source.nbytes / copy, "name": name}
