"""Passes over matrices of one size: how often an operation reads one, and how often one writes it."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ONE_ENTRY_A_ROW = (torch.ops.aten.gather.default, torch.ops.aten.scatter_add_.default)


class PassesOver(TorchDispatchMode):
    """Counts operations that read or write all of a tensor of `size` elements. Views move nothing; an operation in
    place reads and writes; one that looks at an entry a row is no pass.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.reads = 0
        self.writes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view or func in ONE_ENTRY_A_ROW:
            return out
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        only_written = [argument.name for argument in func._schema.arguments if argument.is_out]
        for name, value in given.items():
            if name not in only_written:
                self.reads += sum(self._has_size(x) for x in tree_leaves(value))
        writes_nothing = func in (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)
        if not writes_nothing:
            self.writes += sum(self._has_size(x) for x in tree_leaves(out))
        return out

    def _has_size(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.numel() == self.size
