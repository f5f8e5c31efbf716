"""The models of a run: policy, reference, critic and reward as adapters and heads on one base.

One role acts at a time: forward, backward, then the next (adapters.py). The parameters of each role are collected
once, by name, and kept trainable. policy_files.py saves and loads roles, memory.py counts their bytes.

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.config.schema import Config
from tinyrl.data.images import is_image_id
from tinyrl.models.adapters import Adapters
from tinyrl.models.batch import Batch, Item, Tokens, batch_of, examples
from tinyrl.models.checks import (
    check_head,
    check_images,
    packs_exactly,
    packs_images_exactly,
    supports_fused_layers,
)
from tinyrl.models.device import Device, move_to_device, to_device
from tinyrl.models.experts import compute_experts, expert_parameters, routers
from tinyrl.models.frozen_copy import frozen_copy
from tinyrl.models.image_inputs import ImageExpander, ImageInputs
from tinyrl.models.kernels import Kernels
from tinyrl.models.loading import embedding_rows
from tinyrl.models.logprobs import Head, ValueHead, head_of, token_logprobs
from tinyrl.models.lora import ALL_LINEAR, NOT_ADAPTABLE, POLICY_ADAPTER, base_of, config_of
from tinyrl.models.micro_batches import MicroBatches, SequenceLengths, Work
from tinyrl.models.parallel import World, world
from tinyrl.models.recomputation import check_recomputable, recomputing
from tinyrl.models.reward_model import positions_of
from tinyrl.models.states import backbone_of, last_states, response_states
from tinyrl.models.towers import language_parameters, language_parts, towers_of

Role = Literal["policy", "reference", "critic", "reward", "teacher", "base"]
CriticKind = Literal["adapter", "shared", "shared-detached", "separate"]
MOST_KL_AT_START = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


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
        self.causal = base_of(model)
        tokens = config.run.micro_batch_tokens
        self.micro_batches = MicroBatches(device.device, tokens, vocabulary=embedding_rows(self.causal))
        self.kernels = Kernels()
        self.images: ImageInputs | None = None  # of a model that reads them
        self.teacher_images: ImageInputs | None = None  # of a teacher with a tower of its own
        self.reference_adapter: str | None = None
        self.reference_model: PreTrainedModel | None = None
        self.critic_kind: CriticKind | None = None
        self.critic_model: PreTrainedModel | PeftModel | None = None
        self.teacher_model: PreTrainedModel | None = None
        self.value_head: ValueHead | None = None
        self.score_head: ValueHead | None = None
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        self.dtype: torch.dtype = self.causal.dtype  # of the weights as loaded, and of autocast
        with_images = bool(config.model.with_images)
        if isinstance(model, PeftModel):
            self.adapters = Adapters(model, device=self.device)
            self.parameters["policy"] = self.adapters.parameters(POLICY_ADAPTER)
        else:
            if self.has_reference:
                frozen = towers_of(self.causal) if with_images else []
                self.reference_model = frozen_copy(self.causal, self.device, shared=frozen)
            for part in language_parts(self.causal) if with_images else [self.causal]:
                part.float()
            self.adapters = Adapters(self.causal, device=self.device)
            trained = language_parameters(self.causal) if with_images else dict(self.causal.named_parameters())
            self.parameters["policy"] = trained
        self.keep_trainable()
        check_head(self.causal, self.head("policy"), self.backbone("policy"))
        self.packs = packs_exactly(self.backbone("policy"))

    # ---- building roles ----

    def freeze_reference_adapter(self) -> None:
        """Make the reference a frozen copy of the policy's adapter as it is now (continuing from a LoRA)."""
        self.adapters.add_copy("reference")
        self.reference_adapter = "reference"
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
            self.adapters.add("critic", config=lora)
            parameters |= self.adapters.parameters("critic")
        elif model is not None:
            move_to_device(model, self.device).eval()
            compute_experts(model)
            backbone = self.backbone("critic")
            if not isinstance(model, PeftModel):
                trained = model.get_decoder() if self.config.model.with_images else backbone
                trained.float()
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
        dropout = self.lora_dropout and torch.is_grad_enabled()
        with self.adapters.active(self.adapter_of(role), dropout=dropout):
            yield self._model_of(role)

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

    # ---- what roles compute ----

    def _model_of(self, role: Role) -> PreTrainedModel:
        if role == "reference" and self.adapters.peft is None:
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

    def states(self, role: Role, batch: Batch) -> Tensor:
        """Compute the hidden states (N, H) before each response token; the role must be acting."""
        model = self._model_of(role)
        if role == "critic" and (rows := embedding_rows(model)) < embedding_rows(self.causal):
            # A larger policy of the family samples, now and then, a row that belongs to no token.
            batch = replace(batch, input_ids=batch.input_ids.clamp(max=rows - 1))
        return response_states(backbone_of(model), batch)

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
        states = self.states(role, batch) if states is None else states
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
        states = self.states("critic", batch) if states is None else states
        return batch.to_rows(self.value_head(states))

    @property
    def value_role(self) -> Role:
        """Return the role that acts when values are computed: the critic, or the policy with a head on its states."""
        return "critic" if self.critic_kind in ("adapter", "separate") else "policy"

    def reward_scores(self, batch: Batch) -> Tensor:
        """Compute scores (b,) at each row's last token; the reward role must be acting (or the policy it trains in)."""
        assert self.score_head is not None
        return self.score_head(last_states(self.backbone("policy"), batch))

    def batch_of(
        self,
        items: Sequence[Item],
        tokens: Tokens = "loss",
        *,
        last_tokens: bool = False,
        rows: Sequence[int] | None = None,
        role: Role = "policy",
    ) -> Batch:
        """Make the models' input of samples or examples. last_tokens: for `reward_scores`; rows: their places in the
        pass; role: whose features their images have.
        """
        return batch_of(
            items,
            packed=self.packs,
            device=self.device,
            tokens=tokens,
            last_tokens=last_tokens,
            rows=rows,
            varlen=self.kernels.varlen_attention,
            images=self.images_of(role),
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
            batch = self.batch_of([items[i] for i in rows], tokens, last_tokens=last_tokens, role=role)
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

    def images_of(self, role: Role) -> ImageInputs | None:
        """Return the images of prompts for the tower of a role."""
        return self.images if role != "teacher" or self.teacher_images is None else self.teacher_images

    def try_images(self) -> None:
        """Compare numbers on an image with the library's, once prompts have been tokenised. Raises ValueError where
        states behind it are different; rows are padded where only packed ones are.
        """
        roles: list[Role] = ["policy"] if self.teacher_images is None else ["policy", "teacher"]
        for role in roles:
            images = self.images_of(role)
            if images is None or not images.expander.images:
                return
            backbone = self.backbone(role)
            with self.acting(role):
                check_images(images, backbone)
                self.packs = self.packs and packs_images_exactly(backbone, images)

    @contextmanager
    def trying_images(self) -> Iterator[None]:
        """Try a small picture, which trials inside read too: for a policy that has not been shown an image. Nothing is
        done for a model of text. Raises ValueError as `try_images` does.
        """
        if self.images is None:
            yield
            return
        with self.images.expander.trying():
            self.try_images()
            yield

    @property
    def image_expander(self) -> ImageExpander | None:
        """Return what puts images into prompts, for a model that reads them."""
        return None if self.images is None else self.images.expander

    def lengths(self, items: Sequence[Item]) -> SequenceLengths:
        return SequenceLengths.of(items, packed=self.packs)

    @property
    def world(self) -> World:
        return world()

    @property
    def positions(self) -> int:
        """Return the most tokens of a prompt with its response."""
        return positions_of(self.causal.config.get_text_config())

    def check_reference(self, prompts: list[list[int]], *, temperature: float) -> None:
        """Check that policy and reference agree before the first step. Raises ValueError, which names the reference."""
        if not self.has_reference:
            return
        shortened = [prompt if any(map(is_image_id, prompt)) else prompt[:32] for prompt in prompts[:4]]
        texts = [[token for token in prompt if not is_image_id(token)] for prompt in shortened]
        batch = self.batch_of(examples(shortened, [text[-8:] for text in texts]))
        roles: list[Literal["policy", "reference"]] = ["policy", "reference"]
        logprobs = []
        for role in roles:
            with torch.no_grad(), self.acting(role), self.run_device.autocast():
                logprobs.append(self.logprobs(role, batch, temperature=temperature)[0])
        gap = float((logprobs[0] - logprobs[1]).abs().max())
        if not gap <= MOST_KL_AT_START.get(self.dtype, 1e-5):
            raise ValueError(
                f"policy and reference differ before the first step (log-probabilities by {gap:.2g}); the reference is "
                f"{self._describe_reference()}; model.dtype=float32 shows whether rounding is the reason"
            )

    def _describe_reference(self) -> str:
        if self.reference_model is not None:
            return "a frozen copy of the model"
        return f"adapter `{self.reference_adapter}`" if self.reference_adapter else "the base without adapters"

    # ---- how they compute ----

    def check_gradient_checkpointing(self) -> None:
        """Check early that `gradient_checkpointing` can be used. Raises ValueError where a model cannot."""
        check_recomputable(self._trained_models())

    def gradient_checkpointing(self) -> AbstractContextManager[None]:
        """Recompute the layers of what trains in backward; forward AND backward belong inside."""
        return recomputing(self._trained_models())

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
        return "; ".join([f"training: {', '.join(parts)}", f"rows are {rows}", *self._adapter_notes()])

    def _adapter_notes(self) -> Iterator[str]:
        """Yield what an adapter leaves out: layers that PEFT cannot adapt, and of a model with experts which share of
        the weights it is on.
        """
        peft = self.adapters.peft
        if peft is None:
            return
        excluded = config_of(peft, POLICY_ADAPTER).exclude_modules or ()
        left_out = [name for name in NOT_ADAPTABLE.get(str(self.causal.config.model_type), []) if name in excluded]
        if left_out:
            yield f"without LoRA: {', '.join(left_out)}, which PEFT cannot adapt here"
        if expert_parameters(self.causal):
            adapted = any(isinstance(layer, ParamWrapper) for layer in self.adapters.layers(POLICY_ADAPTER))
            others = "" if adapted else ", none on its experts (lora.target_parameters=experts)"
            yield f"LoRA on {self.adapters.share(POLICY_ADAPTER):.1%} of the weights{others}"
            if namesakes := self._layers_left_out():
                yield f"without LoRA: {', '.join(namesakes)}, whose names PEFT takes for the experts'"

    def _layers_left_out(self) -> list[str]:
        """Return the names of linear layers that `all-linear` does not reach beside experts, but for routers."""
        if self.config.lora.target_modules != ALL_LINEAR or self.config.model.adapter is not None:
            return []
        decoder = self.causal.get_decoder()
        adapted = {id(layer.get_base_layer()) for layer in self.adapters.layers(POLICY_ADAPTER)}
        scoring = {name.rpartition(".")[2] for name in routers(self.causal)}
        plain = {
            name.rpartition(".")[2]
            for name, module in decoder.named_modules()
            if isinstance(module, nn.Linear) and id(module) not in adapted and "lora_" not in name
        }
        return sorted(plain - scoring)

    @property
    def num_trained(self) -> int:
        return sum(p.numel() for role in self.parameters.values() for p in role.values())
