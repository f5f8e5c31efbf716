"""Gradient checkpointing: the layers of a decoder are computed again in backward instead of being kept."""

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
    """List the layers that the library can recompute in backward."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def check_recomputable(models: Sequence[nn.Module]) -> None:
    """Check early that `gradient_checkpointing` can be used. Raises ValueError for a model that has no such layers."""
    for model in models:
        if not recomputable_layers(model):
            raise ValueError(f"model.gradient_checkpointing=true: {type(model).__name__} has no layers to recompute")


@contextmanager
def recomputing(models: Sequence[nn.Module]) -> Iterator[None]:
    """Recompute the decoders' layers in backward; forward AND backward belong inside. The library recomputes only
    layers in training mode, which also turns dropout on (some, such as OPT's, check their own `training`). So a layer
    is in training mode only while recomputation is chosen, and not while it computes.
    """
    layers = [layer for model in models for layer in recomputable_layers(model)]
    for layer in layers:
        layer.gradient_checkpointing = True
        layer.training = True
        layer._gradient_checkpointing_func = partial(_recompute_later, layer)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = False
            layer.training = False
            del layer._gradient_checkpointing_func


def _recompute_later(layer: nn.Module, run: Callable[..., Any], *args: Any) -> Any:
    attending = attending_as_now()  # backward comes when the forward pass, and its attention, are over

    def without_dropout(*inputs: Any) -> Any:
        was = layer.training
        layer.training = False
        try:
            with attending():
                return run(*inputs)
        finally:  # the recomputation is cut short by an exception of its own
            layer.training = was

    return checkpoint(without_dropout, *args, use_reentrant=False)
