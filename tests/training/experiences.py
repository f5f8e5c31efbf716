"""Samples with inputs of a loss, for tests of what reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from tinyrl.generation.sample import Sample, loss_mask, sampled_logprobs
from tinyrl.training.policy_loss import Experience, LossInputs, TeacherOutputs


def experience_of(
    samples: list[Sample],
    *,
    advantage: Tensor | None = None,
    old: Tensor | None = None,
    reference: Tensor | None = None,
    values: Tensor | None = None,
    returns: Tensor | None = None,
    teacher: TeacherOutputs | None = None,
) -> Experience:
    """Samples whose advantages (B,) or (B, T) are 0 if they are not given."""
    mask = loss_mask(samples)
    advantage = torch.zeros(mask.shape) if advantage is None else advantage
    inputs = LossInputs(
        mask=mask,
        sampled=sampled_logprobs(samples),
        advantage=advantage if advantage.dim() == 2 else advantage.unsqueeze(1).expand(mask.shape),
        old=old,
        reference=reference,
        values=values,
        returns=returns,
    )
    return Experience(samples, inputs, teacher)
