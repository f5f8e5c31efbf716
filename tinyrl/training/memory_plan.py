"""The memory of a run by part, before any weight is loaded: the run's own passes on models without numbers.

The highest of its phases counts: loading, sampling, a pass over the fullest micro-batch, an optimizer step. On a CPU
what sampling has freed is still there while weights are updated (models/device.py, keep_freed_memory). Sampled
responses are taken to be as long as they may be, those of a micro-batch as long as fills it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from tinyrl.generation.select import SamplingBytes, sampling_bytes
from tinyrl.models.batches import SequenceBatch
from tinyrl.models.device import KEPT_BYTES
from tinyrl.models.loading import saved_dtype
from tinyrl.models.logprobs import CHUNK_ELEMENTS, token_logprobs
from tinyrl.models.meta import META, AsOn, LiveBytes, bytes_by_role, four_bit_bytes, is_meta, quantized_bytes
from tinyrl.models.micro_batches import StepRows
from tinyrl.models.roles import Role, Roles
from tinyrl.rollout.components import SamplingParts
from tinyrl.training.trainer import Trainer

LARGEST_TEMPORARIES = 2  # of the size of a parameter, in an AdamW step that takes one parameter after the other


Sequences = list[tuple[list[int], list[int]]]  # (prompt, response) of each


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part: `standing` are there all the time, `phases` what each phase adds. room: what there may be in all.
    tokens: the budget of a micro-batch; sampling: None where nothing is sampled.
    """

    device: str
    standing: dict[str, int]
    phases: dict[str, dict[str, int]]
    room: int
    tokens: int
    sampling: SamplingBytes | None = None

    @property
    def highest(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> int:
        return sum(self.standing.values()) + sum(self.phases[self.highest].values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.room


@dataclass
class Planner:
    """Plans of one run for several budgets. meta: the trainer's models without numbers.

    process: bytes that the process has before it loads a model (0 on a GPU, where only tensors are counted);
    reward_model: without numbers too, where it is a model of its own.
    """

    trainer: Trainer
    meta: Roles
    process: int
    room: int
    reward_model: nn.Module | None = None

    @property
    def device(self) -> torch.device:
        return self.trainer.accelerator.device

    @cached_property
    def rows(self) -> StepRows:
        return self.trainer.step_rows()

    @cached_property
    def standing(self) -> dict[str, int]:
        """Bytes of weights by role, of Adam's moments, and of the process itself."""
        roles = bytes_by_role(self.meta, reward_model=self.reward_model)
        if self.trainer.config.model.quantization == "4bit":
            roles["base"] = four_bit_bytes(self.meta)
        teacher, few_bits = self.meta.teacher_model, self.trainer.config.teacher.quantization
        if teacher is not None and few_bits is not None:
            roles["teacher"] = quantized_bytes(teacher, [*teacher.parameters()], few_bits)
        moments = 8 if self.trainer.config.optim.optimizer == "adamw" else 2
        own = {"process": self.process} if self.process else {}
        return {**own, **roles, "Adam": moments * sum(p.numel() for p in trained(self.meta))}

    @cached_property
    def sampling(self) -> SamplingBytes | None:
        """Of a rollout, or of an evaluation where that samples more rows at a time."""
        trainer, config = self.trainer, self.trainer.config
        if not isinstance(trainer, SamplingParts):
            return None
        held_out = min(config.run.eval_prompts, len(trainer.eval_prompts))
        rows = min(max(config.on_policy.batch_size, held_out), config.generation.max_rows or 1 << 30)
        longest = max(len(p.tokens) for p in (*trainer.train_prompts, *trainer.eval_prompts))
        free = max(0, self.room - sum(self.standing.values()))
        return sampling_bytes(
            self.meta,
            config.generation,
            engine=trainer.engine.name,
            rows=rows,
            prompts=max(config.on_policy.num_prompts, held_out),
            prompt_tokens=longest,
            new_tokens=trainer.longest_response,
            device=self.device,
            free=free,
        )

    def plan(self, tokens: int | None = None) -> MemoryPlan:
        """At a micro-batch budget of `tokens` (None: the run's)."""
        tokens = tokens or self.trainer.micro_batches.tokens
        phases = {"updating": self._update(tokens), "an optimizer step": self._optimizer_step()}
        if self.sampling is not None:
            kept = {"kept from sampling": self._kept(self.sampling)}
            phases = {"sampling": self.sampling.parts, **{name: {**kept, **parts} for name, parts in phases.items()}}
        if (read := self._as_read()) > 0:
            phases["loading"] = {"weights as read": read}
        return MemoryPlan(self.device.type, self.standing, phases, self.room, tokens, self.sampling)

    def _as_read(self) -> int:
        """Bytes of the base's files beside the model while it is loaded; none on a CPU where the dtype is theirs."""
        model, dtype = self.trainer.config.model, self.meta.causal.dtype
        if self.device.type != "cpu" or model.random_init:
            return 0
        saved = saved_dtype(model.path, revision=model.revision)
        return 0 if saved == dtype else self.standing["base"] // dtype.itemsize * saved.itemsize

    def _kept(self, sampling: SamplingBytes) -> int:
        """What is still there of sampling: on a CPU the C library keeps what is freed, in pieces that nothing else
        fits; on a GPU graphs hold the fused engine's cache, its copy of the weights and the states of a token.
        """
        if self.device.type == "cpu":
            return min(sum(sampling.parts.values()), KEPT_BYTES)
        by_graphs = isinstance(self.trainer, SamplingParts) and self.trainer.engine.name == "fused"
        return sampling.parts["cache"] + sampling.parts["sampling copy"] + sampling.in_graphs if by_graphs else 0

    def learn(self, role: Role, pairs: Sequences) -> None:
        """A forward and backward pass whose gradients are let go of: of real models too, to time it."""
        with _with_gradients(self.meta, whole=False), self.trainer.accelerator.autocast():
            self._pass(role, pairs)

    def read(self, role: Role, pairs: Sequences) -> None:
        with torch.no_grad(), self.meta.acting(role), self.trainer.accelerator.autocast():
            self.trainer.planned_loss(self.meta, role, self._batch(pairs))

    def _update(self, tokens: int) -> dict[str, int]:
        """Gradients, activations and the logits of a chunk, at the most of any pass of an optimizer step."""
        fullest = self.rows.fullest(tokens)
        rows, count = fullest.widest(tokens)
        pairs = fullest.pairs(rows)
        CHUNK_ELEMENTS["meta"] = CHUNK_ELEMENTS[self.device.type]
        precision = self.trainer.accelerator.mixed_precision
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        acting, autocast = AsOn(self.device, autocast=low), self.trainer.accelerator.autocast()
        with _with_gradients(self.meta, whole=count > 1), acting, autocast, LiveBytes() as live:
            before = _gradient_bytes(self.meta)
            for role in self.trainer.passes:
                self._pass(role, pairs)
            most = live.most + before
        gradients = sum(p.numel() * p.itemsize for p in trained(self.meta))
        chunk = 0 if self.trainer.scores_answers else self._chunk_bytes(pairs)
        return {"gradients": gradients, "logits chunk": chunk, "activations": max(0, most - gradients - chunk)}

    def _pass(self, role: Role, pairs: Sequences) -> None:
        config, roles = self.trainer.config, self.meta
        recompute = roles.gradient_checkpointing() if config.model.gradient_checkpointing else contextlib.nullcontext()
        batch = self._batch(pairs)
        with roles.acting(role), recompute:
            loss = self.trainer.planned_loss(roles, role, batch)
            # Tensor.backward is a torch function, inside which AsOn would be off while layers are recomputed.
            engine: Any = torch.autograd.Variable._execution_engine
            ones = (torch.ones_like(loss),)
            engine.run_backward((loss,), ones, False, False, (), allow_unreachable=True, accumulate_grad=True)

    def _batch(self, pairs: Sequences) -> SequenceBatch:
        prompts, responses = [p for p, _ in pairs], [r for _, r in pairs]
        batch = self.meta.batch(prompts, responses, last_tokens=self.trainer.scores_answers)
        if self.meta.packs or not is_meta(self.meta):
            return batch
        # The library reads numbers of a mask of rows; one of (b, 1, L, L), as it would make, it takes as it is.
        (count, width), model = batch.input_ids.shape, self.meta.causal
        dtype = torch.bool if model.config._attn_implementation == "sdpa" else model.dtype
        return replace(batch, attention_mask=torch.zeros(count, 1, width, width, dtype=dtype, device=META))

    def _chunk_bytes(self, pairs: Sequences) -> int:
        head, count = self.meta.head("policy"), sum(len(r) for _, r in pairs)
        with torch.no_grad(), LiveBytes() as live:
            states = torch.empty(count, head.weight.shape[1], dtype=head.weight.dtype, device=META)
            before, targets = live.now, torch.zeros(count, dtype=torch.long, device=META)
            token_logprobs(states, head, targets=targets, temperature=1.0)
        return live.most - before

    def _optimizer_step(self) -> dict[str, int]:
        """Gradients, and what AdamW makes for itself: on a GPU a temporary for every parameter at once."""
        sizes = [p.numel() * p.itemsize for p in trained(self.meta)]
        own = sum(sizes) if self.device.type == "cuda" else LARGEST_TEMPORARIES * max(sizes, default=0)
        return {"gradients": sum(sizes), "AdamW's temporaries": own}


def trained(roles: Roles) -> list[nn.Parameter]:
    return [p for of_role in roles.parameters.values() for p in of_role.values()]


@contextlib.contextmanager
def _with_gradients(roles: Roles, *, whole: bool) -> Iterator[None]:
    """`whole`: every gradient is there from the start, as it is from a step's second micro-batch on. None is left."""
    for parameter in trained(roles) if whole else []:
        parameter.grad = torch.empty_like(parameter)
    try:
        yield
    finally:
        for parameter in trained(roles):
            parameter.grad = None


def _gradient_bytes(roles: Roles) -> int:
    return sum(p.numel() * p.itemsize for p in trained(roles) if p.grad is not None)
