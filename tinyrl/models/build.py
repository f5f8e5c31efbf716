"""Models built from a configuration: policy, reference, critic and reward model as roles on one base."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tinyrl.config.schema import Config
from tinyrl.models.batches import make_batch
from tinyrl.models.critic import add_critic, load_base
from tinyrl.models.loading import load_start_adapter, lora_config, wrap_in_lora
from tinyrl.models.reward_model import (
    SequenceRewardModel,
    attach_reward_adapter,
    is_reward_adapter,
    load_reward_model,
)
from tinyrl.models.roles import Roles

KL_AT_START = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def build_roles(config: Config, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False) -> Roles:
    """Read the base and put policy, reference and critic on it. LoRA's A is drawn from torch's generator."""
    model = load_base(config, config.model.path, dtype=dtype, trust_remote_code=trust_remote_code)
    lora = config.lora
    if config.model.adapter is not None:
        wrapped = load_start_adapter(model, config.model.adapter)
    elif lora.enabled:
        wrapped = wrap_in_lora(
            model, lora_config(r=lora.r, alpha=lora.alpha, dropout=lora.dropout, target_modules=lora.target_modules)
        )
    else:
        wrapped = model
    roles = Roles(wrapped, device=device, reference=config.has_reference)
    if config.model.adapter is not None and config.has_reference:
        roles.freeze_reference_adapter()
    if config.uses("critic"):
        add_critic(roles, config, dtype=dtype, trust_remote_code=trust_remote_code)
    if config.model.gradient_checkpointing:
        roles.check_gradient_checkpointing()
    return roles


def build_reward_model(
    config: Config, roles: Roles, *, dtype: torch.dtype, trust_remote_code: bool = False
) -> SequenceRewardModel | None:
    """The reward model if it is a model of its own; an adapter is put on the shared base instead, and None returned."""
    path = config.reward.model
    if path is None:
        return None
    if is_reward_adapter(path):
        attach_reward_adapter(roles, path)
        return None
    label, device = config.reward.model_label, roles.device
    return load_reward_model(path, dtype=dtype, label=label, device=device, trust_remote_code=trust_remote_code)


def check_reference(
    roles: Roles, prompts: list[list[int]], *, temperature: float, autocast: Callable[..., Any]
) -> None:
    """Check that policy and reference agree before the first step. Raises ValueError, naming the reference, if not."""
    if not roles.has_reference:
        return
    shortened = [prompt[:32] for prompt in prompts[:4]]
    batch = make_batch(shortened, [prompt[-8:] for prompt in shortened], device=roles.device)
    logprobs = []
    for role in ("policy", "reference"):
        with torch.no_grad(), roles.acting(role), autocast():
            logprobs.append(roles.logprobs(role, batch, temperature=temperature)[0])
    gap = float((logprobs[0] - logprobs[1]).abs().max())
    if not gap <= KL_AT_START.get(roles.dtype, 1e-5):
        raise ValueError(
            f"policy and reference differ before the first step (log-probabilities by {gap:.2g}); "
            f"the reference is {reference_of(roles)}; reference.kind=none trains without one, and model.dtype=float32 "
            "shows whether rounding is the reason"
        )


def reference_of(roles: Roles) -> str:
    """Which model the reference is, in words."""
    if roles.reference_model is not None:
        return "a frozen copy of the model"
    return f"adapter `{roles.reference_adapter}`" if roles.reference_adapter else "the base without adapters"
