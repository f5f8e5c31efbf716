"""The frozen head by one pass over the logits of a chunk: log-probability and entropy by one kernel, and the
derivative with respect to the logits, written in half precision, by another. Products are torch's.

Today's path (tinyrl/models/logprobs.py) reads and writes matrices of a chunk's size eleven times, in an update
fourteen. Heads with a bias or a soft-cap, and entropies with a gradient, are not computed here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinyrl.models.logprobs import Head

CHUNK = 2048  # tokens whose logits are there at a time


class OnePassLogprobs(torch.autograd.Function):
    """Takes the place of `_FrozenHeadLogprobs`, with its arguments and results."""

    @staticmethod
    def forward(ctx, states: Tensor, head: Head, targets: Tensor, temperature: float, entropy_grad: bool):  # pyright: ignore
        from benchmarks.gpu import kernels

        assert head.bias is None, "a head with a bias"
        assert head.softcap is None, "a head with a soft-cap"
        assert not entropy_grad, "an entropy with a gradient"
        logprobs = states.new_empty(len(states), dtype=torch.float32)
        entropies = torch.empty_like(logprobs)
        d_states = torch.empty_like(states) if states.requires_grad else None
        for start in range(0, len(states), CHUNK):
            chunk = slice(start, start + CHUNK)
            z = head.logits(states[chunk])
            logprobs[chunk], entropies[chunk], log_totals = kernels.log_probabilities(
                z, targets[chunk], temperature=temperature
            )
            if d_states is not None:
                slope = head.scale / temperature
                g = kernels.gradient(
                    z, targets[chunk], log_totals, temperature=temperature, slope=slope, dtype=head.weight.dtype
                )
                d_states[chunk] = (g @ head.weight).to(states.dtype)
        ctx.save_for_backward(d_states)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (d_states,) = ctx.saved_tensors
        return grad.unsqueeze(-1).to(d_states.dtype) * d_states, None, None, None, None
