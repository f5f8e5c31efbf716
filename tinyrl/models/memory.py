"""Bytes of weights by role, and of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from tinyrl.models.lora import POLICY_ADAPTER
from tinyrl.models.roles import Roles

STATE_BYTES = 32_000  # of a checkpoint's random numbers, configuration and counters


def weight_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct tensors (tied weights once)."""
    unique = {tensor.data_ptr(): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.itemsize for tensor in unique.values())


def bytes_by_role(roles: Roles, *, reward_model: nn.Module | None = None) -> dict[str, int]:
    """Return the bytes of `base`, the weights that roles share, and of what each role adds: an adapter, a head, a model
    of its own. Roles that add nothing (a reference that is the base without adapters) are left out.
    """
    parts: dict[str, tuple[str, list[nn.Module | None]]] = {
        "policy": (POLICY_ADAPTER, []),
        "reference": ("reference", [roles.reference_model]),
        "critic": ("critic", [roles.critic_model, roles.value_head]),
        "reward": ("reward", [reward_model, roles.score_head]),
        "teacher": ("teacher", [roles.teacher_model]),
    }
    tensors: dict[str, list[Tensor]] = {"base": [p for n, p in roles.causal.named_parameters() if "lora_" not in n]}
    for role, (adapter, modules) in parts.items():
        own = [p for module in modules if module is not None for p in module.parameters()]
        tensors[role] = [*roles.adapter_parameters(adapter).values(), *own]
    return {role: weight_bytes(found) for role, found in tensors.items() if found}


def checkpoint_bytes(roles: Roles) -> int:
    """Estimate a checkpoint's bytes: trained weights and Adam's two moments in float32, and the run's state."""
    trained = sum(p.numel() for role in roles.parameters.values() for p in role.values())
    return 3 * 4 * trained + STATE_BYTES
