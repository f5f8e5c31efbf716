"""Files of a policy in a checkpoint: at the root the policy, as plain PEFT files or a plain transformers model.

adapter_model.safetensors (LoRA) or model.safetensors, with the tokenizer
reference/               adapter `reference`, where there is one
critic/                  adapter `critic`, the adapter of a separate critic, or the whole of one
value_head.safetensors
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from tinyrl.models.loading import FULL_REPORT, save_tokenizer
from tinyrl.models.logprobs import ValueHead
from tinyrl.models.lora import (
    ADAPTER_FILE,
    POLICY_ADAPTER,
    load_adapter_weights,
    read_finite,
    read_tensors,
    save_adapter,
    save_adapter_config,
)
from tinyrl.models.policy import Policy, Role
from tinyrl.models.processors import save_processor
from tinyrl.models.reading import reading

MODEL = "model.safetensors"
VALUE_HEAD = "value_head.safetensors"


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter that a checkpoint holds: whose it is, in which folder below the root, and its name in PEFT's model."""

    role: Role
    folder: str
    model: PeftModel
    name: str


def _adapters(policy: Policy) -> list[SavedAdapter]:
    """List the adapters that a checkpoint holds."""
    found = list[SavedAdapter]()
    peft = policy.adapters.peft
    if peft is not None:
        found.append(SavedAdapter("policy", folder="", model=peft, name=POLICY_ADAPTER))
        if policy.reference_adapter is not None:
            found.append(SavedAdapter("reference", folder="reference", model=peft, name=policy.reference_adapter))
        if policy.critic_kind == "adapter":
            found.append(SavedAdapter("critic", folder="critic", model=peft, name="critic"))
    if isinstance(policy.critic_model, PeftModel):
        found.append(SavedAdapter("critic", folder="critic", model=policy.critic_model, name=POLICY_ADAPTER))
    return found


def critic_modules(policy: Policy) -> dict[str, nn.Module]:
    """Return the critic's modules that a checkpoint holds whole, by file."""
    found = dict[str, nn.Module]()
    if policy.critic_model is not None and not isinstance(policy.critic_model, PeftModel):
        found[f"critic/{MODEL}"] = policy.backbone("critic")
    if policy.value_head is not None:
        found[VALUE_HEAD] = policy.value_head
    return found


def save_policy(policy: Policy, folder: Path) -> None:
    """Save policy and value_head.safetensors at the root, critic/ and reference/ where they have own weights."""
    for adapter in _adapters(policy):
        save_adapter(adapter.model, adapter.name, folder / adapter.folder)
    if policy.adapters.peft is None:
        policy.causal.save_pretrained(folder, max_shard_size="10000GB")
    _save_tokenizer(policy, folder)
    for file, module in critic_modules(policy).items():
        (folder / file).parent.mkdir(exist_ok=True)
        save_file({n: t.detach().contiguous().cpu() for n, t in module.state_dict().items()}, folder / file)


def save_policy_without_weights(policy: Policy, folder: Path) -> None:
    """Write what `save_policy`, and a merged export, write besides tensors, as they write it."""
    for adapter in _adapters(policy):
        save_adapter_config(adapter.model, adapter.name, folder / adapter.folder)
    causal = policy.causal
    if policy.adapters.peft is None:
        causal.save_pretrained(folder, state_dict={})
    else:
        causal.config.save_pretrained(folder)
        if causal.can_generate() and causal.generation_config is not None:
            causal.generation_config.save_pretrained(folder)
    _save_tokenizer(policy, folder)


def _save_tokenizer(policy: Policy, folder: Path) -> None:
    """Save the tokenizer, and the processor of images around it where the model reads some."""
    save_tokenizer(policy.tokenizer, folder, revision=policy.revision)
    if policy.images is not None:
        save_processor(policy.config.model.path, folder, revision=policy.revision)


def restore_policy(policy: Policy, folder: Path, *, only: Literal["policy", "critic"] | None = None) -> None:
    """Load a checkpoint, or `only` one role of it; the policy may be any PEFT folder or model of the same shape."""
    for adapter in _adapters(policy):
        if only in (None, adapter.role):
            load_adapter_weights(adapter.model, adapter.name, folder / adapter.folder / ADAPTER_FILE)
    if policy.adapters.peft is None and only != "critic":
        load_saved_model(policy.causal, folder)
    if only != "policy":
        for file, module in critic_modules(policy).items():
            load_weights(module, folder / file)
    policy.keep_trainable()


def load_saved_model(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights of a model that the library has saved, whose files may name and group them otherwise than the
    model does (experts one by one, a decoder inside a vision model). Raises ValueError where they are of another one.
    """
    with reading(f"{folder / MODEL} does not fit this model", folder):
        config = copy.deepcopy(model.config)
        loaded: Any = type(model).from_pretrained(folder, config=config, dtype=torch.float32, **FULL_REPORT)
    saved, found = loaded
    missing = sorted(found["missing_keys"])
    unexpected = sorted(found["unexpected_keys"])
    other_shape = sorted(found["mismatched_keys"])
    if missing or unexpected or other_shape:
        first = f"missing {missing[:1]}, unexpected {unexpected[:1]}, of another shape {other_shape[:1]}"
        raise ValueError(f"{folder / MODEL} does not fit this model: {first}")
    model.load_state_dict(saved.state_dict())


def load_weights(module: nn.Module, file: Path) -> None:
    """Load a decoder or a head. Raises ValueError where the file is of another one."""
    tensors = read_finite(file) if isinstance(module, ValueHead) else read_tensors(file)
    with reading(f"{file} does not fit this model"):  # a tensor of another shape
        missing, unexpected = module.load_state_dict(tensors, strict=False)
    tied = set(getattr(module, "all_tied_weights_keys", None) or getattr(module, "_tied_weights_keys", None) or ())
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        raise ValueError(f"{file} does not fit this model: missing {missing[:1]}, unexpected {unexpected[:1]}")
