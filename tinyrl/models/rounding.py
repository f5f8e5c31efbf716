"""Rounding in half precision: the float32 pass of a model's own weights, and whether two computations are as exact.

With sharp logits any two correct computations in bfloat16 are far apart (on a real model of 135M parameters by 0.06 to
0.18 nats, on average over the vocabulary). So one of ours is not compared with the library's, but both with float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

HALVES = (torch.bfloat16, torch.float16)
MOST_IN_FLOAT32 = 1e-4  # nats that two computations in float32 may be apart
TIMES_THE_LIBRARY = 1.5  # how much larger our mean error may be than that of the library's modules


def as_exact(error: float, library: float) -> bool:
    """Whether a computation with this mean error is as good as one of the library's, whose mean error is `library`."""
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

    layers = [m for m in model.modules() if any(p.dtype in HALVES for p in m.parameters(recurse=False))]
    hooks = [h for m in layers for h in (m.register_forward_pre_hook(widen), m.register_forward_hook(restore))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, data in kept.items():  # of a layer that raised
            parameter.data = data
