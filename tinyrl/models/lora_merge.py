"""Linear layers merged with a LoRA adapter into one matrix, for sampling.

A LoRA branch at every token costs more than its arithmetic. Merging makes private copies and leaves the base alone:
adding B A in place and subtracting it again rounds the base a little at every update, visibly in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


def merged_weight(module: nn.Module, adapter: str | None) -> tuple[Tensor, Tensor | None]:
    """(weight, bias) of a linear layer as `adapter` sees it: W + (alpha / r) B A, added in float32. W itself, not a
    copy, where the adapter does not touch the layer.
    """
    base = module.get_base_layer() if isinstance(module, LoraLayer) else module
    weight: Tensor = base.weight  # pyright: ignore[reportAssignmentType]
    if adapter is not None and isinstance(module, LoraLayer) and adapter in module.lora_A:
        weight = weight.float() + module.get_delta_weight(adapter)  # pyright: ignore
    return weight, base.bias  # pyright: ignore[reportReturnType]


@contextmanager
def merged_layers(layers: Sequence[LoraLayer], adapter: str) -> Iterator[None]:
    """Inside, the layers compute with merged copies in place of base and branch. No gradients."""
    originals: list[tuple[LoraLayer, nn.Module, Tensor]] = []
    try:
        for layer in layers:
            if adapter in layer.lora_A:
                base = layer.get_base_layer()
                original: Tensor = base.weight  # pyright: ignore[reportAssignmentType]
                originals.append((layer, base, original))
                weight = merged_weight(layer, adapter)[0].to(original.dtype)  # pyright: ignore[reportArgumentType]
                base.weight = nn.Parameter(weight, requires_grad=False)
                layer._disable_adapters = True
        yield
    finally:
        for layer, base, original in originals:
            base.weight = original  # pyright: ignore[reportAttributeAccessIssue]
            layer._disable_adapters = False
