"""Memory of each role's weights in bytes; shared weights are counted once, at the base."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from tinyrl.models.loading import POLICY_ADAPTER
from tinyrl.models.roles import Roles

STATE_BYTES = 32_000  # of a checkpoint that are no weights: random numbers, configuration, where the run stands


def weight_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of distinct tensors (tied weights once)."""
    unique = {tensor.data_ptr() or id(tensor): tensor for tensor in tensors}  # on the meta device all are at 0
    return sum(tensor.numel() * tensor.itemsize for tensor in unique.values())


def bytes_by_role(roles: Roles, *, reward_model: nn.Module | None = None) -> dict[str, int]:
    """`base`: the weights that roles share; then what each role adds to them (an adapter, a head, a model of its own).
    Roles that add nothing (a reference that is the base without adapters) are left out.
    """
    adapters = {name: roles.adapter_parameters(name) for name in (POLICY_ADAPTER, "reference", "critic", "reward")}
    branches = {id(p) for adapter in adapters.values() for p in adapter.values()}
    parts: dict[str, list[Tensor]] = {
        "base": [p for p in roles.causal.parameters() if id(p) not in branches],
        "policy": [*adapters[POLICY_ADAPTER].values()],
        "reference": [*adapters["reference"].values(), *_of(roles.reference_model)],
        "critic": [*adapters["critic"].values(), *_of(roles.critic_model), *_of(roles.value_head)],
        "reward": [*adapters["reward"].values(), *_of(reward_model), *_of(roles.score_head)],
    }
    return {role: weight_bytes(tensors) for role, tensors in parts.items() if tensors}


def _of(module: nn.Module | None) -> list[Tensor]:
    return [] if module is None else list(module.parameters())


def checkpoint_bytes(roles: Roles) -> int:
    """Bytes of a checkpoint, about: trained weights and Adam's two moments in float32, and the run's state."""
    trained = sum(p.numel() for role in roles.parameters.values() for p in role.values())
    return 3 * 4 * trained + STATE_BYTES
