"""Policy of tiny models, and what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.policies import policy_of
from tinyrl.models.batch import Batch, batch_of, examples
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import lora_config, with_experts, wrap_in_lora
from tinyrl.models.policy import CriticKind, Policy

CPU = torch.device("cpu")
CRITICS: list[tuple[bool, CriticKind]] = [
    (True, "adapter"),
    (True, "shared-detached"),
    (False, "shared"),
    (False, "separate"),
]


def lora(targets: str | list[str] = "all-linear", *, dropout: float = 0.0):
    return lora_config(r=4, alpha=8, dropout=dropout, target_modules=targets)


def lora_roles(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    targets: Any = "all-linear",
    reference: bool = True,
    device: torch.device = CPU,
    experts: Any = "peft",
) -> Policy:
    base = load_causal_lm(str(folder), dtype=dtype)
    model = wrap_in_lora(base, with_experts(lora(targets, dropout=dropout), base, experts))
    return policy_of(model, device=device, reference=reference)


def full_roles(
    folder: Path, *, dtype: torch.dtype = torch.float32, reference: bool = True, device: torch.device = CPU
) -> Policy:
    return policy_of(load_causal_lm(str(folder), dtype=dtype), device=device, reference=reference)


def roles_with_critic(folder: Path, *, with_lora: bool, kind: CriticKind, dtype: torch.dtype = torch.float32) -> Policy:
    roles = (lora_roles if with_lora else full_roles)(folder, dtype=dtype)
    model: Any = load_causal_lm(str(folder), dtype=dtype) if kind == "separate" else None
    roles.add_critic(kind, lora=lora(), model=wrap_in_lora(model, lora()) if model and with_lora else model)
    return roles


def stir(parameters: dict[str, nn.Parameter], *, seed: int = 0) -> None:
    """Move every parameter a little: a fresh LoRA's B and a fresh head are zero and would have no effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.05).to(parameter.device))


def a_batch() -> Batch:
    return batch_of(examples([[2, 3, 4], [9]], [[5, 6, 7], [8, 10]]))


def logprobs(roles: Policy, role: Any) -> Tensor:
    """Log-probabilities of `a_batch` under a role's weights."""
    with torch.no_grad(), roles.acting(role):
        return roles.logprobs("reference" if role == "reference" else "policy", a_batch(), temperature=1.0)[0]


def values(roles: Policy, *, detach: bool = False) -> Tensor:
    """Values of `a_batch`; the value role must be acting where they are to have a gradient."""
    if roles.value_role == "critic":
        return roles.values(a_batch())
    states = roles.states("policy", a_batch())
    return roles.values(a_batch(), states=states.detach() if detach else states)


def every_tensor(roles: Policy) -> dict[str, Tensor]:
    """All parameters and buffers of everything a `Policy` holds, by part and name."""
    names = {"base": "causal"} | {n: n for n in ("reference_model", "critic_model", "value_head", "score_head")}
    parts = {part: getattr(roles, name) for part, name in names.items()}
    return {
        f"{part}/{n}": t for part, m in parts.items() if m is not None for n, t in m.state_dict(keep_vars=True).items()
    }
