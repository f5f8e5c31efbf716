"""Score given tokens: the log-probability of each under a role, and the likeliest tokens at its place."""

from __future__ import annotations

import torch

from tinyrl.generation.request import SampledRole
from tinyrl.models.batch import batch_of, examples, library_states
from tinyrl.models.device import HALVES
from tinyrl.models.logprobs import head_of
from tinyrl.models.policy import Policy
from tinyrl.models.states import backbone_of

SCORED = 256  # positions whose logits are there at a time
LEAST = -9999.0  # in place of minus infinity, which JSON has not


@torch.inference_mode()
def logprobs_of_text(
    policy: Policy, tokens: list[int], *, role: SampledRole, temperature: float, likeliest: int = 1
) -> tuple[list[float | None], list[list[tuple[int, float]]]]:
    """Score tokens under softmax(logits / temperature) by one forward pass: return the log-probability of each given
    those before it, and the likeliest tokens at its place in descending order (None and none for the first token).
    """
    logprobs = list[float | None]([None])
    places = list[list[tuple[int, float]]]([[]])
    batch = batch_of(examples([tokens], [[]]), device=policy.device, images=policy.images)
    ids = batch.input_ids
    half = policy.dtype in HALVES
    with policy.acting(role) as model, torch.autocast(policy.device.type, dtype=policy.dtype, enabled=half):
        states = library_states(backbone_of(model), batch)
        for part, following in zip(states[:-1].split(SCORED), ids[0, 1:].split(SCORED), strict=True):
            log_p = (head_of(model).logits(part).float() / temperature).log_softmax(-1).clamp_min(LEAST)
            logprobs += log_p.gather(1, following.unsqueeze(1)).squeeze(1).tolist()
            most, which = log_p.topk(min(likeliest, log_p.shape[-1]))
            places += [[*zip(*row, strict=True)] for row in zip(which.tolist(), most.tolist(), strict=True)]
    return logprobs, places
