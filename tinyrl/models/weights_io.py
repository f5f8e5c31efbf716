"""Checkpoint files of a run's roles: written to a folder, and read back into roles of the same configuration.

The policy is at the root as plain PEFT files (or, fully fine-tuned, a plain transformers model), usable without tinyrl.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.models.batches import trunk_of
from tinyrl.models.loading import ADAPTER_FILE, POLICY_ADAPTER, load_adapter_weights, read_finite, read_tensors
from tinyrl.models.reading import reading
from tinyrl.models.roles import Roles
from tinyrl.models.value_head import ValueHead

MODEL, VALUE_HEAD = "model.safetensors", "value_head.safetensors"


def save_roles(roles: Roles, folder: Path, *, tokenizer: PreTrainedTokenizerBase) -> None:
    """Policy and value_head.safetensors at the root, critic/ and reference/ beside them where they have own weights."""
    if roles.peft is not None:
        save_adapter(roles.peft, POLICY_ADAPTER, folder)
        if roles.reference_adapter is not None:
            save_adapter(roles.peft, roles.reference_adapter, folder / "reference")
        if roles.critic_kind == "adapter":
            save_adapter(roles.peft, "critic", folder / "critic")
    else:
        roles.causal.save_pretrained(folder, max_shard_size="10000GB")
    tokenizer.save_pretrained(folder)
    if roles.critic_model is not None:
        if isinstance(roles.critic_model, PeftModel):
            save_adapter(roles.critic_model, POLICY_ADAPTER, folder / "critic")
        else:
            (folder / "critic").mkdir(exist_ok=True)
            save_file(_own_tensors(trunk_of(roles.critic_model)), folder / "critic" / MODEL)
    if roles.value_head is not None:
        save_file(_own_tensors(roles.value_head), folder / VALUE_HEAD)


def load_roles(roles: Roles, folder: Path) -> None:
    """Put back what `save_roles` wrote."""
    load_policy(roles, folder)
    if roles.peft is not None and roles.reference_adapter is not None:
        load_adapter_weights(roles.peft, roles.reference_adapter, folder / "reference" / ADAPTER_FILE)
    load_critic(roles, folder)
    roles.keep_trainable()


def load_critic(roles: Roles, folder: Path) -> None:
    """Only the critic of a checkpoint: its own weights, where it has some, and the value head."""
    if roles.peft is not None and roles.critic_kind == "adapter":
        load_adapter_weights(roles.peft, "critic", folder / "critic" / ADAPTER_FILE)
    if isinstance(roles.critic_model, PeftModel):
        load_adapter_weights(roles.critic_model, POLICY_ADAPTER, folder / "critic" / ADAPTER_FILE)
    elif roles.critic_model is not None:
        load_trunk(roles.critic_model, folder / "critic" / MODEL)
    if roles.value_head is not None:
        load_head(roles.value_head, folder / VALUE_HEAD)


def load_trunk(model: PreTrainedModel, file: Path) -> None:
    """Put back the decoder of a fully fine-tuned critic. Raises ValueError where the file is of another model."""
    _load_model(trunk_of(model), file)


def load_head(head: ValueHead, file: Path) -> None:
    """Put back the weights of a value or score head. Raises ValueError where the file has others."""
    tensors = read_finite(file)
    with reading(f"{file} does not fit this model"):
        head.load_state_dict(tensors)


def load_policy(roles: Roles, folder: Path) -> None:
    """Only the policy of a checkpoint (or of any plain PEFT folder or transformers model of the same shape)."""
    if roles.peft is not None:
        load_adapter_weights(roles.peft, POLICY_ADAPTER, folder / ADAPTER_FILE)
        roles.keep_trainable()
    else:
        _load_model(roles.causal, folder / MODEL)


def save_adapter(model: PeftModel, name: str, folder: Path) -> None:
    """One adapter as plain PEFT: adapter_model.safetensors and adapter_config.json."""
    folder.mkdir(exist_ok=True)
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    tensors = {key: tensor.detach().contiguous().cpu() for key, tensor in state.items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
    config = copy.copy(model.peft_config[name])
    config.inference_mode = True  # plain PEFT then loads it ready to use
    config.save_pretrained(str(folder))


def _load_model(model: PreTrainedModel | torch.nn.Module, file: Path) -> None:
    tensors = read_tensors(file)
    with reading(f"{file} does not fit this model"):  # a tensor of another shape
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ())
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        raise ValueError(f"{file} does not fit this model: missing {missing[:1]}, unexpected {unexpected[:1]}")


def _own_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous().cpu() for name, tensor in module.state_dict().items()}
