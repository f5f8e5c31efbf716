"""The critic's head: one float32 linear map from a hidden state to a value, zero at the start.

A zero head predicts 0 everywhere, so the first advantages are the rewards themselves and the first value loss is
their variance: a random head would add noise to both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueHead(nn.Linear):
    """states (N, H) in any float dtype -> values (N,) in float32."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        with torch.autocast(device_type="cpu" if kind == "meta" else kind, enabled=False):  # meta has no autocast
            return super().forward(input.float()).squeeze(-1)

    def copy_from(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Start from a one-label head, weight (1, H), for instance a reward model's."""
        if weight.shape != self.weight.shape:
            raise ValueError(
                f"a head of shape {tuple(weight.shape)} does not fit a value head of shape {tuple(self.weight.shape)}"
            )
        with torch.no_grad():
            self.weight.copy_(weight)
            if bias is not None:
                self.bias.copy_(bias)
