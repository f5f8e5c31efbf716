"""Roles of tiny models for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from tinyrl.models.batches import SequenceBatch, make_batch
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import lora_config, wrap_in_lora
from tinyrl.models.roles import CriticKind, Roles

CPU = torch.device("cpu")
CRITICS: list[tuple[bool, CriticKind]] = [
    (True, "adapter"),
    (True, "shared-detached"),
    (False, "shared"),
    (False, "separate"),
]
CRITIC_IDS = [f"{'lora' if lora else 'full'}-{kind}" for lora, kind in CRITICS]


def lora(targets: str | list[str] = "all-linear", *, dropout: float = 0.0):
    return lora_config(r=4, alpha=8, dropout=dropout, target_modules=targets)


def lora_roles(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    reference: bool = True,
    device: torch.device = CPU,
) -> Roles:
    model = load_causal_lm(str(folder), dtype=dtype)
    return Roles(wrap_in_lora(model, lora(dropout=dropout)), device=device, reference=reference)


def full_roles(
    folder: Path, *, dtype: torch.dtype = torch.float32, reference: bool = True, device: torch.device = CPU
) -> Roles:
    return Roles(load_causal_lm(str(folder), dtype=dtype), device=device, reference=reference)


def roles_with_critic(folder: Path, *, with_lora: bool, kind: CriticKind, dtype: torch.dtype = torch.float32) -> Roles:
    roles = (lora_roles if with_lora else full_roles)(folder, dtype=dtype)
    model = None
    if kind == "separate":
        model = load_causal_lm(str(folder), dtype=dtype)
        model = wrap_in_lora(model, lora()) if with_lora else model
    roles.add_critic(kind, lora=lora(), model=model)
    return roles


def stir(parameters: dict[str, nn.Parameter], *, seed: int = 0) -> None:
    """Move every parameter a little: a fresh LoRA's B and a fresh head are zero and would have no effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.05).to(parameter.device))


def a_batch() -> SequenceBatch:
    return make_batch([[2, 3, 4], [9]], [[5, 6, 7], [8, 10]])


def logprobs(roles: Roles, role: str, batch: SequenceBatch | None = None) -> Tensor:
    with torch.no_grad(), roles.acting(role):  # pyright: ignore[reportArgumentType]
        who = "reference" if role == "reference" else "policy"
        return roles.logprobs(who, batch or a_batch(), temperature=1.0)[0]


def values(roles: Roles) -> Tensor:
    own = roles.critic_kind in ("adapter", "separate")
    with torch.no_grad(), roles.acting("critic" if own else "policy"):
        return roles.values(a_batch(), states=None if own else roles.policy_states(a_batch()))


def every_tensor(roles: Roles) -> dict[str, Tensor]:
    """All parameters and buffers of everything a `Roles` holds, by a name that says where it is."""
    parts = {
        "base": roles.causal,
        "reference": roles.reference_model,
        "critic": roles.critic_model,
        "value_head": roles.value_head,
        "score_head": roles.score_head,
    }
    return {
        f"{part}/{n}": t for part, m in parts.items() if m is not None for n, t in m.state_dict(keep_vars=True).items()
    }
