"""Bytes of the tensors that a computation keeps alive."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Counts tensors made inside. `now`: bytes alive; `most`: the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((*args, *kwargs.values())):
            self._known.setdefault(storage, 0)  # made outside: a view of it is nothing new
        out = func(*args, **kwargs)
        for storage in _storages((out,)):
            if storage not in self._known:
                size = self._known[storage] = storage.nbytes()
                self._count(size)
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._count, -size).atexit = False
        return out

    def _count(self, size: int) -> None:
        self.now += size


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """Of the tensors among values, and in lists of them: what operators of torch take and give."""
    for value in values:
        if isinstance(value, Tensor):
            yield value.untyped_storage()
        elif isinstance(value, list | tuple):
            yield from _storages(value)
