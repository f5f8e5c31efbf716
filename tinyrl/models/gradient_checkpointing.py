"""Gradient checkpointing: a decoder layer's activations are recomputed in backward instead of kept.

The library recomputes only layers in training mode, which also turns dropout on (some layers, such as OPT's, check
their own `training` before dropping). Here a layer is in training mode only while recomputation is chosen, and in
evaluation mode while it computes, so every dropout stays off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tinyrl.models.packing import attending_as_now


def recomputable_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The decoder layers of a model. Raises ValueError where the library cannot recompute any."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"model.gradient_checkpointing=true: {type(model).__name__} has no layers that can be recomputed; "
            "set it to false"
        )
    return layers


@contextmanager
def recomputing(models: Sequence[nn.Module]) -> Iterator[None]:
    """Forward AND backward passes inside recompute the layers of these models; their gradients are the same."""
    layers = [layer for model in models for layer in recomputable_layers(model)]
    for layer in layers:
        layer.gradient_checkpointing, layer.training = True, True
        layer._gradient_checkpointing_func = partial(_recompute_later, layer)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing, layer.training = False, False
            del layer._gradient_checkpointing_func


def _recompute_later(layer: nn.Module, run: Callable[..., Any], *args: Any) -> Any:
    attending = attending_as_now()  # backward comes when the forward pass, and its attention, are over

    def without_dropout(*inputs: Any) -> Any:
        was, layer.training = layer.training, False
        try:
            with attending():
                return run(*inputs)
        finally:  # the recomputation is cut short by an exception of its own
            layer.training = was

    return checkpoint(without_dropout, *args, use_reentrant=False)
