"""The Accelerator's settings, and the choice of a thread count."""

import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from tinyrl.models.device import as_out_of_memory, calibrate_threads, make_accelerator, resolve_dtype


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Clock:
    """A clock that advances only while work is done, by an amount that depends on the thread count."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.now = seconds, 0.0
        self.runs: list[int] = []

    def work(self) -> None:
        self.runs.append(torch.get_num_threads())
        self.now += self.seconds[torch.get_num_threads()]


@pytest.mark.parametrize(
    ("cores", "seconds", "best"),
    [
        (1, {1: 1.0}, 1),
        (2, {1: 1.0, 2: 0.85}, 2),
        (2, {1: 1.0, 2: 0.95}, 1),  # not a tenth better: one thread is the safe choice
        (2, {1: 1.0, 2: 10.0}, 1),
        (8, {1: 1.0, 4: 0.5, 8: 0.48}, 4),
        (8, {1: 1.0, 4: 0.95, 8: 0.5}, 8),
    ],
)
def test_threads_are_the_fewest_that_are_clearly_fastest(
    monkeypatch: pytest.MonkeyPatch, cores: int, seconds: dict[int, float], best: int
):
    clock = Clock(seconds)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    chosen, medians = calibrate_threads(clock.work, repeats=3)
    assert chosen == best == torch.get_num_threads()
    assert medians == pytest.approx(seconds)
    assert clock.runs == sorted(seconds) * 4  # one round to warm up


def test_calibration_on_this_machine_returns_a_candidate():
    chosen, medians = calibrate_threads(lambda: torch.ones(64, 64) @ torch.ones(64, 64), repeats=2)
    assert chosen in medians
    assert 1 in medians
    assert torch.get_num_threads() == chosen


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: torch sees no CUDA device"):
        make_accelerator("cuda", dtype="auto")
    with pytest.raises(ValueError, match="'tpu': allowed are auto, cpu, cuda"):
        make_accelerator("tpu", dtype="auto")


def test_autocast_follows_dtype_and_a_second_call_starts_afresh():
    for dtype, precision in (("float32", "no"), ("bfloat16", "bf16"), ("auto", "no")):
        accelerator = make_accelerator("cpu", dtype=dtype)
        assert accelerator.device.type == "cpu"
        assert accelerator.mixed_precision == precision
        with accelerator.autocast():
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        assert product.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)


def test_auto_is_bfloat16_only_where_a_gpu_has_it():
    assert resolve_dtype("auto", on_cpu=True) == torch.float32
    assert resolve_dtype("bfloat16", on_cpu=True) == torch.bfloat16
    assert resolve_dtype("float32", on_cpu=False) == torch.float32


FAULTS_OF_STEPS = """
import resource, torch
from tinyrl.models.device import keep_freed_memory
kept = {keep} and keep_freed_memory()
def faults_after_a_step():
    tensors = [torch.ones(1 << 20) for _ in range(16)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(kept, *(faults_after_a_step() for _ in range(6)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_that_was_freed_is_used_again():
    """By default the kernel has to supply its pages anew, each at a page fault. The heap may still grow in a step, so
    the one with fewest counts.
    """
    faults = {}
    for keep in (False, True):
        command = [sys.executable, "-c", FAULTS_OF_STEPS.format(keep=keep)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert said[0] == str(keep)
        faults[keep] = min(int(after) - int(before) for before, after in pairwise(said[1:]))
    assert 4 * faults[True] < faults[False]


def test_a_cpu_that_has_no_more_memory_says_so_as_a_gpu_does():
    with pytest.raises(torch.OutOfMemoryError, match="you tried to allocate"), as_out_of_memory():
        torch.empty(1 << 50)
    for said in (
        "CUDA error: out of memory\nCUDA kernel errors",
        "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
    ):
        with pytest.raises(torch.OutOfMemoryError), as_out_of_memory():
            raise RuntimeError(said)
    with pytest.raises(torch.OutOfMemoryError, match="no more memory"), as_out_of_memory():
        bytearray(1 << 60)
    with pytest.raises(RuntimeError, match="size") as caught, as_out_of_memory():
        torch.add(torch.ones(2), torch.ones(3))
    assert not isinstance(caught.value, torch.OutOfMemoryError)
