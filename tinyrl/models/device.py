"""The process's Accelerator, the dtype, torch's thread count, and memory on the device.

Device placement and autocast come from the Accelerator alone; where several processes were launched, they are connected
before it is made, and each has the device of its number on its machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor, nn

from tinyrl.errors import MAY_BE_MEMORY, no_memory
from tinyrl.models.distributed import join, world
from tinyrl.workers.process import CGROUP_LIMIT

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
KEPT_BYTES = 1 << 30
WIDE = 256  # hidden size from which a layer is worth more than one thread
THREAD_WIDTH = 64  # of it, for each thread
MICRO_BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}  # run.micro_batch_tokens=auto; on a GPU until one was measured
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 25}  # logits in a chunk: 16 and 128 MB in float32
MOST_IN_FLOAT32 = 1e-4  # nats that two computations in float32 may be apart
TIMES_THE_LIBRARY = 1.5  # how much larger our mean error may be than that of the library's modules


class Float16Accelerator(Accelerator):
    """Autocast in float16 on any device (accelerate has it on GPUs alone). The loss is scaled by the Updater."""

    @property
    def mixed_precision(self) -> str:
        return "fp16"

    @contextlib.contextmanager
    def autocast(self, autocast_handler: object = None) -> Iterator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.autocast(self.device.type, dtype=torch.float16):
            yield


def make_accelerator(device: str, *, dtype: str) -> Accelerator:
    """The process's Accelerator for `device` (auto, cpu, cuda) with autocast in `dtype` (auto, or a name of torch's).

    Accelerate keeps its settings per process; a second call (tests, `eval --vs`) resets them. Raises ValueError when
    a CUDA device is asked for and none is there.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device!r}: allowed are auto, cpu, cuda")
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ValueError("--device cuda: torch sees no CUDA device (is this a CPU build?); use --device auto or cpu")
    on_cpu = device == "cpu" or not has_cuda
    wanted = resolve_dtype(dtype, on_cpu=on_cpu)
    if AcceleratorState._shared_state:
        AcceleratorState._reset_state(reset_partial_state=True)
    join(on_cpu=on_cpu)
    PartialState(cpu=on_cpu)
    if on_cpu:
        keep_freed_memory()
    else:  # it makes a plan for every shape of attention, and packed shapes are nearly all new
        torch.backends.cuda.enable_cudnn_sdp(False)
    if wanted == torch.float16:
        return Float16Accelerator(cpu=on_cpu, mixed_precision="no")  # not what the launcher's environment says
    return Accelerator(cpu=on_cpu, mixed_precision="bf16" if wanted == torch.bfloat16 else "no")


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory in this process, for the next tensor.

    Each micro-batch frees what the next one asks for. By default glibc returns it to the kernel in between, which then
    clears every page again. Returns False where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all(
        [mallopt(which, KEPT_BYTES) == 1 for which in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD)]
    )


def resolve_dtype(dtype: str, *, on_cpu: bool) -> torch.dtype:
    """`auto` is float32 on a CPU, and on a GPU bfloat16 where it has that, else float16."""
    if dtype == "auto":
        if on_cpu:
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]


def cores_here() -> int:
    """Cores for this process: all it may use, divided among the processes of its launch on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // world().local_size)


def threads_for(*, width: int, cores: int) -> int:
    """torch's thread count on a CPU for a model of this hidden size: what follows from the work, never from a clock, so
    that equal commands compute the same. In narrow layers threads mostly wait for each other, and for other processes.
    """
    return 1 if width < WIDE else max(1, min(cores, width // THREAD_WIDTH))


@contextlib.contextmanager
def as_out_of_memory() -> Iterator[None]:
    """Raise torch.OutOfMemoryError, as torch's allocator on CUDA does, for what others report in other ways: that on a
    CPU, CUDA itself (of graphs), and its libraries; a thread, a process or a library that found no room.
    """
    try:
        yield
    except MAY_BE_MEMORY as error:
        said = no_memory(error)
        if isinstance(error, torch.OutOfMemoryError) or said is None:
            raise
        raise torch.OutOfMemoryError(said) from error


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """x on the device. A copy to a GPU is only queued: from ordinary memory the process would wait for all that is
    queued before it, and the GPU then for the process.
    """
    if torch.device(device).type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.contiguous().pin_memory().to(device, non_blocking=True)  # pinned as it stands, else it is copied twice


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def free_bytes(device: torch.device) -> int:
    """Memory of the device that can be had now; on a GPU with what torch holds and does not use."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def memory_room(device: torch.device) -> int:
    """Bytes that this process may hold on the device in all: what it holds and what is free (within a container's
    limit, and shared by the processes of a launch that use the same memory).
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    room = psutil.virtual_memory().available + resident_bytes()
    with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
        room = min(room, int(CGROUP_LIMIT.read_text()))
    return room // world().local_size


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory in GB: allocated on the GPU, or resident in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss would start from that of the process that started this one
        peak = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024 / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


HALVES = (torch.bfloat16, torch.float16)
UNITS = {  # of a CPU that multiplies matrices in half precision, as torch names them
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "avx10_2", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "avx10_2", "fp16"),
}


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Dtype of products under autocast on a kind of device; None outside it."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@cache
def multiplies_in(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products in a half-precision dtype."""
    here: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(here.get(unit) for unit in UNITS[dtype])


def as_exact(error: float, library: float) -> bool:
    """Whether a computation with this mean error is as good as one of the library's, whose mean error is `library`.

    With sharp logits any two correct computations in bfloat16 are far apart (on a real model of 135M parameters by 0.06
    to 0.18 nats on average), so neither is compared with the other, but both with float32.
    """
    return error <= max(TIMES_THE_LIBRARY * library, MOST_IN_FLOAT32)  # an error that is not a number is not


def ordinary_ids(vocabulary: int, count: int, *, start: int = 0) -> list[int]:
    """Token ids spread over the middle of a vocabulary: special tokens stand at its ends."""
    middle = max(1, vocabulary // 2)
    return [(vocabulary // 4 + (7919 * (start + i) + 1009) % middle) % vocabulary for i in range(count)]


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Inside, a model with half-precision weights computes in float32. Each layer's weights are widened while it runs,
    so there is no second copy of the model.
    """
    kept: dict[nn.Parameter, Tensor] = {}

    def widen(layer: nn.Module, _: object) -> None:
        for parameter in layer.parameters(recurse=False):
            if parameter.dtype in HALVES:
                kept[parameter] = parameter.data
                parameter.data = parameter.data.float()

    def restore(layer: nn.Module, *_: object) -> None:
        for parameter in layer.parameters(recurse=False):
            if parameter in kept:
                parameter.data = kept.pop(parameter)

    four_bit = {m: m.compute_dtype for m in model.modules() if hasattr(m, "compute_dtype")}
    for layer in four_bit:
        layer.compute_dtype = torch.float32  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    layers = [m for m in model.modules() if any(p.dtype in HALVES for p in m.parameters(recurse=False))]
    hooks = [h for m in layers for h in (m.register_forward_pre_hook(widen), m.register_forward_hook(restore))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, dtype in four_bit.items():
            layer.compute_dtype = dtype
        for parameter, data in kept.items():  # of a layer that raised
            parameter.data = data
