"""Models built from a configuration: policy, reference, critic and reward model as roles on one base.

What a critic starts from:

    critic.path             kind      backbone                                           value head
    -                       any       the policy's base                               zero
    a model                 separate  that model                                      its score head, or zero
    a reward run, LoRA      adapter   the reward model's adapter, on the same base    its score head
    a reward run, full      separate  that model                                      its score head
    a ppo run               its own   that run's critic                               that critic's

A reward model scores finished texts, so as a critic it is biased on unfinished ones until it has been trained,
which is what critic.warmup is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.models.checks import few_tokens
from tinyrl.models.loading import NoHead, check_vocabulary, load_causal_lm, load_tokenizer
from tinyrl.models.lora import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    check_rank,
    load_adapter_weights,
    load_start_adapter,
    lora_config,
    read_lora_config,
    wrap_in_lora,
)
from tinyrl.models.reading import reading
from tinyrl.models.reward_model import (
    SCORE_HEAD,
    SCORE_OFFSET,
    SequenceRewardModel,
    attach_reward_adapter,
    is_reward_adapter,
    load_classifier,
    load_reward_model,
)
from tinyrl.models.roles import MODEL, VALUE_HEAD, Roles, load_backbone, load_critic, load_head
from tinyrl.runs.resolve import critic_run
from tinyrl.text import shortened


def build_roles(
    config: Config, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False, teacher: bool = False
) -> Roles:
    """Read the base and put policy, reference, critic, and where it is wanted the teacher on it. LoRA's A is drawn from
    torch's generator.
    """
    model = load_base(config, config.model.path, dtype=dtype, trust_remote_code=trust_remote_code)
    lora = config.lora
    if config.model.adapter is not None:
        wrapped = load_start_adapter(model, config.model.adapter, dropout=lora.dropout)
    elif lora.enabled:
        wrapped = wrap_in_lora(model, fresh_adapter(config, dropout=lora.dropout))
    else:
        wrapped = model
    roles = Roles(wrapped, device=device, reference=config.has_reference)
    if config.model.adapter is not None and config.has_reference:
        roles.freeze_reference_adapter()
    if config.uses("critic"):
        add_critic(roles, config, dtype=dtype, trust_remote_code=trust_remote_code)
    if teacher and config.learns_from_teacher:
        add_teacher(roles, config, dtype=dtype, trust_remote_code=trust_remote_code)
    if config.model.gradient_checkpointing:
        roles.check_gradient_checkpointing()
    return roles


def add_teacher(roles: Roles, config: Config, *, dtype: torch.dtype, trust_remote_code: bool) -> None:
    """Give the roles the teacher that is an adapter on this base, or a model of its own. Raises ValueError where it
    does not fit, or reads other tokens.
    """
    path, kind = config.teacher.path, config.teacher.kind
    if kind == "adapter":
        assert path is not None
        if roles.peft is None:
            raise ValueError(f"teacher.path={path} is an adapter: it needs lora.enabled=true, on the base it is of")
        folder = starter_path(path) or Path(path).expanduser()
        with reading(f"teacher.path={path}: does not fit this base model", otherwise=ADAPTER_CONFIG):
            roles.add_adapter("teacher", config=read_lora_config(str(folder), roles.causal))
        load_adapter_weights(roles.peft, "teacher", folder / ADAPTER_FILE)
        roles.keep_trainable()
    elif kind == "model":
        assert path is not None
        model = load_causal_lm(
            path,
            dtype=dtype,
            quantization=config.teacher.quantization,
            trust_remote_code=trust_remote_code,
        )
        ours = load_tokenizer(config.model.path, revision=config.model.revision, trust_remote_code=trust_remote_code)
        theirs = load_tokenizer(path, trust_remote_code=trust_remote_code)
        check_same_tokens(ours.get_vocab(), theirs.get_vocab(), path=path)
        check_vocabulary(theirs, model, path=path)
        roles.add_teacher(model)


def check_same_tokens(ours: dict[str, int], theirs: dict[str, int], *, path: str) -> None:
    """Raise ValueError unless a teacher reads and says the same tokens by the same numbers."""
    if ours == theirs:
        return
    token = min(ours.items() ^ theirs.items(), key=lambda item: item[1])[0]
    raise ValueError(
        f"teacher.path={path} has another tokenizer ({shortened(repr(token))} is {theirs.get(token, 'no token')} there "
        f"and {ours.get(token, 'no token')} here), so it cannot say how likely the policy's tokens are"
    )


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


ScoreHead = tuple[Tensor, Tensor | None]  # weight (1, H), bias (1,)


def fresh_adapter(config: Config, *, dropout: float) -> LoraConfig:
    lora = config.lora
    return lora_config(r=lora.r, alpha=lora.alpha, dropout=dropout, target_modules=lora.target_modules)


def load_base(config: Config, path: str, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """The language model at `path`, read as the configuration says for model.path."""
    return load_causal_lm(
        path,
        dtype=dtype,
        quantization=config.model.quantization,
        random_init=config.model.random_init,
        revision=config.model.revision if path == config.model.path else None,
        trust_remote_code=trust_remote_code,
    )


def add_critic(roles: Roles, config: Config, *, dtype: torch.dtype, trust_remote_code: bool) -> None:
    """Give the roles the critic of `critic.kind`, started from `critic.path`. Raises ValueError for one that does not
    fit.
    """
    kind, path, lora = config.critic.kind, config.critic.path, config.lora
    assert kind is not None, "config/schema.py fills it in"
    run = critic_run(config)
    fresh = fresh_adapter(config, dropout=0.0)
    head = None
    if kind == "separate":
        model, head = _separate_model(config, dtype, trust_remote_code)
        few_tokens(model, path=path or config.model.path)
        model.requires_grad_(not lora.enabled)
        adapter = _adapter_config(run, path, model) or fresh
        roles.add_critic(kind, model=wrap_in_lora(model, adapter) if lora.enabled else model.float())
    else:
        adapter = (_adapter_config(run, path, roles.causal) if kind == "adapter" else None) or fresh
        check_rank(roles.causal, adapter, what="lora.r")
        roles.add_critic(kind, lora=adapter)
    if head is not None:
        assert roles.value_head is not None
        roles.value_head.copy_from(*head)
    if run is not None and path is not None:
        _load_from_run(roles, run, Path(path))


def _separate_model(
    config: Config, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, ScoreHead | None]:
    """The model of a separate critic, before adapters of its own, and the score head that it comes with."""
    path, run = config.critic.path, critic_run(config)
    base = path or config.model.path
    if run is not None and path is not None:
        model, _ = _separate_model(run, dtype, trust_remote_code)
        if not run.lora.enabled:
            load_backbone(model, Path(path) / "critic" / MODEL)
        return model, None
    try:
        model = load_classifier(path, dtype=dtype) if path else None
    except NoHead:  # a plain language model has no score head: its backbone is the critic's, under a zero head
        model = None
    head = _score_head(model)
    model = model or load_base(config, base, dtype=dtype, trust_remote_code=trust_remote_code)
    if config.model.adapter is not None and path is None:
        model = load_start_adapter(model, config.model.adapter).merge_and_unload()  # pyright: ignore
    return model, head


def _score_head(model: Any) -> ScoreHead | None:
    """The score head of a classification model with one label; tinyrl's keep their bias in the configuration."""
    head = getattr(model, "score", None)
    if head is None or head.weight.shape[0] != 1:
        return None
    offset = getattr(model.config, SCORE_OFFSET, None)
    return head.weight.float(), head.bias if offset is None else torch.tensor([float(offset)])


def _adapter_config(run: Config | None, path: str | None, model: PreTrainedModel) -> LoraConfig | None:
    """The configuration of the adapter that a run's critic, or its reward model, consists of."""
    if run is None or path is None or not run.lora.enabled:
        return None
    return read_lora_config(f"{path}/critic" if run.uses("critic") else path, model)


def _load_from_run(roles: Roles, run: Config, folder: Path) -> None:
    """Weights and head of a ppo run's critic, or of a reward model of adapters."""
    assert roles.value_head is not None
    if not run.trains.policy:
        assert roles.peft is not None
        load_adapter_weights(roles.peft, "critic", folder / ADAPTER_FILE)
        load_head(roles.value_head, folder / SCORE_HEAD)
    elif isinstance(roles.critic_model, PeftModel) and not run.lora.enabled:
        load_head(roles.value_head, folder / VALUE_HEAD)  # its backbone was read before adapters were put on it
    else:
        load_critic(roles, folder)
