"""A frozen copy of a model in half precision that computes, under autocast, what float32 weights of it would.

A policy whose every weight is trained has float32 weights, its reference the half-precision ones that they came from.
Autocast casts the operands of products, so there both compute the same. Whatever else reads a weight (norms, tables of
embeddings and their scales, experts, convolutions by hand) computes in the weight's dtype, and has to see float32.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tinyrl.models.device import HALVES, move_to_device

PRODUCTS = (nn.Linear, Conv1D, _ConvNd)  # whose weights autocast casts


def frozen_copy(model: PreTrainedModel, device: torch.device, *, shared: Sequence[nn.Module] = ()) -> PreTrainedModel:
    """Copy a model in the dtype that it has now, never to be trained. Vectors become float32, as they are small; what
    is larger and no operand of a product is widened while its layer runs. shared: parts that are never trained in the
    model itself, and are in the copy as they are.
    """
    copied = copy.deepcopy(model, {id(part): part for part in shared})
    copied = move_to_device(copied, device).requires_grad_(False).eval()
    if copied.dtype == torch.float32:
        return copied
    as_they_are = {layer for part in shared for layer in part.modules()}
    for layer in copied.modules():
        if layer in as_they_are:
            continue
        if type(layer) is nn.Embedding:
            layer.register_forward_hook(lambda _layer, _ids, embedded: embedded.float())
        elif not isinstance(layer, PRODUCTS):
            _widen(layer)
    return copied


def _widen(layer: nn.Module) -> None:
    """Have a layer read its own parameters in float32."""
    halves = [parameter for parameter in layer.parameters(recurse=False) if parameter.dtype in HALVES]
    larger = [parameter for parameter in halves if parameter.dim() > 1]
    for parameter in halves:
        if parameter.dim() <= 1:
            parameter.data = parameter.data.float()
    originals: dict[nn.Parameter, Tensor] = {}

    def widen(*_: Any) -> None:
        for parameter in larger:
            originals[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def restore(*_: Any) -> None:
        for parameter, data in originals.items():
            parameter.data = data
        originals.clear()

    if larger:
        layer.register_forward_pre_hook(widen)
        layer.register_forward_hook(restore, always_call=True)
