"""Models built from a configuration: policy, reference, critic, teacher and reward model as roles on one base.

What a critic starts from:

    critic.path             kind      backbone                                           value head
    -                       any       the policy's base                               zero
    a model                 separate  that model                                      its score head, or zero
    a reward run, LoRA      adapter   the reward model's adapter, on the same base    its score head
    a reward run, full      separate  that model                                      its score head
    a ppo run               its own   that run's critic                               that critic's

A reward model scores finished texts, so as a critic it is biased on unfinished ones until it has been trained,
which is what critic.warmup_steps is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.models.checks import few_tokens
from tinyrl.models.device import Device
from tinyrl.models.image_inputs import ImageExpander, ImageInputs
from tinyrl.models.loading import (
    NoHead,
    check_has_tower,
    check_vocabulary,
    load_causal_lm,
    load_image_text_model,
    load_model_config,
    load_tokenizer,
)
from tinyrl.models.logprobs import ValueHead
from tinyrl.models.lora import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    check_rank,
    load_adapter_weights,
    load_start_adapter,
    lora_config,
    on_language_model,
    read_lora_config,
    with_experts,
    wrap_in_lora,
)
from tinyrl.models.policy import Policy
from tinyrl.models.policy_files import MODEL, VALUE_HEAD, load_weights, restore_policy
from tinyrl.models.processors import differences, load_processor
from tinyrl.models.reading import is_reward_adapter, reading
from tinyrl.models.reward_model import (
    SCORE_HEAD,
    SCORE_OFFSET,
    SequenceRewardModel,
    load_classifier,
    load_reward_model,
)
from tinyrl.models.states import backbone_of
from tinyrl.models.towers import share_towers
from tinyrl.runs.resolve import critic_run
from tinyrl.text import truncate


def build_policy(
    config: Config,
    *,
    tokenizer: PreTrainedTokenizerBase,
    device: Device,
    trust_remote_code: bool = False,
    teacher: bool = False,
) -> Policy:
    """Load the base and put policy, reference, critic and teacher on it. LoRA's A is drawn from torch's generator."""
    dtype = device.dtype
    with_images = bool(config.model.with_images)
    if teacher and config.learns_from_teacher:
        _check_top_k(config, trust_remote_code)
    # Before the weights, so that a model without one is refused at once.
    processor = _load_processor(config, tokenizer) if with_images else None
    model: Any = load_base(config, config.model.path, dtype=dtype, trust_remote_code=trust_remote_code)
    if config.model.adapter is not None:
        dropout = config.lora.dropout
        model = load_start_adapter(model, config.model.adapter, dropout=dropout, with_images=with_images)
    elif config.lora.enabled:
        model = wrap_in_lora(model, _fresh_adapter(config, model, dropout=config.lora.dropout))
    policy = Policy(model, config=config, tokenizer=tokenizer, device=device)
    if processor is not None:
        policy.images = image_inputs(policy, config, processor)
    if config.model.adapter is not None and config.has_reference:
        policy.freeze_reference_adapter()
    if config.uses("critic"):
        _add_critic(policy, config, dtype, trust_remote_code)
    if teacher and config.learns_from_teacher and config.teacher.path is not None:
        _add_teacher(policy, config, config.teacher.path, dtype, trust_remote_code)
    if config.model.gradient_checkpointing:
        policy.check_gradient_checkpointing()
    return policy


def _load_processor(config: Config, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Load the processor of the policy's base. Raises ValueError where there is none, or the base has no tower."""
    check_has_tower(load_model_config(config.model.path, revision=config.model.revision))
    return load_processor(config.model.path, tokenizer=tokenizer, revision=config.model.revision)


def image_inputs(policy: Policy, config: Config, processor: ProcessorMixin) -> ImageInputs:
    """Return what turns the images of prompts into inputs of the policy."""
    tokenizer = policy.tokenizer
    assert isinstance(tokenizer.eos_token_id, int)
    expander = ImageExpander(
        processor,
        tokenizer,
        placeholder=policy.causal.config.image_token_id,
        max_pixels=config.task.max_pixels,
    )
    cache_bytes = int(config.model.image_cache_gb * 1e9)
    return ImageInputs(policy.backbone("policy"), expander, cache_bytes=cache_bytes, unread=tokenizer.eos_token_id)


def load_base(config: Config, path: str, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Load the model at `path` as the configuration has it for model.path: with its tower where rows have images."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "quantization": config.model.quantization,
        "random_init": config.model.random_init,
        "revision": config.model.revision if path == config.model.path else None,
        "trust_remote_code": trust_remote_code,
    }
    load = load_image_text_model if config.model.with_images else load_causal_lm
    return load(path, **options)


def _fresh_adapter(config: Config, base: PreTrainedModel, *, dropout: float) -> LoraConfig:
    lora = config.lora
    adapter = lora_config(r=lora.r, alpha=lora.alpha, dropout=dropout, target_modules=lora.target_modules)
    adapter = with_experts(adapter, base, lora.target_parameters)
    return on_language_model(adapter, base) if config.model.with_images else adapter


def _read_adapter(config: Config, folder: Path, base: PreTrainedModel) -> LoraConfig:
    """Read the shape of an adapter that is put on a base, of which a vision tower has none."""
    adapter = read_lora_config(str(folder), base)
    return on_language_model(adapter, base) if config.model.with_images else adapter


def _add_frozen_adapter(policy: Policy, name: str, folder: Path, *, setting: str) -> None:
    """Put a frozen adapter on the policy's base. Raises ValueError where it does not fit."""
    if policy.adapters.peft is None:
        raise ValueError(f"{setting} is an adapter: it needs lora.enabled=true, on its own base")
    config = _read_adapter(policy.config, folder, policy.causal)
    with reading(f"{setting}: {ADAPTER_CONFIG} does not fit this base model"):
        policy.adapters.add(name, config=config)
    load_adapter_weights(policy.adapters.peft, name, folder / ADAPTER_FILE)
    policy.keep_trainable()


# ---- teacher and reward model ----


def _check_top_k(config: Config, trust_remote_code: bool) -> None:
    """Raise ValueError where teacher.top_k is more than all tokens of student or teacher, by their config.json."""
    top_k = config.teacher.top_k
    base = config.model
    if top_k is None:
        return
    configs = [load_model_config(base.path, revision=base.revision, trust_remote_code=trust_remote_code)]
    if config.teacher.kind == "model":
        configs.append(load_model_config(str(config.teacher.path), trust_remote_code=trust_remote_code))
    tokens = min(each.get_text_config().vocab_size for each in configs)
    if top_k > tokens:
        raise ValueError(f"teacher.top_k={top_k} is more than the {tokens} tokens of the vocabulary; null takes all")


def _add_teacher(policy: Policy, config: Config, path: str, dtype: torch.dtype, trust_remote_code: bool) -> None:
    """Give the policy the teacher that is an adapter on this base, or a model of its own. Raises ValueError where it
    does not fit, or has other tokens.
    """
    if config.teacher.kind == "adapter":
        folder = starter_path(path) or Path(path).expanduser()
        _add_frozen_adapter(policy, "teacher", folder, setting=f"teacher.path={path}")
    elif config.teacher.kind == "model":
        tokenizer = _with_our_tokens(config, path, setting=f"teacher.path={path}", trust_remote_code=trust_remote_code)
        load = load_image_text_model if config.model.with_images else load_causal_lm
        model = load(path, dtype=dtype, quantization=config.teacher.quantization, trust_remote_code=trust_remote_code)
        check_vocabulary(tokenizer, model, path=path)
        policy.add_teacher(model)
        if config.model.with_images:
            policy.teacher_images = _teacher_images(policy, model, path)


def _teacher_images(policy: Policy, model: PreTrainedModel, path: str) -> ImageInputs:
    """Return the images of prompts for a teacher with a tower of its own. Raises ValueError where its processor makes
    other tokens or pixels of an image than the policy's, since both read the same prompts.
    """
    ours = policy.images
    assert ours is not None
    processor = load_processor(path, tokenizer=policy.tokenizer, revision=None)
    differing = differences(ours.expander.processor, processor)
    if model.config.image_token_id != ours.expander.placeholder:
        differing.append("image_token_id")
    if differing:
        raise ValueError(
            f"teacher.path={path} reads images otherwise than model.path ({', '.join(differing)}), so it cannot read "
            "the policy's prompts"
        )
    return ImageInputs(policy.backbone("teacher"), ours.expander, cache_bytes=ours.cache_bytes, unread=ours.unread)


def _with_our_tokens(
    config: Config, path: str, *, setting: str, trust_remote_code: bool, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of another model that reads the policy's tokens. Raises ValueError where a token of either
    has another id, or none, in the other.
    """
    base = config.model
    options = {"trust_remote_code": trust_remote_code, "needs_eos": False}
    tokenizer = load_tokenizer(path, revision=revision, **options)
    theirs = tokenizer.get_vocab()
    ours = load_tokenizer(base.path, revision=base.revision, **options).get_vocab()
    if ours != theirs:
        token = min(ours.items() ^ theirs.items(), key=lambda item: item[1])[0]
        raise ValueError(
            f"{setting} has another tokenizer ({truncate(repr(token))} is token {theirs.get(token)} there and "
            f"{ours.get(token)} here), so it cannot read the policy's tokens"
        )
    return tokenizer


def build_reward_model(
    config: Config, policy: Policy, *, dtype: torch.dtype, trust_remote_code: bool = False
) -> SequenceRewardModel | None:
    """Load the reward model if it is a model of its own; an adapter is put on the shared base, and None returned."""
    path = config.reward.model
    if path is None:
        return None
    if is_reward_adapter(path):
        attach_reward_adapter(policy, path)
        return None
    label = config.reward.model_label
    device = policy.device
    return load_reward_model(path, dtype=dtype, label=label, device=device, trust_remote_code=trust_remote_code)


def attach_reward_adapter(policy: Policy, path: str) -> None:
    """Put a reward adapter and its head (written by `tinyrl train reward`) on the policy's base, frozen."""
    folder = Path(path).expanduser()
    if not (folder / SCORE_HEAD).is_file():
        raise ValueError(f"reward.model={path}: {SCORE_HEAD} is missing, so this adapter is a policy")
    _add_frozen_adapter(policy, "reward", folder, setting=f"reward.model={path}")
    head = ValueHead(policy.hidden_size("policy"))
    load_weights(head, folder / SCORE_HEAD)
    policy.add_score_head(head)


# ---- critic ----


def _add_critic(policy: Policy, config: Config, dtype: torch.dtype, trust_remote_code: bool) -> None:
    """Give the policy the critic of `critic.kind`, started from `critic.path`. Raises ValueError for one that does not
    fit.
    """
    kind = config.critic.kind
    run = critic_run(config)
    assert kind is not None, "config/schema.py fills it in"
    if config.critic.path is not None:
        # The critic of a run reads the tokens of that run's policy; its checkpoint may be of adapters alone.
        _with_our_tokens(
            config,
            config.critic.path if run is None else run.model.path,
            revision=None if run is None else run.model.revision,
            setting=f"critic.path={config.critic.path}",
            trust_remote_code=trust_remote_code,
        )
    if kind == "separate":
        model = _separate_model(config, dtype, trust_remote_code)
        _add_separate_critic(policy, config, model)
        _start_from_score_head(policy, model)
    else:
        adapter = _critic_adapter(config, policy.causal)
        check_rank(policy.causal, adapter, what="lora.r")
        policy.add_critic(kind, lora=adapter)
    if run is not None and run.trains.policy:
        _start_from_critic_of(policy, run, Path(str(config.critic.path)))
    elif run is not None:
        _start_from_reward_adapter(policy, Path(str(config.critic.path)))


def _critic_adapter(config: Config, base: PreTrainedModel) -> LoraConfig:
    """Return the shape of the critic's adapter: that of the run it starts from, else a fresh one."""
    run = critic_run(config)
    if run is None or not run.lora.enabled or config.critic.kind not in ("adapter", "separate"):
        return _fresh_adapter(config, base, dropout=0.0)
    folder = Path(str(config.critic.path))
    return _read_adapter(config, folder / "critic" if run.uses("critic") else folder, base)


def _add_separate_critic(policy: Policy, config: Config, model: PreTrainedModel) -> None:
    """Put a zero value head on a model of its own, which trains whole or, with LoRA, by an adapter. One that reads
    images has the policy's base (config/conflicts.py) and its tower, so that the features in a batch are its own.
    """
    few_tokens(model, path=config.critic.path or config.model.path)
    model.requires_grad_(not config.lora.enabled)
    if config.model.with_images:
        share_towers(model, policy.causal)  # which is frozen
    if config.lora.enabled:
        policy.add_critic("separate", model=wrap_in_lora(model, _critic_adapter(config, model)))
    else:
        policy.add_critic("separate", model=model)


def _start_from_score_head(policy: Policy, model: Any) -> None:
    """Start the value head as the score head of a classification model of one label, if it has one."""
    head = policy.value_head
    score = getattr(model, "score", None)
    assert head is not None
    if score is not None and len(score.weight) == 1:
        bias = getattr(model.config, SCORE_OFFSET, score.bias)  # the offset is the bias of tinyrl's own
        with torch.no_grad():
            head.weight.copy_(score.weight)
            head.bias.copy_(torch.zeros(1) if bias is None else torch.as_tensor(bias))


def _start_from_reward_adapter(policy: Policy, folder: Path) -> None:
    """Start an adapter's critic as the reward model of adapters that a reward run has trained on the same base."""
    assert policy.adapters.peft is not None
    assert policy.value_head is not None
    load_adapter_weights(policy.adapters.peft, "critic", folder / ADAPTER_FILE)
    load_weights(policy.value_head, folder / SCORE_HEAD)


def _start_from_critic_of(policy: Policy, run: Config, folder: Path) -> None:
    """Start as the critic of a ppo run."""
    assert policy.value_head is not None
    if isinstance(policy.critic_model, PeftModel) and not run.lora.enabled:
        load_weights(policy.value_head, folder / VALUE_HEAD)  # the backbone was loaded before it got adapters
    else:
        restore_policy(policy, folder, only="critic")


def _separate_model(config: Config, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Load the model of a separate critic, before adapters of its own; a classification model comes with `score`."""
    path = config.critic.path
    run = critic_run(config)
    if run is not None:
        model = _separate_model(run, dtype, trust_remote_code)
        if not run.lora.enabled:
            load_weights(backbone_of(model), Path(str(path)) / "critic" / MODEL)
        return model
    if path is not None:
        try:
            return load_classifier(path, dtype=dtype)
        except NoHead:  # a plain language model has no score head: its backbone is the critic's, under a zero head
            return load_base(config, path, dtype=dtype, trust_remote_code=trust_remote_code)
    model = load_base(config, config.model.path, dtype=dtype, trust_remote_code=trust_remote_code)
    if config.model.adapter is not None:
        model = load_start_adapter(model, config.model.adapter).merge_and_unload()  # pyright: ignore
    return model
