"""Layers merged with a LoRA adapter into one matrix, for sampling.

A LoRA branch at every token costs more than its arithmetic. Merging makes private copies and leaves the base alone:
adding B A in place and subtracting it again rounds the base a little at every update, visibly in bfloat16. A copy too
should be float32: a bfloat16 weight is spaced wider than the first updates are large (generation/weights.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn


def adapted_parameter(layer: LoraLayer) -> tuple[nn.Module, str]:
    """The module below an adapter and the name of its parameter that is adapted: `weight` of a linear layer; of
    experts that stand in one tensor (Qwen3-MoE) PEFT adapts the tensor itself.
    """
    return layer.get_base_layer(), layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"


def is_plain_lora(layer: LoraLayer) -> bool:
    """Whether W + (alpha / r) B A is all that the layer's adapters compute (DoRA scales columns, a bias adds)."""
    return not layer.lora_variant and not any(layer.lora_bias.values())


def merged_weight(module: nn.Module, adapter: str | None) -> tuple[Tensor, Tensor | None]:
    """(weight, bias) of a linear layer as `adapter` sees it: W + (alpha / r) B A, added in float32. W itself, not a
    copy, where the adapter does not touch the layer.
    """
    base = module.get_base_layer() if isinstance(module, LoraLayer) else module
    weight: Tensor = base.weight  # pyright: ignore[reportAssignmentType]
    if adapter is not None and isinstance(module, LoraLayer) and adapter in module.lora_A:
        weight = weight.float() + module.get_delta_weight(adapter)  # pyright: ignore
    return weight, base.bias  # pyright: ignore[reportReturnType]


def lora_rank(module: nn.Module) -> int:
    """The largest rank of the adapters on a layer; 0 where there is none."""
    return max(module.r.values(), default=0) if isinstance(module, LoraLayer) else 0


def lora_matrices(module: nn.Module, adapter: str | None) -> tuple[Tensor, Tensor] | None:
    """A (r, in) and (alpha / r) B (out, r) of a linear layer, in float32: with them it computes W + B A. None where the
    adapter does not touch the layer.
    """
    if adapter is None or not isinstance(module, LoraLayer) or adapter not in module.lora_A:
        return None
    a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
    return a.detach(), b.detach() * module.scaling[adapter]  # pyright: ignore


@contextmanager
def merged_layers(layers: Sequence[LoraLayer], adapter: str) -> Iterator[None]:
    """Inside, the layers compute with merged copies in place of base and branch. No gradients."""
    originals: list[tuple[LoraLayer, nn.Module, str, Tensor]] = []
    try:
        for layer in layers:
            if adapter in layer.lora_A:
                base, name = adapted_parameter(layer)
                original: Tensor = getattr(base, name)
                originals.append((layer, base, name, original))
                weight = original.float() + layer.get_delta_weight(adapter)  # pyright: ignore
                setattr(base, name, nn.Parameter(weight.to(original.dtype), requires_grad=False))
                layer._disable_adapters = True
        yield
    finally:
        for layer, base, name, original in originals:
            setattr(base, name, original)
            layer._disable_adapters = False
