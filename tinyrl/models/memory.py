"""Bytes of a policy: its weights by role, the optimizers' state, a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from tinyrl.models.lora import POLICY_ADAPTER
from tinyrl.models.policy import Policy
from tinyrl.models.policy_files import critic_modules

MOMENT_BYTES = {"adamw": 8, "adamw8bit": 2}  # of a trained parameter
STATE_BYTES = 32_000  # of a checkpoint's random numbers, configuration and counters


def weight_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct tensors (tied weights once)."""
    unique = {tensor.data_ptr(): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.itemsize for tensor in unique.values())


def bytes_by_role(policy: Policy, *, reward_model: nn.Module | None = None) -> dict[str, int]:
    """Return the bytes of `base`, the weights that roles share, and of what each role adds, if anything."""
    parts: dict[str, tuple[nn.Module | None, ...]] = {
        POLICY_ADAPTER: (),
        "reference": (policy.reference_model,),
        "critic": (policy.critic_model, policy.value_head),
        "reward": (reward_model, policy.score_head),
        "teacher": (policy.teacher_model,),
    }
    shared = {id(parameter) for parameter in policy.causal.parameters()}  # a tower, by policy and reference
    found = {"base": weight_bytes(p for n, p in policy.causal.named_parameters() if "lora_" not in n)}
    for name, modules in parts.items():
        own = [p for module in modules if module is not None for p in module.parameters() if id(p) not in shared]
        role = "policy" if name == POLICY_ADAPTER else name
        found[role] = weight_bytes([*policy.adapters.parameters(name).values(), *own])
    return {role: size for role, size in found.items() if size}


def describe_memory(policy: Policy, *, reward_model: nn.Module | None = None, sampling_copy: int = 0) -> str:
    """Return a line with the bytes of weights by part, the engine's copy and the optimizers' state among them."""
    moments = policy.num_trained * MOMENT_BYTES[policy.config.optim.optimizer]
    more = {"sampling copy": sampling_copy, "optimizers": moments}
    parts = bytes_by_role(policy, reward_model=reward_model) | more
    return "memory of weights: " + ", ".join(f"{n} {b / 1e6:,.1f} MB" for n, b in parts.items() if b)


def checkpoint_bytes(policy: Policy) -> int:
    """Estimate a checkpoint's bytes: trained weights and Adam's two moments in float32, the frozen tower of each model
    that is written whole (the policy, a separate critic), and the run's state.
    """
    whole = [*critic_modules(policy).values()]
    if policy.adapters.peft is None:
        whole.append(policy.causal)
    trained = {id(parameter) for parameters in policy.parameters.values() for parameter in parameters.values()}
    frozen = sum(weight_bytes(p for p in model.parameters() if id(p) not in trained) for model in whole)
    return 3 * 4 * policy.num_trained + frozen + STATE_BYTES
