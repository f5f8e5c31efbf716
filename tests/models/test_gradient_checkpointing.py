"""Gradient checkpointing: the same gradient from recomputed layers, and no dropout but LoRA's."""

import contextlib

import pytest
import torch
from torch import Tensor

from tests.models.building import a_batch, lora_roles, roles_with_critic, stir
from tests.tiny_models import TinyModels
from tinyrl.models.roles import Roles, recomputable_layers


def gradients(roles: Roles, role: str, *, recompute: bool) -> tuple[dict[str, Tensor], int]:
    """Gradients by name, and how often the model's first MLP ran."""
    runs = []
    trained = roles.critic_model if role == "critic" and roles.critic_model is not None else roles.causal
    mlp = next(m for n, m in trained.named_modules() if n.endswith((".mlp", ".fc1")))
    handle = mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    inside = roles.gradient_checkpointing() if recompute else contextlib.nullcontext()
    with roles.acting(role), inside:  # pyright: ignore[reportArgumentType]
        of_policy = role == "policy"
        found = roles.logprobs("policy", a_batch(), temperature=1.0)[0] if of_policy else roles.values(a_batch())
        found.square().sum().backward()
    handle.remove()
    taken = {}
    for name, parameter in roles.parameters[role].items():
        assert parameter.grad is not None, name
        taken[name], parameter.grad = parameter.grad, None
    return taken, len(runs)


@pytest.mark.parametrize(
    ("with_lora", "kind", "role", "model"),
    [
        (True, "shared", "policy", "gpt2"),  # has a dropout of 0.1: one that is on would show
        (False, "shared", "policy", "llama"),
        (True, "adapter", "critic", "gpt2"),
        (False, "separate", "critic", "gpt2"),
    ],
)
def test_the_gradient_is_the_same(tiny: TinyModels, with_lora: bool, kind, role: str, model: str):
    roles = roles_with_critic(tiny(model), with_lora=with_lora, kind=kind)
    roles.check_gradient_checkpointing()
    stir(roles.parameters[role])
    stored, once = gradients(roles, role, recompute=False)
    recomputed, twice = gradients(roles, role, recompute=True)
    again, runs = gradients(roles, role, recompute=False)
    assert (once, twice, runs) == (1, 2, 1)  # nothing stays switched on
    for name, gradient in stored.items():
        assert torch.equal(recomputed[name], gradient), name
        assert torch.equal(again[name], gradient), name
    assert not any(m.training for m in recomputable_layers(roles.causal))


def test_lora_dropout_drops_the_same_when_recomputed(tiny: TinyModels):
    roles = lora_roles(tiny("llama"), dropout=0.5)
    stir(roles.parameters["policy"])
    roles.lora_dropout = True
    torch.manual_seed(0)
    stored, _ = gradients(roles, "policy", recompute=False)
    torch.manual_seed(0)
    recomputed, _ = gradients(roles, "policy", recompute=True)
    for name, gradient in stored.items():
        torch.testing.assert_close(recomputed[name], gradient)
