"""The models of a run: policy, reference, critic and reward as adapters and heads on one base.

This is the only place that switches adapters, and that saves and loads them.

PEFT's switching turns off the gradients of other adapters, and a backward pass after a switch silently loses
gradients. So: one role at a time, forward, backward, then switch, and each role's parameters are collected once, by
name, and kept trainable.

    role       with LoRA                                                  with full fine-tuning
    policy     adapter `default`                                          the model itself, without its tower
    reference  adapters off, or adapter `reference` (a frozen copy)       a frozen copy of the model
    critic     a value head on the states of one of (critic.kind):
      adapter          adapter `critic`                                   -
      shared           the policy, whose backbone the value loss moves too   the same
      shared-detached  the policy, whose backbone it does not move           the same
      separate         a model of its own (with LoRA)                     a model of its own
    reward     adapter `reward` and a score head, both frozen             -
    teacher    adapter `teacher`, frozen, or a model of its own           a model of its own
    base       adapters off                                               the model itself

A reward model of its own is not a role (reward_model.py). A batch (batch.py) lists N response tokens; flat values
(N,) and states (N, H) are in that order. Results are (b, T): b rows of a micro-batch, T its longest response.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from tinyrl.config.schema import Config
from tinyrl.models.batch import Batch, Item, Tokens, batch_of
from tinyrl.models.checks import check_head, packs_exactly, supports_fused_layers
from tinyrl.models.device import Device, move_to_device, to_device
from tinyrl.models.frozen_copy import frozen_copy
from tinyrl.models.kernels import Kernels
from tinyrl.models.loading import FULL_REPORT, embedding_rows, save_tokenizer
from tinyrl.models.logprobs import Head, ValueHead, head_of, token_logprobs
from tinyrl.models.lora import (
    ADAPTER_FILE,
    NOT_ADAPTABLE,
    POLICY_ADAPTER,
    base_of,
    config_of,
    load_adapter_weights,
    read_finite,
    read_tensors,
    save_adapter,
    save_adapter_config,
    without_refused,
)
from tinyrl.models.micro_batches import MicroBatches, SequenceLengths, Work
from tinyrl.models.packing import attending_as_now
from tinyrl.models.parallel import World, world
from tinyrl.models.processors import save_processor
from tinyrl.models.reading import reading
from tinyrl.models.reward_model import positions_of
from tinyrl.models.states import backbone_of, last_states, response_states
from tinyrl.models.towers import language_parameters, language_parts, towers_of

MODEL = "model.safetensors"
VALUE_HEAD = "value_head.safetensors"
MOMENT_BYTES = {"adamw": 8, "adamw8bit": 2}  # of a trained parameter
STATE_BYTES = 32_000  # of a checkpoint's random numbers, configuration and counters
Role = Literal["policy", "reference", "critic", "reward", "teacher", "base"]
CriticKind = Literal["adapter", "shared", "shared-detached", "separate"]


class Policy:
    """The models of a run, and which of them is acting. State: the base, its adapters and heads, the parameters of each
    role by name, whether batches are packed (rows end to end behind shared prompts) or padded, the token budget of
    micro-batches, the faster paths that a trial has chosen.

    config: the settings that the models were loaded by, with the date of the run. lora_dropout: whether LoRA's dropout
    is on in passes with a gradient, as in supervised and preference training; no other dropout ever is.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        device: Device,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.run_device = device
        self.device = device.device
        self.revision = config.model.revision  # of the base on the hub
        self.has_reference = config.has_reference
        self.lora_dropout = not config.samples
        self.peft = model if isinstance(model, PeftModel) else None
        self.causal = base_of(model)
        tokens = config.run.micro_batch_tokens
        self.micro_batches = MicroBatches(device.device, tokens, vocabulary=embedding_rows(self.causal))
        self.kernels = Kernels()
        self.reference_adapter: str | None = None
        self.reference_model: PreTrainedModel | None = None
        self.critic_kind: CriticKind | None = None
        self.critic_model: PreTrainedModel | PeftModel | None = None
        self.teacher_model: PreTrainedModel | None = None
        self.value_head: ValueHead | None = None
        self.score_head: ValueHead | None = None
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        self.dtype: torch.dtype = self.causal.dtype  # of the weights as loaded, and of autocast
        self.with_images = bool(config.model.with_images)
        if self.peft is None:
            frozen = towers_of(self.causal) if self.with_images else []
            if self.has_reference:
                self.reference_model = frozen_copy(self.causal, self.device, shared=frozen)
            for part in language_parts(self.causal) if self.with_images else [self.causal]:
                part.float()
        self._collect_adapters()
        self.parameters["policy"] = self._policy_parameters()
        self.keep_trainable()
        check_head(self.causal, self.head("policy"), self.backbone("policy"))
        self.packs = packs_exactly(self.backbone("policy"))

    # ---- building roles ----

    def _policy_parameters(self) -> dict[str, nn.Parameter]:
        """Return what trains: the policy's adapter, the language model beside a frozen tower, or the whole model."""
        if self.peft is not None:
            return self.adapter_parameters(POLICY_ADAPTER)
        return language_parameters(self.causal) if self.with_images else dict(self.causal.named_parameters())

    def adapter_parameters(self, adapter: str) -> dict[str, nn.Parameter]:
        """Return the LoRA parameters of one adapter, by their names in the base model."""
        return {n: p for n, p in self.causal.named_parameters() if f".{adapter}." in f".{n}." and "lora_" in n}

    def adapted_layers(self, adapter: str) -> list[LoraLayer]:
        return [layer for layer in self._layers if adapter in layer.lora_A]

    def freeze_reference_adapter(self) -> None:
        """Make the reference a frozen copy of the policy's adapter as it is now (continuing from a LoRA)."""
        assert self.peft is not None
        self.add_adapter("reference", config=config_of(self.peft, POLICY_ADAPTER))
        frozen, policy = (self.adapter_parameters(name).values() for name in ("reference", POLICY_ADAPTER))
        with torch.no_grad():
            for copied, parameter in zip(frozen, policy, strict=True):
                copied.copy_(parameter)
        self.reference_adapter = "reference"

    def add_adapter(self, name: str, *, config: LoraConfig) -> None:
        """Add an adapter to the same base; which roles train is decided by `self.parameters`."""
        assert self.peft is not None
        fresh = copy.deepcopy(without_refused(config, self.causal))
        fresh.fan_in_fan_out = config_of(self.peft, POLICY_ADAPTER).fan_in_fan_out
        self.peft.add_adapter(name, fresh)
        self._collect_adapters()

    def _collect_adapters(self) -> None:
        """Collect adapted layers: a new adapter may sit in layers that had none, its dropout is on, and PEFT's
        bookkeeping may have changed what is active and what trains. (PEFT makes its parameters float32.)
        """
        move_to_device(self.causal, self.device).eval()
        self._layers = [module for module in self.causal.modules() if isinstance(module, LoraLayer)]
        self._switch(POLICY_ADAPTER)
        self.keep_trainable()

    def add_critic(
        self, kind: CriticKind, *, lora: LoraConfig | None = None, model: PreTrainedModel | PeftModel | None = None
    ) -> None:
        """Add a value head over the states of an adapter, of the policy, or of `model`, which trains as it stands."""
        self.critic_kind = kind
        self.critic_model = model
        self.value_head = ValueHead(self.hidden_size("policy" if model is None else "critic")).to(self.device)
        parameters: dict[str, nn.Parameter] = {f"value_head.{n}": p for n, p in self.value_head.named_parameters()}
        if kind == "adapter":
            assert lora is not None
            self.add_adapter("critic", config=lora)
            parameters |= self.adapter_parameters("critic")
        elif model is not None:
            move_to_device(model, self.device).eval()
            backbone = self.backbone("critic")
            if not isinstance(model, PeftModel):
                backbone.float()
            self.packs = self.packs and packs_exactly(backbone)
            parameters |= {n: p for n, p in backbone.named_parameters() if p.requires_grad}
        self.parameters["critic"] = parameters
        self.keep_trainable()

    def add_teacher(self, model: PreTrainedModel) -> None:
        """Add a frozen model of its own to learn from, with the policy's vocabulary."""
        placed = model if getattr(model, "is_loaded_in_8bit", False) else move_to_device(model, self.device)
        self.teacher_model = placed.eval().requires_grad_(False)
        check_head(self.teacher_model, self.head("teacher"), self.backbone("teacher"))
        self.packs = self.packs and packs_exactly(self.backbone("teacher"))

    def add_score_head(self, head: ValueHead) -> None:
        """Add a frozen score head, on the states of adapter `reward`."""
        self.score_head = head.to(self.device).requires_grad_(False)

    def train_score_head(self, *, bias: bool = True) -> None:
        """Add a score head on the policy's states that trains with the policy's parameters (to make a reward model). In
        a difference of two scores the bias has no gradient but rounding's, and can be left at 0.
        """
        self.score_head = ValueHead(self.hidden_size("policy")).to(self.device)
        self.score_head.bias.requires_grad_(bias)
        heads = {f"score_head.{n}": p for n, p in self.score_head.named_parameters() if p.requires_grad}
        self.parameters["policy"] |= heads

    def keep_trainable(self) -> None:
        """Undo what libraries do to gradients: exactly the roles' own parameters are trainable, and all rows of them
        (an embedding's padding_idx exempts the pad token, which may be the end of text; masks come from lengths).
        """
        for model in self._trained_models():
            model.requires_grad_(False)
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    module.padding_idx = None
        for parameters in self.parameters.values():
            for parameter in parameters.values():
                parameter.requires_grad_(True)

    def _trained_models(self) -> list[PreTrainedModel]:
        return [self.causal] if self.critic_model is None else [self.causal, self._model_of("critic")]

    # ---- switching ----

    @contextmanager
    def acting(self, role: Role) -> Iterator[PreTrainedModel]:
        """Yield the model as `role` sees it; forward AND backward belong inside. LoRA's dropout, where it is in use, is
        on in blocks entered with gradients on.
        """
        self._switch(self.adapter_of(role), dropout=self.lora_dropout and torch.is_grad_enabled())
        try:
            yield self._model_of(role)
        finally:
            self._switch(POLICY_ADAPTER)

    def adapter_of(self, role: str) -> str | None:
        """Return the adapter of the base that `role` acts through; None: the base as it is."""
        own = {
            "reference": self.reference_adapter,
            "reward": "reward",
            "base": None,
            "critic": "critic" if self.critic_kind == "adapter" else POLICY_ADAPTER,
            "teacher": "teacher" if self.teacher_model is None else POLICY_ADAPTER,
        }
        return own.get(role, POLICY_ADAPTER)

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
        own = {"critic": self.critic_model, "teacher": self.teacher_model}.get(role)
        return self.causal if own is None else base_of(own)

    def backbone(self, role: Role) -> nn.Module:
        return backbone_of(self._model_of(role))

    def head(self, role: Role) -> Head:
        return head_of(self._model_of(role))

    def hidden_size(self, role: Role) -> int:
        """Return H, the width of the states of `role`."""
        return self._model_of(role).config.get_text_config().hidden_size

    def policy_states(self, batch: Batch) -> Tensor:
        """Compute the hidden states (N, H) of the policy, which must be acting."""
        return response_states(self.backbone("policy"), batch)

    def logprobs(
        self,
        role: Literal["policy", "reference", "teacher"],
        batch: Batch,
        *,
        temperature: float,
        entropy_grad: bool = False,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities and entropies, (b, T) each, of the response tokens; the role must be acting."""
        states = response_states(self.backbone(role), batch) if states is None else states
        logprobs, entropy = token_logprobs(
            states,
            self.head(role),
            targets=batch.targets,
            temperature=temperature,
            entropy_grad=entropy_grad,
            one_pass=self.kernels.one_pass_logits,
        )
        return batch.to_rows(logprobs), batch.to_rows(entropy)

    def values(self, batch: Batch, *, states: Tensor | None = None) -> Tensor:
        """Compute values (b, T) of states before each response token; the critic must be acting, or `states` given."""
        assert self.value_head is not None
        if states is None:  # a larger policy of the family samples, now and then, a row that belongs to no token
            rows = embedding_rows(self._model_of("critic"))
            if rows < embedding_rows(self.causal):
                batch = replace(batch, input_ids=batch.input_ids.clamp(max=rows - 1))
            states = response_states(self.backbone("critic"), batch)
        return batch.to_rows(self.value_head(states))

    @property
    def value_role(self) -> Role:
        """Return the role that acts when values are computed: the critic, or the policy with a head on its states."""
        return "critic" if self.critic_kind in ("adapter", "separate") else "policy"

    def scores(self, batch: Batch) -> Tensor:
        """Compute scores (b,) at each row's last token; the reward role must be acting (or the policy it trains in)."""
        assert self.score_head is not None
        return self.score_head(last_states(backbone_of(self.causal), batch))

    def batch_of(
        self,
        items: Sequence[Item],
        tokens: Tokens = "loss",
        *,
        last_tokens: bool = False,
        rows: Sequence[int] | None = None,
    ) -> Batch:
        """Make the models' input of samples or examples; last_tokens: for `scores`; rows: their places in the pass."""
        return batch_of(
            items,
            packed=self.packs,
            device=self.device,
            tokens=tokens,
            last_tokens=last_tokens,
            rows=rows,
            varlen=self.kernels.varlen_attention,
        )

    def map_samples(
        self,
        compute: Callable[[Batch], tuple[Tensor, ...]],
        items: Sequence[Item],
        *,
        role: Role,
        width: int | None = None,
        tokens: Tokens = "loss",
        last_tokens: bool = False,
        among: World | None = None,
    ) -> tuple[Tensor, ...]:
        """Apply `compute`, which gives tensors (n, at most width), to micro-batches of items without gradient; return
        (N, width) tensors on the CPU. width: by default that of the longest first response. Each process of `among`
        (None: all) computes some of the rows.
        """
        width = max(len(item.responses[0]) for item in items) if width is None else width
        among = self.world if among is None else among
        outputs: list[Tensor] = []

        def run(rows: list[int]) -> None:
            batch = self.batch_of([items[i] for i in rows], tokens, last_tokens=last_tokens)
            results = compute(batch)
            if not outputs:
                outputs.extend(torch.zeros(len(items), width, device=self.device) for _ in results)
            where = to_device(torch.as_tensor(rows), self.device)
            for output, result in zip(outputs, results, strict=True):
                output[where, : result.shape[1]] = result.float()

        with torch.no_grad(), self.acting(role), self.run_device.autocast():
            self.micro_batches.run(Work(self.lengths(items), run), world=among)
        count = max(1, *among.gather(len(outputs)))  # none where it had no rows
        outputs += [torch.zeros(len(items), width, device=self.device) for _ in range(count - len(outputs))]
        among.sum(*outputs)
        return tuple(output.cpu() for output in outputs)

    def lengths(self, items: Sequence[Item]) -> SequenceLengths:
        return SequenceLengths.of(items, packed=self.packs)

    @property
    def world(self) -> World:
        return world()

    @property
    def positions(self) -> int:
        """Return the most tokens of a prompt with its response."""
        return positions_of(self.causal.config.get_text_config())

    # ---- how they compute ----

    def check_gradient_checkpointing(self) -> None:
        """Check early that `gradient_checkpointing` can be used. Raises ValueError where the model cannot."""
        for model in self._trained_models():
            if not recomputable_layers(model):
                raise ValueError(
                    f"model.gradient_checkpointing=true: {type(model).__name__} has no layers to recompute"
                )

    @contextmanager
    def gradient_checkpointing(self) -> Iterator[None]:
        """Recompute the decoders' layers in backward; forward AND backward belong inside. The library recomputes only
        layers in training mode, which also turns dropout on (some, such as OPT's, check their own `training`). So a
        layer is in training mode only while recomputation is chosen, and not while it computes.
        """
        layers = [layer for model in self._trained_models() for layer in recomputable_layers(model)]
        for layer in layers:
            layer.gradient_checkpointing = True
            layer.training = True
            layer._gradient_checkpointing_func = partial(_recompute_later, layer)  # pyright: ignore[reportArgumentType]
        try:
            yield
        finally:
            for layer in layers:
                layer.gradient_checkpointing = False
                layer.training = False
                del layer._gradient_checkpointing_func

    def describe_passes(self) -> str:
        """Return a line with what computes the passes that train: our layers or the library's, packed or padded rows.
        Our layers are compared with the library's here, as they will train.
        """
        roles: list[Role] = ["policy"] if self.critic_model is None else ["policy", "critic"]
        checkpointing = self.gradient_checkpointing if self.config.model.gradient_checkpointing else nullcontext
        parts = []
        for role in roles:
            with self.acting(role) as model, self.run_device.autocast(), checkpointing():
                ours = self.packs and supports_fused_layers(self.backbone(role))
            layers = "tinyrl's own layers" if ours else f"the library's {type(model).__name__}"
            parts.append(f"{role} by {layers}")
        rows = "packed" if self.packs else "padded"
        excluded = () if self.peft is None else config_of(self.peft, POLICY_ADAPTER).exclude_modules or ()
        left_out = [name for name in NOT_ADAPTABLE.get(str(self.causal.config.model_type), []) if name in excluded]
        note = f"; without LoRA: {', '.join(left_out)}, which PEFT cannot adapt here" if left_out else ""
        return f"training: {', '.join(parts)}; rows are {rows}{note}"

    # ---- memory ----

    def bytes_by_role(self, *, reward_model: nn.Module | None = None) -> dict[str, int]:
        """Return the bytes of `base`, the weights that roles share, and of what each role adds, if anything."""
        parts: dict[str, tuple[nn.Module | None, ...]] = {
            POLICY_ADAPTER: (),
            "reference": (self.reference_model,),
            "critic": (self.critic_model, self.value_head),
            "reward": (reward_model, self.score_head),
            "teacher": (self.teacher_model,),
        }
        shared = {id(parameter) for parameter in self.causal.parameters()}  # a tower, by policy and reference
        found = {"base": weight_bytes(p for n, p in self.causal.named_parameters() if "lora_" not in n)}
        for name, modules in parts.items():
            own = [p for module in modules if module is not None for p in module.parameters() if id(p) not in shared]
            role = "policy" if name == POLICY_ADAPTER else name
            found[role] = weight_bytes([*self.adapter_parameters(name).values(), *own])
        return {role: size for role, size in found.items() if size}

    def describe_memory(self, *, reward_model: nn.Module | None = None, sampling_copy: int = 0) -> str:
        """Return a line with the bytes of weights by part, the engine's copy and the optimizers' state among them."""
        moments = self.num_trained * MOMENT_BYTES[self.config.optim.optimizer]
        more = {"sampling copy": sampling_copy, "optimizers": moments}
        parts = self.bytes_by_role(reward_model=reward_model) | more
        return "memory of weights: " + ", ".join(f"{n} {b / 1e6:,.1f} MB" for n, b in parts.items() if b)

    @property
    def num_trained(self) -> int:
        return sum(p.numel() for role in self.parameters.values() for p in role.values())

    def checkpoint_bytes(self) -> int:
        """Estimate a checkpoint's bytes: trained weights and Adam's two moments in float32, and the run's state."""
        return 3 * 4 * self.num_trained + STATE_BYTES

    # ---- checkpoint files: at the root the policy, as plain PEFT files or a plain transformers model ----

    def _adapters(self) -> list[tuple[str, str, PeftModel, str]]:
        """List the adapters that a checkpoint holds: (role, folder, model, name)."""
        found = []
        if self.peft is not None:
            found.append(("policy", "", self.peft, POLICY_ADAPTER))
            if self.reference_adapter is not None:
                found.append(("reference", "reference", self.peft, self.reference_adapter))
            if self.critic_kind == "adapter":
                found.append(("critic", "critic", self.peft, "critic"))
        if isinstance(self.critic_model, PeftModel):
            found.append(("critic", "critic", self.critic_model, POLICY_ADAPTER))
        return found

    def _critic_modules(self) -> dict[str, nn.Module]:
        """Return the critic's modules that a checkpoint holds whole, by file."""
        own = self.critic_model is not None and not isinstance(self.critic_model, PeftModel)
        found = {f"critic/{MODEL}": self.backbone("critic")} if own else {}
        return found if self.value_head is None else {**found, VALUE_HEAD: self.value_head}

    def save(self, folder: Path) -> None:
        """Save policy and value_head.safetensors at the root, critic/ and reference/ where they have own weights."""
        for _, place, model, name in self._adapters():
            save_adapter(model, name, folder / place)
        if self.peft is None:
            self.causal.save_pretrained(folder, max_shard_size="10000GB")
        self._save_tokenizer(folder)
        self._save_critic(folder)

    def save_without_weights(self, folder: Path) -> None:
        """Write what `save`, and a merged export, write besides tensors, as they write it."""
        for _, place, model, name in self._adapters():
            save_adapter_config(model, name, folder / place)
        if self.peft is None:
            self.causal.save_pretrained(folder, state_dict={})
        else:
            self.causal.config.save_pretrained(folder)
            if self.causal.can_generate() and self.causal.generation_config is not None:
                self.causal.generation_config.save_pretrained(folder)
        self._save_tokenizer(folder)

    def _save_tokenizer(self, folder: Path) -> None:
        """Save the tokenizer, with the processor of images around it where the model reads some."""
        save_tokenizer(self.tokenizer, folder, revision=self.revision)
        if self.with_images:
            save_processor(self.config.model.path, folder, revision=self.revision)

    def _save_critic(self, folder: Path) -> None:
        for file, module in self._critic_modules().items():
            (folder / file).parent.mkdir(exist_ok=True)
            save_file({n: t.detach().contiguous().cpu() for n, t in module.state_dict().items()}, folder / file)

    def load(self, folder: Path, *, only: Literal["policy", "critic"] | None = None) -> None:
        """Load a checkpoint, or `only` one role of it; the policy may be any PEFT folder or model of the same shape."""
        for role, place, model, name in self._adapters():
            if only in (None, role):
                load_adapter_weights(model, name, folder / place / ADAPTER_FILE)
        if self.peft is None and only != "critic":
            load_saved_model(self.causal, folder)
        if only != "policy":
            for file, module in self._critic_modules().items():
                load_weights(module, folder / file)
        self.keep_trainable()


def recomputable_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """List the layers that the library can recompute in backward."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def _recompute_later(layer: nn.Module, run: Callable[..., Any], *args: Any) -> Any:
    attending = attending_as_now()  # backward comes when the forward pass, and its attention, are over

    def without_dropout(*inputs: Any) -> Any:
        was = layer.training
        layer.training = False
        try:
            with attending():
                return run(*inputs)
        finally:  # the recomputation is cut short by an exception of its own
            layer.training = was

    return checkpoint(without_dropout, *args, use_reentrant=False)


def weight_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct tensors (tied weights once)."""
    unique = {tensor.data_ptr(): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.itemsize for tensor in unique.values())


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
