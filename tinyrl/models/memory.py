"""Bytes of weights by role, and of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from tinyrl.models.lora import POLICY_ADAPTER
from tinyrl.models.roles import Roles

STATE_BYTES = 32_000  # of a checkpoint that are no weights: random numbers, configuration, counters
ADAPTERS = (POLICY_ADAPTER, "reference", "critic", "reward", "teacher")


def weight_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of distinct tensors (tied weights once)."""
    unique = {tensor.data_ptr(): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.itemsize for tensor in unique.values())


def bytes_by_role(roles: Roles, *, reward_model: nn.Module | None = None) -> dict[str, int]:
    """`base`: the weights that roles share; then what each role adds to them (an adapter, a head, a model of its own).
    Roles that add nothing (a reference that is the base without adapters) are left out.
    """
    adapters = {name: roles.adapter_parameters(name) for name in ADAPTERS}
    parts: dict[str, list[Tensor]] = {
        "base": _base_parameters(roles),
        "policy": [*adapters[POLICY_ADAPTER].values()],
        "reference": [*adapters["reference"].values(), *_of(roles.reference_model)],
        "critic": [*adapters["critic"].values(), *_of(roles.critic_model), *_of(roles.value_head)],
        "reward": [*adapters["reward"].values(), *_of(reward_model), *_of(roles.score_head)],
        "teacher": [*adapters["teacher"].values(), *_of(roles.teacher_model)],
    }
    return {role: weight_bytes(tensors) for role, tensors in parts.items() if tensors}


def _base_parameters(roles: Roles) -> list[Tensor]:
    branches = {id(p) for name in ADAPTERS for p in roles.adapter_parameters(name).values()}
    return [p for p in roles.causal.parameters() if id(p) not in branches]


def _of(module: nn.Module | None) -> list[Tensor]:
    return [] if module is None else list(module.parameters())


def checkpoint_bytes(roles: Roles) -> int:
    """Bytes of a checkpoint, about: trained weights and Adam's two moments in float32, and the run's state."""
    trained = sum(p.numel() for role in roles.parameters.values() for p in role.values())
    return 3 * 4 * trained + STATE_BYTES
