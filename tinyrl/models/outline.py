"""Models without numbers: a configuration's roles on the meta device, where every shape is known and none takes memory.

What a run computes can be tried on them before any weight is read (models/live_bytes.py counts what it would take).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from tinyrl.config.schema import Config
from tinyrl.models.loading import (
    POLICY_ADAPTER,
    load_causal_lm,
    load_model_config,
    lora_config,
    read_lora_config,
    wrap_in_lora,
)
from tinyrl.models.reading import reading
from tinyrl.models.reward_model import is_reward_adapter
from tinyrl.models.roles import Roles
from tinyrl.models.value_head import ValueHead

META = torch.device("meta")
FOUR_BIT = 0.5 + 0.127 / 8  # bytes a weight: NF4, and its scales, which are quantised again (2305.14314, section 3)


def is_outline(roles: Roles) -> bool:
    """Whether these models have no numbers."""
    return roles.device.type == "meta"


def outline_roles(config: Config, *, dtype: torch.dtype, trust_remote_code: bool = False) -> Roles:
    """Policy, reference, critic and reward adapter as models/build.py makes them, without numbers; a 4-bit base is in
    `dtype`. Draws no random number. Raises ValueError for a model that cannot be read.
    """
    with _without_numbers():
        model = _language_model(config, config.model.path, dtype, trust_remote_code)
        fresh = lora_config(
            r=config.lora.r,
            alpha=config.lora.alpha,
            dropout=config.lora.dropout,
            target_modules=config.lora.target_modules,
        )
        start = None if config.model.adapter is None else read_lora_config(config.model.adapter, model)
        if start is not None:
            with reading(f"model.adapter={config.model.adapter}: does not fit this base model"):
                wrapped = wrap_in_lora(model, start)
        else:
            wrapped = wrap_in_lora(model, fresh) if config.lora.enabled else model
        roles = Roles(wrapped, device=META, reference=config.has_reference)
        if start is not None and config.has_reference:
            roles.freeze_reference_adapter()
        if config.uses("critic"):
            _add_critic(roles, config, dtype, trust_remote_code)
        path = config.reward.model if config.uses("reward") else None
        if path is not None and is_reward_adapter(path):
            roles.add_adapter("reward", config=read_lora_config(path, roles.causal))
            roles.score_head = ValueHead(roles.hidden_size("policy")).requires_grad_(False)
            roles.keep_trainable()
        if config.method == "reward":
            roles.train_score_head()
        if config.lora.dropout > 0:
            roles.use_lora_dropout()
    return roles


def outline_reward_model(
    config: Config, *, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel | None:
    """The reward model where it is a model of its own, without numbers; None where there is none."""
    path = config.reward.model if config.uses("reward") else None
    if path is None or is_reward_adapter(path):
        return None
    described = load_model_config(path, trust_remote_code=trust_remote_code)
    with _without_numbers():
        return AutoModelForSequenceClassification.from_config(
            described, dtype=dtype, trust_remote_code=trust_remote_code
        )


def four_bit_bytes(roles: Roles) -> int:
    """Bytes that a base held in 4 bits has: its linear layers, the head excepted, in FOUR_BIT, the rest as it is."""
    head = roles.causal.get_output_embeddings()
    layers = [m for m in roles.causal.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    names = (POLICY_ADAPTER, "reference", "critic", "reward")
    adapters = {id(p) for name in names for p in roles.adapter_parameters(name).values()}
    packed = {id(m.weight): m.weight.numel() for m in layers if id(m.weight) not in adapters}
    rest = [p for p in roles.causal.parameters() if id(p) not in adapters and id(p) not in packed]
    return int(FOUR_BIT * sum(packed.values())) + sum(p.numel() * p.itemsize for p in rest)


def _add_critic(roles: Roles, config: Config, dtype: torch.dtype, trust_remote_code: bool) -> None:
    kind, lora = config.critic.kind, config.lora
    assert kind is not None, "config/schema.py fills it in"
    adapter = lora_config(r=lora.r, alpha=lora.alpha, dropout=0.0, target_modules=lora.target_modules)
    if kind != "separate":
        roles.add_critic(kind, lora=adapter)
        return
    model = _language_model(config, config.critic.path or config.model.path, dtype, trust_remote_code)
    model.requires_grad_(not lora.enabled)
    roles.add_critic(kind, model=wrap_in_lora(model, adapter) if lora.enabled else model.float())


def _language_model(config: Config, path: str, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    return load_causal_lm(
        path,
        dtype=dtype,
        attention=config.model.attention,
        random_init=True,
        revision=config.model.revision if path == config.model.path else None,
        trust_remote_code=trust_remote_code,
    )


@contextmanager
def _without_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), META:
        yield
