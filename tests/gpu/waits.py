"""Counts of what the process waits for, and of kernels, while a block runs.

On CUDA torch itself tells each wait for the device (torch.cuda.set_sync_debug_mode). On a CPU nothing waits, so there
the calls are counted that would: a tensor read as a number or a list, an index of booleans (its size is a number that
must be read) or of a list (which is copied to the device).
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tinyrl

TINYRL, TORCH = (str(Path(package.__file__ or "").parent) for package in (tinyrl, torch))
READ = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "__iter__", "is_nonzero"}
READ_BY_KERNELS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "equal"}
NO_KERNELS = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view", "lift_fresh")


class Waits(Counter[str]):
    """How often the block waited, by the line of tinyrl that did, or of the library that it called."""

    def seen(self, what: str) -> None:
        """One wait, where the process is now."""
        frames = traceback.extract_stack()
        if any(f.filename.startswith(f"{TORCH}/optim/") for f in frames):
            return  # Adam's counts of steps are on the CPU
        where = next(f for f in reversed(frames) if f.filename != __file__ and not f.filename.startswith(TORCH))
        self.at(where.filename, where.lineno or 0, what)

    def at(self, file: str, line: int, what: str) -> None:
        """One wait at a line of a file."""
        self[f"{Path(file).relative_to(TINYRL) if file.startswith(TINYRL) else file}:{line} {what}"] += 1

    @property
    def own(self) -> int:
        """Those of tinyrl itself."""
        return sum(count for where, count in self.items() if not where.startswith("/"))


class _Calls(TorchFunctionMode):
    """What Python asks of tensors."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits, self.inside = waits, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self.inside and name in READ and not _on_meta(args):
            self.waits.seen(name)
            self.inside = True  # what it calls itself is the same wait
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.inside = False
        if name in ("__getitem__", "__setitem__") and any(isinstance(i, list) for i in _indices(args)):
            self.waits.seen(f"{name} by a list")
        return func(*args, **(kwargs or {}))


class _Kernels(TorchDispatchMode):
    """What torch's kernels do, and how many there are."""

    def __init__(self, waits: Waits, calls: _Calls | None) -> None:
        super().__init__()
        self.waits, self.calls = waits, calls
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if self.calls is not None and not self.calls.inside:
            masks = name in ("index", "index_put", "index_put_") and any(
                i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
            )
            sizes = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
            if masks or sizes or name in READ_BY_KERNELS:
                self.waits.seen(name)
        out = func(*args, **(kwargs or {}))
        if name not in NO_KERNELS and not is_view(func, out, args):
            self.kernels[name] += 1
        return out


def is_view(func: Any, out: Any, args: Any) -> bool:
    """Whether an operation only looked at its input in another way. Some may, and copy where they cannot."""
    if not any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        return False
    memory = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, Tensor)}
    return all(x.untyped_storage().data_ptr() in memory for x in tree_leaves(out) if isinstance(x, Tensor))


def _indices(args: Any) -> list[Any]:
    index = args[1]
    return list(index) if isinstance(index, tuple) else [index]


def _on_meta(args: Any) -> bool:
    return any(isinstance(x, Tensor) and x.device.type == "meta" for x in tree_leaves(args))


@contextmanager
def counting_waits(device: torch.device) -> Iterator[Waits]:
    """The waits of a block."""
    waits = Waits()
    if device.type == "cuda":
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield waits
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for warning in told:
            if "called a synchronizing" in str(warning.message):
                waits.at(warning.filename, warning.lineno, "waits")
        return
    calls = _Calls(waits)
    with calls, _Kernels(waits, calls):
        yield waits


@contextmanager
def counting_kernels() -> Iterator[Counter[str]]:
    """The operations of a block that would each launch a kernel, by name: views and allocations launch none."""
    with _Kernels(Waits(), None) as mode:
        yield mode.kernels
