"""The inputs of recomputed layers on the host: copied on a side stream while the next layers compute, and brought back
one layer ahead. (`torch.autograd.graph.save_on_cpu` copies on the computing stream, which waits for each copy.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class OffloadInputs(saved_tensors_hooks):
    """Around a forward pass of recomputed layers: moves saved tensors (N, hidden) to the host, and nothing else (the
    hooks see the rotations of every layer, too). One object serves one forward pass and its backward. `pool`: pinned
    buffers that are kept from one pass to the next. On a CPU they are copies.
    """

    def __init__(self, hidden: int, pool: list[Tensor]) -> None:
        super().__init__(self._to_host, self._to_device)
        self.hidden = hidden
        self.pool = pool
        self.side = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.stored: list[tuple[Tensor, Tensor]] = []  # a pinned buffer, and its part that holds the tensor
        self.fetched: dict[int, tuple[Tensor, Any]] = {}  # with the event of its copy
        self.device = torch.device("cpu")

    def _to_host(self, x: Tensor) -> Tensor | int:
        if x.dim() != 2 or x.shape[1] != self.hidden or isinstance(x, nn.Parameter):
            return x
        self.device = x.device
        buffer = self._buffer(x)
        view = buffer[: x.numel()].view(x.shape)
        if self.side is None:
            view.copy_(x)
        else:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                view.copy_(x, non_blocking=True)
            x.record_stream(self.side)
        self.stored.append((buffer, view))
        return len(self.stored) - 1

    def _to_device(self, saved: Tensor | int) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._fetch(saved)
        if saved > 0:
            self._fetch(saved - 1)  # arrives while this layer is recomputed
        x, event = self.fetched.pop(saved)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
            x.record_stream(torch.cuda.current_stream())
        self.pool.append(self.stored[saved][0])  # which the side stream alone writes, in order
        return x

    def _fetch(self, index: int) -> None:
        if index in self.fetched:
            return
        _, view = self.stored[index]
        if self.side is None:
            self.fetched[index] = (view.clone(), None)
            return
        with torch.cuda.stream(self.side):
            x = view.to(self.device, non_blocking=True)
            self.fetched[index] = (x, self.side.record_event())

    def _buffer(self, x: Tensor) -> Tensor:
        for i, buffer in enumerate(self.pool):
            if buffer.numel() >= x.numel() and buffer.dtype == x.dtype:
                return self.pool.pop(i)
        return torch.empty(x.numel(), dtype=x.dtype, pin_memory=x.is_cuda)
