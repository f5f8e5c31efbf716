"""The LoRA adapters on one base, and which of them is active. This is the only place that switches adapters.

PEFT's switching turns off the gradients of other adapters, and a backward pass after a switch silently loses gradients.
So one adapter is active at a time: forward, backward, then switch. Which parameters train is for the roles to say
(policy.py), whatever is active.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyrl.models.device import move_to_device
from tinyrl.models.experts import compute_experts
from tinyrl.models.lora import POLICY_ADAPTER, base_of, config_of, without_refused


class Adapters:
    """The adapters of a model, by name. peft: PEFT's model of the base, None for a model without adapters."""

    def __init__(self, model: PreTrainedModel | PeftModel, *, device: torch.device) -> None:
        self.base = base_of(model)
        self.peft = model if isinstance(model, PeftModel) else None
        self.device = device
        self._collect()

    def _collect(self) -> None:
        """Collect the adapted layers: a new adapter may sit in layers that had none, its dropout is on, and PEFT's
        bookkeeping may have changed what is active. (PEFT makes its parameters float32.)
        """
        move_to_device(self.base, self.device).eval()
        compute_experts(self.base)
        self._layers = [module for module in self.base.modules() if isinstance(module, LoraLayer)]
        self._switch(POLICY_ADAPTER)

    def add(self, name: str, *, config: LoraConfig) -> None:
        """Add an adapter to the base. PEFT changes what is trainable, so the roles' parameters are to be kept trainable
        anew (Policy.keep_trainable).
        """
        assert self.peft is not None
        fresh = copy.deepcopy(without_refused(config, self.base))
        fresh.fan_in_fan_out = config_of(self.peft, POLICY_ADAPTER).fan_in_fan_out
        self.peft.add_adapter(name, fresh)
        self._collect()

    def add_copy(self, name: str) -> None:
        """Add an adapter that is a copy of the policy's as it is now."""
        assert self.peft is not None
        self.add(name, config=config_of(self.peft, POLICY_ADAPTER))
        copies = self.parameters(name).values()
        originals = self.parameters(POLICY_ADAPTER).values()
        with torch.no_grad():
            for copied, parameter in zip(copies, originals, strict=True):
                copied.copy_(parameter)

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Return the parameters of one adapter, by their names in the base model."""
        return {n: p for n, p in self.base.named_parameters() if f".{name}." in f".{n}." and "lora_" in n}

    def layers(self, name: str) -> list[LoraLayer]:
        """List the layers that an adapter changes."""
        return [layer for layer in self._layers if name in layer.lora_A]

    def share(self, name: str) -> float:
        """Return the share of the base's weights that an adapter changes."""
        adapted = sum(_count(_adapted_weight(layer)) for layer in self.layers(name))
        return adapted / sum(_count(weight) for n, weight in self.base.named_parameters() if "lora_" not in n)

    @contextmanager
    def active(self, name: str | None, *, dropout: bool) -> Iterator[None]:
        """Compute with one adapter (None: the base as it is), then with the policy's again; forward AND backward belong
        inside. dropout: whether LoRA's is on.
        """
        self._switch(name, dropout=dropout)
        try:
            yield
        finally:
            self._switch(POLICY_ADAPTER)

    def _switch(self, name: str | None, *, dropout: bool = False) -> None:
        for layer in self._layers:
            layer._disable_adapters = name is None  # PEFT's own switch, without its side effects on requires_grad
            if name is not None:
                layer._active_adapter = [name]
            layer.lora_dropout.train(dropout)


def _adapted_weight(layer: LoraLayer) -> Tensor:
    return layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight  # pyright: ignore


def _count(weight: Tensor) -> int:
    """Return how many weights a parameter holds; one in 4 bits is packed."""
    return getattr(weight, "quant_state", weight).shape.numel()
