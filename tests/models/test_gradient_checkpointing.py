"""Gradient checkpointing: the same gradient from recomputed layers, and no dropout."""

import pytest
import torch

from tests.models.building import a_batch, full_roles, lora_roles, roles_with_critic, stir
from tests.tiny_models import TinyModels
from tinyrl.models.roles import Roles, recomputable_layers


def gradients(roles: Roles, role: str, *, recompute: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients by name, and how often the model's first MLP ran."""
    runs = []
    trained = roles.critic_model if role == "critic" and roles.critic_model is not None else roles.causal
    mlp = next(m for n, m in trained.named_modules() if n.endswith((".mlp", ".fc1")))
    handle = mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    with roles.acting(role):  # pyright: ignore[reportArgumentType]
        if recompute:
            with roles.gradient_checkpointing():
                loss_of(roles, role).backward()
        else:
            loss_of(roles, role).backward()
    handle.remove()
    found = {}
    for name, parameter in roles.parameters[role].items():
        assert parameter.grad is not None, name
        found[name], parameter.grad = parameter.grad, None
    return found, len(runs)


def loss_of(roles: Roles, role: str) -> torch.Tensor:
    if role == "critic":
        return roles.values(a_batch()).square().sum()
    return roles.logprobs("policy", a_batch(), temperature=1.0)[0].square().sum()


def check_same_gradients(roles: Roles, role: str = "policy") -> None:
    roles.check_gradient_checkpointing()
    stir(roles.parameters[role])
    kept, once = gradients(roles, role, recompute=False)
    recomputed, twice = gradients(roles, role, recompute=True)
    assert (once, twice) == (1, 2)
    for name, gradient in kept.items():
        assert torch.equal(recomputed[name], gradient), name
    again, runs = gradients(roles, role, recompute=False)
    assert runs == 1  # nothing stays switched on
    assert all(torch.equal(again[name], gradient) for name, gradient in kept.items())
    assert not any(m.training for m in recomputable_layers(roles.causal))


@pytest.mark.parametrize(("make", "kind"), [(lora_roles, "gpt2"), (full_roles, "llama")])
def test_the_gradient_is_the_same(tiny: TinyModels, make, kind: str):
    """gpt2 has a dropout of 0.1, so a dropout that is on would show."""
    check_same_gradients(make(tiny(kind)))


@pytest.mark.parametrize(("with_lora", "kind"), [(True, "adapter"), (False, "separate")])
def test_the_critics_gradient_is_the_same(tiny: TinyModels, with_lora: bool, kind):
    check_same_gradients(roles_with_critic(tiny("gpt2"), with_lora=with_lora, kind=kind), "critic")


def test_lora_dropout_drops_the_same_when_recomputed(tiny: TinyModels):
    roles = lora_roles(tiny("llama"), dropout=0.5)
    stir(roles.parameters["policy"])
    roles.use_lora_dropout()
    torch.manual_seed(0)
    kept, _ = gradients(roles, "policy", recompute=False)
    torch.manual_seed(0)
    recomputed, _ = gradients(roles, "policy", recompute=True)
    for name, gradient in kept.items():
        torch.testing.assert_close(recomputed[name], gradient)
