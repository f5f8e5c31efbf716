"""Models built from a configuration: policy, reference, critic and reward model as roles on one base."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from tinyrl.config.schema import Config
from tinyrl.models.adapter_files import check_rank
from tinyrl.models.batches import make_batch
from tinyrl.models.loading import load_causal_lm, load_start_adapter, lora_config, wrap_in_lora
from tinyrl.models.reward_model import (
    SequenceRewardModel,
    attach_reward_adapter,
    is_reward_adapter,
    load_classifier,
    load_reward_model,
)
from tinyrl.models.roles import Roles
from tinyrl.models.weight_checks import NoHead, few_tokens

KL_AT_START = {torch.float32: 1e-5, torch.bfloat16: 0.05}


def build_roles(config: Config, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False) -> Roles:
    """Read the base and put policy, reference and critic on it. LoRA's A is drawn from torch's generator."""
    model, lora = _base_of(config, config.model.path, dtype, trust_remote_code), config.lora
    if config.model.adapter is not None:
        wrapped = load_start_adapter(model, config.model.adapter)
    elif lora.enabled:
        wrapped = wrap_in_lora(
            model, lora_config(r=lora.r, alpha=lora.alpha, dropout=lora.dropout, target_modules=lora.target_modules)
        )
    else:
        wrapped = model
    needs_reference = config.uses("reference") and config.reference.kind == "auto"
    roles = Roles(wrapped, device=device, reference=needs_reference)
    if config.model.adapter is not None and needs_reference:
        roles.freeze_reference_adapter()
    if config.uses("critic"):
        _add_critic(roles, config, dtype, trust_remote_code)
    if config.model.gradient_checkpointing:
        roles.check_gradient_checkpointing()
    return roles


def _base_of(config: Config, path: str, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    return load_causal_lm(
        path,
        dtype=dtype,
        attention=config.model.attention,
        quantization=config.model.quantization,
        random_init=config.model.random_init,
        revision=config.model.revision if path == config.model.path else None,
        trust_remote_code=trust_remote_code,
    )


def _add_critic(roles: Roles, config: Config, dtype: torch.dtype, trust_remote_code: bool) -> None:
    """Add the critic of `critic.kind`; a separate one starts from critic.path, with its score head if there is one."""
    kind, path, lora = config.critic.kind, config.critic.path, config.lora
    assert kind is not None, "config/schema.py fills it in"
    peft_config = lora_config(r=lora.r, alpha=lora.alpha, dropout=0.0, target_modules=lora.target_modules)
    if kind != "separate":
        check_rank(roles.causal, peft_config, what="lora.r")
        roles.add_critic(kind, lora=peft_config)
        return
    head = None
    try:
        model = (
            load_classifier(path, dtype=dtype)
            if path
            else _base_of(config, config.model.path, dtype, trust_remote_code)
        )
        head = getattr(model, "score", None)
    except NoHead:  # a plain language model has no score head: its trunk is the critic's, under a zero head
        model = _base_of(config, path or config.model.path, dtype, trust_remote_code)
    if config.model.adapter is not None and path is None:
        model = load_start_adapter(model, config.model.adapter).merge_and_unload()  # pyright: ignore
    few_tokens(model, path=path or config.model.path)
    model.requires_grad_(not lora.enabled)
    roles.add_critic(kind, model=wrap_in_lora(model, peft_config) if lora.enabled else model.float())
    if head is not None and head.weight.shape[0] == 1:
        assert roles.value_head is not None
        roles.value_head.copy_from(head.weight.float(), head.bias)


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
    if not gap <= KL_AT_START.get(roles.causal.dtype, 1e-5):
        kind = f"adapter `{roles.reference_adapter}`" if roles.reference_adapter else "the base without adapters"
        kind = "a frozen copy of the model" if roles.reference_model is not None else kind
        raise ValueError(
            f"policy and reference differ before the first step (log-probabilities by {gap:.2g}); "
            f"the reference is {kind}"
        )
