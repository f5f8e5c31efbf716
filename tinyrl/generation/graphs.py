"""CUDA graphs of a decoding step, one for each shape it is called with.

An eager step launches some twenty kernels a layer, and on a small model the launches take longer than the work; a
graph is launched once. Shapes and addresses are frozen in it, so a step works on tensors that never move.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class StepGraphs:
    """Calls `step(rows, width)` through a graph that is captured the first time a shape is seen.

    `state`: the tensors that a step advances. Capturing runs the step once to warm up, and then restores them.
    """

    def __init__(self, step: Callable[[int, int], None], *, state: tuple[Tensor, ...]) -> None:
        self.step, self.state = step, state
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.side = torch.cuda.Stream()  # one for all: cuBLAS keeps a workspace for every stream it has seen

    def __call__(self, rows: int, width: int) -> None:
        if (rows, width) not in self.graphs:
            self.graphs[rows, width] = self._capture(rows, width)
        self.graphs[rows, width].replay()

    def _capture(self, rows: int, width: int) -> torch.cuda.CUDAGraph:
        before = [tensor.clone() for tensor in self.state]
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):  # libraries make their workspaces now, not inside the capture
            self.step(rows, width)
        torch.cuda.current_stream().wait_stream(self.side)
        for tensor, value in zip(self.state, before, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.side):
            self.step(rows, width)
        return graph
