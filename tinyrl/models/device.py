"""Device and dtype of a run, torch's thread count, memory on the device, and random generators."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from tinyrl.models.parallel import join, world
from tinyrl.process.errors import MAY_BE_MEMORY, machine_memory, no_memory

HALVES = (torch.bfloat16, torch.float16)
WIDE = 256
THREAD_WIDTH = 64  # hidden size from which a layer is worth more than one thread, and for each thread
MICRO_BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}  # run.micro_batch_tokens=auto; on a GPU until one was measured
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 25}  # logits in a chunk, on a GPU at least: 16 and 128 MB in float32
CHUNK_TOKENS = 2048  # of a chunk on a GPU at most: larger ones are not better shaped for its products
CHUNK_SHARE = 1 / 16  # of a GPU's free memory that a chunk's matrices may take
LOGIT_BYTES = 3 * 4  # of a logit in float32: itself, its exponential and its gradient
SHARED_POOL = (0, 0)  # id of the allocator's pool for tensors outside of CUDA graphs
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3  # parameters of glibc's mallopt, from malloc.h
KEPT_BYTES = 1 << 30  # a freed block below this size stays with the process
LONG_TOKENS = 1536  # of a micro-batch, from which on freed blocks of MAPPED_BYTES do not
MAPPED_BYTES = 1 << 20
AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True)
class Device:
    """The device of a run and the dtype of its forward passes. The Updater scales the loss in float16."""

    device: torch.device
    dtype: torch.dtype

    def autocast(self, *, keeps_casts: bool = True) -> torch.autocast:
        """Return autocast to the run's dtype; keeps_casts: a trained weight is cast once, and the cast kept until the
        outermost autocast ends.
        """
        half = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=half, cache_enabled=keeps_casts)


def make_device(device: str, *, dtype: str) -> Device:
    """Connect the processes of the launch; choose the device (auto, cpu, cuda) and dtype (auto, or torch's name)."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device!r}: allowed are auto, cpu, cuda")
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    if device == "cuda" and on_cpu:
        raise ValueError("--device cuda: torch sees no CUDA device (is this a CPU build?); use --device auto or cpu")
    join(on_cpu=on_cpu)
    if on_cpu:
        keep_freed_memory()
        return Device(torch.device("cpu"), resolve_dtype(dtype, on_cpu=True))
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans every shape anew, and packed shapes are nearly all new
    return Device(torch.device("cuda", torch.cuda.current_device()), resolve_dtype(dtype, on_cpu=False))


def move_to_device(module: AnyModule, device: torch.device) -> AnyModule:
    """Move a module to a device and return it. (The library's own `to` hides torch's signature.)"""
    return module.to(device)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next tensor; by default it goes to the kernel, which clears every page."""
    if glibc := _glibc():
        glibc.mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        glibc.mallopt(MMAP_THRESHOLD, KEPT_BYTES)


@contextlib.contextmanager
def without_gaps(device: torch.device, tokens: int) -> Iterator[None]:
    """Return freed tensors to the kernel while a micro-batch of `tokens` is computed on a CPU, if that is long.

    Kept memory has gaps: inputs of layers, and gradients, are allocated amid larger temporary tensors, which then do
    not fit between them. In long texts gaps take more than the tensors; in short ones clearing pages takes time.
    """
    glibc = _glibc() if device.type == "cpu" and tokens >= LONG_TOKENS else None
    if glibc is None:
        yield
        return
    glibc.malloc_trim(0)
    glibc.mallopt(MMAP_THRESHOLD, MAPPED_BYTES)
    try:
        yield
    finally:
        keep_freed_memory()


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def resolve_dtype(dtype: str, *, on_cpu: bool) -> torch.dtype:
    """Return a dtype by name; `auto` is float32 on a CPU, and on a GPU bfloat16 where it has that, else float16."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if on_cpu:
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def cores_here() -> int:
    """Return the cores this process may use: the machine's, divided among the processes of the launch on it; alone at
    most OMP_NUM_THREADS (a launcher sets that to 1).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if world().local_size > 1:
        return max(1, cores // world().local_size)
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(wanted)) if wanted.isdigit() and int(wanted) else cores


def threads_for(*, width: int, cores: int) -> int:
    """Return torch's thread count on a CPU for a hidden size: in narrow layers threads mostly wait for each other."""
    return 1 if width < WIDE else max(1, min(cores, width // THREAD_WIDTH))


@contextlib.contextmanager
def as_out_of_memory() -> Iterator[None]:
    """Raise torch.OutOfMemoryError for every error that reports a lack of memory, of torch, CUDA or a process."""
    try:
        yield
    except MAY_BE_MEMORY as error:
        reason = no_memory(error)
        if isinstance(error, torch.OutOfMemoryError) or reason is None:
            raise
        raise torch.OutOfMemoryError(reason) from error


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy x to the device; to a GPU asynchronously, from pinned memory."""
    if torch.device(device).type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.contiguous().pin_memory().to(device, non_blocking=True)


def states_at(states: Tensor, index: Tensor) -> Tensor:
    """Return states[index], whose backward adds up in the order of `index`: rows that share a prompt use one state.
    Neither kernel does so on both devices: indexing's adds as threads arrive on a CPU, index_select's on a GPU.
    """
    return states.index_select(0, index) if states.device.type == "cpu" else states[index]


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the dtype of products under autocast on a kind of device; None outside it."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def free_bytes(device: torch.device) -> int:
    """Return the free memory of the device; on a GPU with what torch has reserved for any tensor and does not use."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.mem_get_info(device)[0] + unused_bytes(torch.cuda.memory_snapshot(), index=index)


def unused_bytes(segments: Iterable[dict[str, Any]], *, index: int) -> int:
    """Count the bytes of torch's segments on GPU `index` that any tensor may still take: a pool of CUDA graphs is
    theirs alone.
    """
    own = (one for one in segments if one["device"] == index and tuple(one["segment_pool_id"]) == SHARED_POOL)
    return sum(one["total_size"] - one["allocated_size"] for one in own)


def device_name(device: torch.device) -> str:
    """Return what tells a device from others, and what it has as memory: a budget that fits one may not fit another."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory} bytes"


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Return how many tokens' logits a chunk of the head holds. On a GPU that is by free memory, but not where the same
    run is to give the same bits: products of other shapes round differently.
    """
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return max(1, CHUNK_ELEMENTS[device.type] // vocabulary)
    return gpu_chunk_tokens(vocabulary, free=free_bytes(device))


def gpu_chunk_tokens(vocabulary: int, *, free: float) -> int:
    """Return the tokens of a chunk of the head on a GPU with `free` bytes."""
    least = max(1, CHUNK_ELEMENTS["cuda"] // vocabulary)
    fitting = int(CHUNK_SHARE * free / (LOGIT_BYTES * vocabulary))
    return max(least, min(fitting, CHUNK_TOKENS))


def memory_room(device: torch.device) -> int:
    """Return the bytes this process may hold on the device in all; on a CPU its share, within a container's limit."""
    if device.type == "cuda":
        return free_bytes(device) + torch.cuda.memory_allocated(device)
    room = min(free_bytes(device) + psutil.Process().memory_info().rss, machine_memory())
    return room // world().local_size


_peak_before_resets: dict[torch.device, int] = {}  # bytes on each GPU, before its statistics were last reset


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure the peak of a GPU anew; `peak_memory_gb` keeps what it was before."""
    before = _peak_before_resets.get(device, 0)
    _peak_before_resets[device] = max(before, torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory in GB: allocated on the GPU, or resident in the process."""
    if device.type == "cuda":
        return max(_peak_before_resets.get(device, 0), torch.cuda.max_memory_allocated(device)) / 1e9
    if sys.platform != "linux":
        return psutil.Process().memory_info().rss / 1e9
    # VmHWM, since ru_maxrss would start from the process that started this one
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024 / 1e9


# ---- random generators of Python, NumPy and torch, as JSON and tensors: for dropout and user code ----


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # which takes 32 bits
    torch.manual_seed(seed)


def torch_rng() -> dict[str, Tensor]:
    """Return the states of torch's generators, which dropout draws from. A GPU's only in a run that computes there:
    to ask would open a context on it, which takes memory.
    """
    on_gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    return {"torch": torch.get_rng_state(), **on_gpu}


def restore_torch_rng(tensors: dict[str, Tensor]) -> None:
    """Restore what `torch_rng` gave; the state of a GPU only in a run that computes there."""
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(tensors["cuda"])


def python_rng() -> list[Any]:
    """Return the state of `random`, as JSON."""
    kind, numbers, gauss = random.getstate()
    return [kind, list(numbers), gauss]


def rng_tensors() -> dict[str, Tensor]:
    """Return the states of torch's and NumPy's generators. MT19937's is 624 words, a position and a cached Gaussian."""
    _, words, *rest = np.random.get_state()
    numpy_words = torch.from_numpy(np.asarray(words).astype(np.int64))
    return torch_rng() | {"numpy_words": numpy_words, "numpy_rest": torch.tensor(rest, dtype=torch.float64)}


def restore_rng(tensors: dict[str, Tensor], python_state: list[Any]) -> None:
    """Restore what `rng_tensors` and `python_rng` gave."""
    kind, numbers, gauss = python_state
    random.setstate((kind, tuple(numbers), gauss))
    restore_torch_rng(tensors)
    position, has_gauss, cached = tensors["numpy_rest"].tolist()
    words = tensors["numpy_words"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(position), int(has_gauss), cached))
