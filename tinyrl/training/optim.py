"""Optimizers, one per role, and a learning-rate schedule that depends on the step alone.

A resume thus has no schedule to restore.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tinyrl.config.sections import OptimConfig

Parameters = dict[str, nn.Parameter]


@dataclass
class RoleOptimizer:
    """AdamW over one role's parameters by name. Its state is named tensors, so that a checkpoint needs no pickle."""

    parameters: Parameters
    learning_rate: float
    optimizer: torch.optim.Optimizer

    @classmethod
    def make(
        cls,
        parameters: Parameters,
        *,
        learning_rate: float,
        weight_decay: float,
        kind: Literal["adamw", "adamw8bit"] = "adamw",
    ) -> RoleOptimizer:
        """Weight decay applies to matrices only: decaying a bias or a norm's gain pulls it towards nothing
        meaningful. `adamw8bit` keeps both moments of large tensors in blocks of eight bits (2110.02861): 2 bytes a
        parameter instead of 8. Raises ValueError where bitsandbytes is missing.
        """
        adamw: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
        if kind == "adamw8bit":
            try:
                from bitsandbytes.optim.adamw import AdamW8bit as adamw
            except ImportError:
                need = "optim.optimizer=adamw8bit needs bitsandbytes: pip install 'tinyrl[quantization]'"
                raise ValueError(need) from None
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = adamw([g for g in groups if g["params"]], lr=learning_rate, betas=(0.9, 0.999))
        return cls(parameters, learning_rate, optimizer)

    def set_rate(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * factor

    def clip(self, max_norm: float) -> float:
        """Clip this role's gradient in place; returns its norm before clipping (0 where no gradient flowed)."""
        return float(nn.utils.clip_grad_norm_(list(self.parameters.values()), max_norm))

    def state_tensors(self) -> dict[str, Tensor]:
        """Adam's state as `<parameter>|<key>` -> tensor (the step too, which bitsandbytes keeps as a number; its
        tables of eight-bit values are shared by all parameters, which safetensors refuses, so they are copies).
        """
        state = self.optimizer.state
        found = {f"{n}|{k}": v for n, p in self.parameters.items() for k, v in state.get(p, {}).items()}
        return {k: v.clone() if "|qmap" in k else torch.as_tensor(v) for k, v in found.items()}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state_tensors` gave. Raises ValueError for a parameter that is not trained here."""
        self.optimizer.state.clear()
        for key, value in tensors.items():
            name, _, field = key.rpartition("|")
            if name not in self.parameters:
                raise ValueError(f"the optimizer's state is for a parameter that is not trained here: {name}")
            parameter = self.parameters[name]
            if field == "step":  # a number for bitsandbytes
                kept = value.clone() if isinstance(self.optimizer, torch.optim.AdamW) else int(value)
            else:
                kept = value.to(parameter.device, copy=True)
            self.optimizer.state.setdefault(parameter, {})[field] = kept


def role_optimizers(optim: OptimConfig, parameters: dict[str, Parameters]) -> dict[str, RoleOptimizer]:
    """An optimizer for each role that is trained, the critic's with its own learning rate."""
    rates = {"policy": optim.learning_rate, "critic": optim.critic_learning_rate}
    how = {"weight_decay": optim.weight_decay, "kind": optim.optimizer}
    return {role: RoleOptimizer.make(p, learning_rate=rates[role] or 0.0, **how) for role, p in parameters.items()}


def optimizer_tensors(optimizers: dict[str, RoleOptimizer]) -> dict[str, Tensor]:
    """The states of all roles' optimizers as `<role>|<parameter>|<key>` -> tensor."""
    states = {role: optimizer.state_tensors() for role, optimizer in optimizers.items()}
    return {f"{role}|{key}": tensor.contiguous() for role, state in states.items() for key, tensor in state.items()}


def load_optimizers(optimizers: dict[str, RoleOptimizer], tensors: dict[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` gave."""
    for role, optimizer in optimizers.items():
        of_role = {key.removeprefix(f"{role}|"): t for key, t in tensors.items() if key.startswith(f"{role}|")}
        optimizer.load_state_tensors(of_role)


def stretched_schedule(optim: OptimConfig, *, step: int, before: int, now: int) -> str | None:
    """A sentence where going on at `step` with another run.num_steps makes the learning rate jump."""
    was, new = (rate_factor(optim.schedule, step, num_steps=n, warmup_steps=optim.warmup_steps) for n in (before, now))
    if math.isclose(was, new):
        return None
    rate = optim.learning_rate or 0.0
    return (
        f"optim.schedule={optim.schedule} is stretched from {before} to {now} steps: the learning rate of step "
        f"{step + 1} is {rate * new:.3g} where it would have been {rate * was:.3g}"
    )


def rate_factor(schedule: str, step: int, *, num_steps: int, warmup_steps: int) -> float:
    """Factor of the learning rate at `step` (0-based): linear warm-up, then constant, linear or cosine towards 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0
