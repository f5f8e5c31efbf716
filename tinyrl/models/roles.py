"""Policy, reference, critic and reward as adapters and heads on one base. The only place that switches adapters.

PEFT's switching turns off the gradients of other adapters, and a backward pass after a switch silently loses
gradients. So: one role at a time, forward, backward, then switch (`with roles.acting(role)`), and each role's
parameters are collected once, by name, and kept trainable.

    role       with LoRA                                                  with full fine-tuning
    policy     adapter `default`                                          the model itself
    reference  adapters off, or adapter `reference` (a frozen copy)       a frozen copy of the model
    critic     a value head on the states of one of (critic.kind):
      adapter          adapter `critic`                                   -
      shared           the policy, whose backbone the value loss moves too   the same
      shared-detached  the policy, whose backbone it does not move           the same
      separate         a model of its own (with LoRA)                     a model of its own
    reward     adapter `reward` and a score head, both frozen             -
    teacher    adapter `teacher`, frozen, or a model of its own           a model of its own
    base       adapters off                                               the model itself

A reward model that is a model of its own is not a role (models/reward_model.py); an adapter for this base is put on it
by `attach_reward_adapter` there.

A batch (models/batches.py) lists the N response tokens whose states are wanted; flat values (N,) and states (N, H) are
in that order. Results come back as (b, T): b rows of a micro-batch, T its longest response.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from tinyrl.models.batches import (
    Masks,
    SequenceBatch,
    backbone_of,
    last_states,
    make_batch,
    make_packed_batch,
    response_states,
)
from tinyrl.models.checks import check_head, packs_exactly
from tinyrl.models.loading import embedding_rows, save_tokenizer
from tinyrl.models.logprobs import Head, ValueHead, head_of, token_logprobs
from tinyrl.models.lora import (
    ADAPTER_FILE,
    POLICY_ADAPTER,
    load_adapter_weights,
    merged_layers,
    read_finite,
    read_tensors,
    save_adapter,
)
from tinyrl.models.packing import attending_as_now
from tinyrl.models.reading import reading

MODEL, VALUE_HEAD = "model.safetensors", "value_head.safetensors"
Role = Literal["policy", "reference", "critic", "reward", "teacher", "base"]
CriticKind = Literal["adapter", "shared", "shared-detached", "separate"]


class Roles:
    """The models of a run and which of them is acting.

    State: the base, its adapters and heads, the parameters of each role by name, whether batches are packed (rows end
    to end behind shared prompts; set `packs` to False for padded ones).
    """

    def __init__(self, model: PreTrainedModel | PeftModel, *, device: torch.device, reference: bool = True) -> None:
        self.peft = model if isinstance(model, PeftModel) else None
        self.causal: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model  # pyright: ignore
        self.device = device
        self.has_reference = reference
        self.reference_adapter: str | None = None
        self.reference_model: PreTrainedModel | None = None
        self.critic_kind: CriticKind | None = None
        self.critic_model: PreTrainedModel | PeftModel | None = None
        self.teacher_model: PreTrainedModel | None = None
        self.value_head: ValueHead | None = None
        self.score_head: ValueHead | None = None
        self.lora_dropout = False
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        self.dtype: torch.dtype = self.causal.dtype  # of the weights as loaded, and of autocast
        if self.peft is None:
            if reference:
                self.reference_model = frozen_copy(self.causal, device=device)
            self.causal.float()
        self.finalize_adapters()
        policy = self.adapter_parameters(POLICY_ADAPTER) if self.peft else dict(self.causal.named_parameters())
        self.parameters["policy"] = policy
        self.keep_trainable()
        check_head(self.causal, self.head("policy"), self.backbone("policy"))
        self.packs = packs_exactly(self.backbone("policy"))

    # ---- building roles ----

    def adapter_parameters(self, adapter: str) -> dict[str, nn.Parameter]:
        """The LoRA parameters of one adapter, by their names in the base model."""
        return {n: p for n, p in self.causal.named_parameters() if f".{adapter}." in f".{n}." and "lora_" in n}

    def adapted_layers(self, adapter: str) -> list[LoraLayer]:
        return [layer for layer in self._layers if adapter in layer.lora_A]

    def freeze_reference_adapter(self) -> None:
        """Make the reference a frozen copy of the policy's adapter as it is now (continuing from a LoRA)."""
        assert self.peft is not None
        self.add_adapter("reference", config=self.peft.peft_config[POLICY_ADAPTER])  # pyright: ignore[reportArgumentType]
        frozen, policy = (self.adapter_parameters(name).values() for name in ("reference", POLICY_ADAPTER))
        with torch.no_grad():
            for copied, parameter in zip(frozen, policy, strict=True):
                copied.copy_(parameter)
        self.reference_adapter = "reference"

    def add_adapter(self, name: str, *, config: LoraConfig) -> None:
        """A further adapter on the same base; which roles train is decided by `self.parameters`."""
        assert self.peft is not None
        fresh = copy.deepcopy(config)
        fresh.fan_in_fan_out = self.peft.peft_config[POLICY_ADAPTER].fan_in_fan_out  # pyright: ignore[reportAttributeAccessIssue]
        self.peft.add_adapter(name, fresh)
        self.finalize_adapters()

    def finalize_adapters(self) -> None:
        """Call after adding an adapter: it may sit in layers that had none, its dropout is on, and PEFT's bookkeeping
        may have changed what is active and what trains. (PEFT makes its parameters float32.)
        """
        self.causal.to(self.device).eval()  # pyright: ignore[reportArgumentType]
        self._layers = [module for module in self.causal.modules() if isinstance(module, LoraLayer)]
        self._switch(POLICY_ADAPTER)
        self.keep_trainable()

    def add_critic(
        self, kind: CriticKind, *, lora: LoraConfig | None = None, model: PreTrainedModel | PeftModel | None = None
    ) -> None:
        """Give the roles a critic: a value head over the states of an adapter, of the policy, or of `model`.

        With kind separate, the parameters of `model` that require a gradient are trained.
        """
        self.critic_kind, self.critic_model = kind, model
        self.value_head = ValueHead(self.hidden_size("policy" if model is None else "critic")).to(self.device)
        parameters: dict[str, nn.Parameter] = {f"value_head.{n}": p for n, p in self.value_head.named_parameters()}
        if kind == "adapter":
            assert lora is not None
            self.add_adapter("critic", config=lora)
            parameters |= self.adapter_parameters("critic")
        elif kind == "separate":
            assert model is not None
            model.to(self.device).eval()  # pyright: ignore[reportArgumentType]
            backbone = self.backbone("critic")
            if not isinstance(model, PeftModel):
                backbone.float()
            self.packs = self.packs and packs_exactly(backbone)
            parameters |= {n: p for n, p in backbone.named_parameters() if p.requires_grad}
        self.parameters["critic"] = parameters
        self.keep_trainable()

    def add_teacher(self, model: PreTrainedModel) -> None:
        """A frozen model of its own to learn from, with the policy's vocabulary."""
        placed = model if getattr(model, "is_loaded_in_8bit", False) else model.to(self.device)  # pyright: ignore
        self.teacher_model = placed.eval().requires_grad_(False)
        self.packs = self.packs and packs_exactly(self.backbone("teacher"))

    def train_score_head(self) -> None:
        """Add a score head on the policy's states that trains with the policy's parameters (to make a reward model)."""
        self.score_head = ValueHead(self.hidden_size("policy")).to(self.device)
        self.parameters["policy"] |= {f"score_head.{n}": p for n, p in self.score_head.named_parameters()}

    def fix_score_bias(self) -> None:
        """Leave the score head's bias at 0: in a difference of two scores it has no gradient but rounding's."""
        assert self.score_head is not None
        del self.parameters["policy"]["score_head.bias"]
        self.score_head.bias.requires_grad_(False)

    def keep_trainable(self) -> None:
        """Undo what libraries do to gradients: exactly the roles' own parameters are trainable, and all rows of them
        (an embedding's padding_idx exempts the pad token, which may be the end of text; masks come from lengths).
        """
        for model in (self.causal, self.critic_model):
            if model is not None:
                model.requires_grad_(False)
                for module in model.modules():
                    if isinstance(module, nn.Embedding):
                        module.padding_idx = None
        for parameters in self.parameters.values():
            for parameter in parameters.values():
                parameter.requires_grad_(True)

    # ---- switching ----

    @contextmanager
    def acting(self, role: Role) -> Iterator[PreTrainedModel]:
        """The model as `role` sees it; forward AND backward belong inside. `base` is the policy's model without
        adapters. LoRA's dropout, where it is in use, is on inside a block that was entered with gradients on.
        """
        model = self.causal if role == "base" else self._model_of(role)
        self._switch(self.adapter_of(role), dropout=self.lora_dropout and torch.is_grad_enabled())
        try:
            yield model
        finally:
            self._switch(POLICY_ADAPTER)

    @contextmanager
    def acting_merged(self, role: Role) -> Iterator[PreTrainedModel]:
        """As `acting`, with the role's adapter merged into private copies of the weights: for sampling."""
        adapter = self.adapter_of(role)
        merging = nullcontext() if adapter is None else merged_layers(self._layers, adapter)
        with self.acting(role) as model, merging:
            yield model

    def adapter_of(self, role: str) -> str | None:
        """The adapter that `role` acts through; None: the base as it is."""
        if role == "reference":
            return self.reference_adapter
        if role == "critic":
            return "critic" if self.critic_kind == "adapter" else POLICY_ADAPTER
        if role == "teacher" and self.teacher_model is not None:
            return POLICY_ADAPTER  # of the base, which does not act
        return {"policy": POLICY_ADAPTER, "reward": "reward", "teacher": "teacher"}.get(role)

    def _switch(self, adapter: str | None, *, dropout: bool = False) -> None:
        for layer in self._layers:
            layer._disable_adapters = adapter is None  # PEFT's own switch, without its side effects on requires_grad
            if adapter is not None:
                layer._active_adapter = [adapter]
            layer.lora_dropout.train(dropout)

    # ---- what roles compute ----

    def _model_of(self, role: Role) -> PreTrainedModel:
        if role == "reference" and self.peft is None:
            assert self.reference_model is not None, "there is no reference"
            return self.reference_model
        if role == "critic" and self.critic_model is not None:
            model = self.critic_model
            return model.get_base_model() if isinstance(model, PeftModel) else model  # pyright: ignore[reportReturnType]
        if role == "teacher" and self.teacher_model is not None:
            return self.teacher_model
        return self.causal

    def backbone(self, role: Role) -> nn.Module:
        return backbone_of(self._model_of(role))

    def head(self, role: Role) -> Head:
        return head_of(self._model_of(role))

    def hidden_size(self, role: Role) -> int:
        """H, the width of the states of `role`."""
        return self._model_of(role).config.get_text_config().hidden_size

    def batch(
        self, prompts: list[list[int]], responses: list[list[int]], masks: Masks = None, *, last_tokens: bool = False
    ) -> SequenceBatch:
        """The models' input for some rows, listing the response tokens of `masks` (None: all); with `last_tokens`, the
        states of the rows' last tokens can be read.
        """
        if self.packs:
            return make_packed_batch(prompts, responses, masks, device=self.device, last_tokens=last_tokens)
        return make_batch(prompts, responses, masks, device=self.device)

    def policy_states(self, batch: SequenceBatch) -> Tensor:
        """Hidden states (N, H) of the policy, which must be acting."""
        return response_states(self.backbone("policy"), batch)

    def logprobs(
        self,
        role: Literal["policy", "reference", "teacher"],
        batch: SequenceBatch,
        *,
        temperature: float,
        entropy_grad: bool = False,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) of the response tokens under `role`, each (b, T); the role must be acting."""
        states = response_states(self.backbone(role), batch) if states is None else states
        logprobs, entropy = token_logprobs(
            states, self.head(role), targets=batch.targets, temperature=temperature, entropy_grad=entropy_grad
        )
        return batch.to_rows(logprobs), batch.to_rows(entropy)

    def values(self, batch: SequenceBatch, *, states: Tensor | None = None) -> Tensor:
        """Values (b, T) of states before each response token; the critic must be acting, unless `states` is given."""
        assert self.value_head is not None
        states = response_states(self.backbone("critic"), self._read_by_critic(batch)) if states is None else states
        return batch.to_rows(self.value_head(states))

    def _read_by_critic(self, batch: SequenceBatch) -> SequenceBatch:
        """Clamp ids beyond the critic's embedding to its last row: a larger policy of the same family has rows that
        belong to no token, and samples them now and then.
        """
        rows = embedding_rows(self._model_of("critic"))
        if rows >= embedding_rows(self.causal):
            return batch
        return replace(batch, input_ids=batch.input_ids.clamp(max=rows - 1))

    @property
    def value_role(self) -> Role:
        """Whose weights act when values are computed: the critic's own, or the policy's with a head on its states."""
        return "critic" if self.critic_kind in ("adapter", "separate") else "policy"

    def scores(self, batch: SequenceBatch) -> Tensor:
        """Scores (b,) of a score head on the shared base, read at each row's last token; the reward role must be
        acting (or the policy, while the head is being trained).
        """
        assert self.score_head is not None
        return self.score_head(last_states(backbone_of(self.causal), batch))

    # ---- how they compute ----

    def use_lora_dropout(self) -> None:
        """Turn LoRA's dropout on in training passes (supervised and preference training); no other dropout ever is."""
        self.lora_dropout = True

    def check_gradient_checkpointing(self) -> None:
        """Check early that `gradient_checkpointing` can be used. Raises ValueError where the model cannot."""
        for model in self._trained_models():
            recomputable_layers(model)

    @contextmanager
    def gradient_checkpointing(self) -> Iterator[None]:
        """Forward AND backward passes inside recompute the decoders' layers; their gradients are the same.

        The library recomputes only layers in training mode, which also turns dropout on (some, such as OPT's, check
        their own `training`). So a layer is in training mode only while recomputation is chosen, and not while it
        computes.
        """
        layers = [layer for model in self._trained_models() for layer in recomputable_layers(model)]
        for layer in layers:
            layer.gradient_checkpointing, layer.training = True, True
            layer._gradient_checkpointing_func = partial(_recompute_later, layer)  # pyright: ignore[reportArgumentType]
        try:
            yield
        finally:
            for layer in layers:
                layer.gradient_checkpointing, layer.training = False, False
                del layer._gradient_checkpointing_func

    def _trained_models(self) -> list[PreTrainedModel]:
        return [self.causal] if self.critic_model is None else [self.causal, self._model_of("critic")]


def frozen_copy(model: PreTrainedModel, *, device: torch.device) -> PreTrainedModel:
    """A copy that is never trained, in the dtype that the model has now.

    Under autocast it computes what the model will with float32 weights: embeddings are read in float32, so the sums
    between layers are too.
    """
    copied = copy.deepcopy(model).requires_grad_(False).to(device).eval()  # pyright: ignore[reportArgumentType]
    if model.dtype != torch.float32:
        copied.get_input_embeddings().register_forward_hook(
            lambda _layer, _ids, embedded: embedded.float() if torch.is_autocast_enabled(device.type) else embedded
        )
    return copied


def recomputable_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The decoder layers of a model. Raises ValueError where the library cannot recompute any."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"model.gradient_checkpointing=true: {type(model).__name__} has no layers to recompute")
    return layers


def _recompute_later(layer: nn.Module, run: Callable[..., Any], *args: Any) -> Any:
    attending = attending_as_now()  # backward comes when the forward pass, and its attention, are over

    def without_dropout(*inputs: Any) -> Any:
        was, layer.training = layer.training, False
        try:
            with attending():
                return run(*inputs)
        finally:  # the recomputation is cut short by an exception of its own
            layer.training = was

    return checkpoint(without_dropout, *args, use_reentrant=False)


# ---- Checkpoint files: the policy at the root as plain PEFT files, or a plain transformers model ----


def save_roles(roles: Roles, folder: Path, *, tokenizer: PreTrainedTokenizerBase, revision: str | None = None) -> None:
    """Policy and value_head.safetensors at the root, critic/ and reference/ beside them where they have own weights."""
    if roles.peft is not None:
        save_adapter(roles.peft, POLICY_ADAPTER, folder)
        if roles.reference_adapter is not None:
            save_adapter(roles.peft, roles.reference_adapter, folder / "reference")
        if roles.critic_kind == "adapter":
            save_adapter(roles.peft, "critic", folder / "critic")
    else:
        roles.causal.save_pretrained(folder, max_shard_size="10000GB")
    save_tokenizer(tokenizer, folder, revision=revision)
    if isinstance(roles.critic_model, PeftModel):
        save_adapter(roles.critic_model, POLICY_ADAPTER, folder / "critic")
    elif roles.critic_model is not None:
        (folder / "critic").mkdir(exist_ok=True)
        save_file(_own_tensors(backbone_of(roles.critic_model)), folder / "critic" / MODEL)
    if roles.value_head is not None:
        save_file(_own_tensors(roles.value_head), folder / VALUE_HEAD)


def load_roles(roles: Roles, folder: Path) -> None:
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
        load_backbone(roles.critic_model, folder / "critic" / MODEL)
    if roles.value_head is not None:
        load_head(roles.value_head, folder / VALUE_HEAD)


def load_backbone(model: PreTrainedModel, file: Path) -> None:
    """Put back the decoder of a fully fine-tuned critic. Raises ValueError where the file is of another model."""
    _load_model(backbone_of(model), file)


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
