"""Bytes of the tensors that a computation keeps alive."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Counts tensors made inside. `now`: bytes alive; `most`: the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in filter(_is_tensor, tree_leaves((args, kwargs))):
            self._known.setdefault(tensor.untyped_storage(), 0)  # made outside: a view of it is nothing new
        out = func(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in filter(_is_tensor, tree_leaves(out))):
            if storage not in self._known:
                size = self._known[storage] = storage.nbytes()
                self._count(size)
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._count, -size).atexit = False
        return out

    def _count(self, size: int) -> None:
        self.now += size


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
