"""Optimizers: AdamW by hand for two steps, schedules by their numbers, state that goes through tensors."""

import math
import sys
from typing import Any, Literal

import pytest
import torch
from torch import nn

from tinyrl.config.sections import OptimConfig
from tinyrl.training.step import RoleOptimizer, rate_factor, stretched_schedule


def make(weight_decay: float = 0.0, /, **values: Any) -> RoleOptimizer:
    """An optimizer with a learning rate of 0.1 over parameters of these values."""
    parameters = {name: nn.Parameter(torch.tensor(value)) for name, value in values.items()}
    return RoleOptimizer.make(parameters, learning_rate=0.1, weight_decay=weight_decay)


def step(role: RoleOptimizer, **gradients: Any) -> None:
    for name, gradient in gradients.items():
        role.parameters[name].grad = torch.tensor(gradient)
    role.optimizer.step()


def test_two_steps_of_adam_by_hand():
    role = make(w=[[1.0]])
    step(role, w=[[0.5]])
    # bias-corrected moments of one gradient: m = 0.5, v = 0.25, so the step is lr * 0.5 / 0.5
    assert role.parameters["w"].item() == pytest.approx(1.0 - 0.1, abs=1e-6)
    step(role, w=[[-0.5]])
    m = (0.9 * 0.1 * 0.5 - 0.1 * 0.5) / (1 - 0.9**2)
    v = (0.999 * 0.001 * 0.25 + 0.001 * 0.25) / (1 - 0.999**2)
    assert role.parameters["w"].item() == pytest.approx(0.9 - 0.1 * m / math.sqrt(v), abs=1e-6)


def test_matrices_decay_and_vectors_do_not():
    role = make(0.5, w=[[1.0]], bias=[1.0], gain=1.0)
    step(role, w=[[0.0]], bias=[0.0], gain=0.0)
    assert role.parameters["w"].item() == pytest.approx(1.0 - 0.1 * 0.5)
    assert role.parameters["bias"].item() == 1.0
    assert role.parameters["gain"].item() == 1.0


def test_the_rate_is_a_factor_of_the_roles_own():
    role = make(w=[[1.0]], bias=[1.0])
    role.set_rate(0.5)
    step(role, w=[[3.0]], bias=[-3.0])
    assert role.parameters["w"].item() == pytest.approx(0.95, abs=1e-6)
    assert role.parameters["bias"].item() == pytest.approx(1.05, abs=1e-6)
    role.set_rate(1.0)  # of 0.1 again, not of 0.05
    assert {group["lr"] for group in role.optimizer.param_groups} == {0.1}


def test_clipping_scales_all_of_a_role_together_and_tells_the_norm_before():
    role = make(a=[[3.0]], b=[1.0], without=[1.0])
    role.parameters["a"].grad, role.parameters["b"].grad = torch.tensor([[3.0]]), torch.tensor([4.0])
    assert role.clip(1.0) == pytest.approx(5.0)
    gradients = [role.parameters[name].grad for name in ("a", "b")]
    assert [gradient.item() for gradient in gradients if gradient is not None] == pytest.approx([0.6, 0.8], abs=1e-5)
    assert role.clip(10.0) == pytest.approx(1.0, abs=1e-5)  # below the limit nothing changes
    assert gradients[1] is not None
    assert gradients[1].item() == pytest.approx(0.8, abs=1e-5)


# State


def test_state_goes_through_tensors_and_the_next_step_is_the_same_bit_by_bit():
    torch.manual_seed(0)
    start = {"layer.0|odd": torch.randn(3, 2).tolist(), "bias": torch.randn(4).tolist()}
    first, second = make(**start), make(**start)
    gradients = [
        {name: torch.randn(value.shape).tolist() for name, value in first.parameters.items()} for _ in range(3)
    ]
    for gradient in gradients[:2]:
        step(first, **gradient)
    tensors = {name: tensor.clone() for name, tensor in first.state_tensors().items()}
    assert set(tensors) == {f"{name}|{key}" for name in start for key in ("step", "exp_avg", "exp_avg_sq")}
    with torch.no_grad():
        for name, parameter in second.parameters.items():
            parameter.copy_(first.parameters[name])
    second.load_state_tensors(tensors)
    step(first, **gradients[2])
    step(second, **gradients[2])
    for name, parameter in first.parameters.items():
        assert torch.equal(parameter, second.parameters[name])
    # what was loaded is a copy: stepping did not change the tensors of the checkpoint
    assert tensors["bias|step"].item() == 2.0


def test_state_of_a_parameter_that_is_not_there_is_refused():
    role = make(a=[1.0])
    with pytest.raises(ValueError, match="a parameter that is not trained here: gone"):
        role.load_state_tensors({"gone|exp_avg": torch.zeros(1)})


# Schedules


@pytest.mark.parametrize(
    ("schedule", "warmup", "factors"),
    [
        ("constant", 4, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ("linear", 0, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("linear", 2, [0.5, 1.0, 1.0, 0.5, 0.0]),
        ("cosine", 0, [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0]),
        ("cosine", 9, [1 / 9, 2 / 9, 3 / 9, 4 / 9, 5 / 9]),
    ],
)
def test_a_schedule_is_a_function_of_the_step(schedule: str, warmup: int, factors: list[float]):
    """Four steps (0 to 3) and the one after the last."""
    got = [rate_factor(schedule, step, num_steps=4, warmup_steps=warmup) for step in range(5)]
    assert got == pytest.approx(factors, abs=1e-12)


def test_a_schedule_that_a_resume_stretches_is_told():
    """At step 50 of 100 a linear rate is half; of 200, three quarters."""
    optim = OptimConfig(learning_rate=1e-4, schedule="linear")
    said = stretched_schedule(optim, step=50, before=100, now=200) or ""
    assert all(part in said for part in ("optim.schedule=linear", " 7.5e-05 ", " 5e-05"))
    assert stretched_schedule(optim, step=50, before=100, now=100) is None
    assert stretched_schedule(OptimConfig(learning_rate=1e-4), step=50, before=100, now=200) is None


def test_eight_bit_moments_take_a_quarter_and_step_nearly_the_same():
    """On a tensor large enough to be kept in eight bits; its state goes through tensors and the next step is equal."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, 128, generator=generator)
    gradients = [torch.randn(64, 128, generator=generator) for _ in range(4)]

    def fresh(kind: Literal["adamw", "adamw8bit"]) -> RoleOptimizer:
        parameters = {"w": nn.Parameter(start.clone()), "b": nn.Parameter(torch.zeros(8))}
        return RoleOptimizer.make(parameters, learning_rate=0.1, weight_decay=0.0, kind=kind)

    def run(role: RoleOptimizer, which: list[torch.Tensor]) -> torch.Tensor:
        for gradient in which:
            role.parameters["w"].grad, role.parameters["b"].grad = gradient.clone(), torch.ones(8)
            role.optimizer.step()
        return role.parameters["w"].detach().clone()

    def state_bytes(role: RoleOptimizer) -> int:
        return sum(v.numel() * v.itemsize for v in role.state_tensors().values())

    whole, small, resumed = fresh("adamw"), fresh("adamw8bit"), fresh("adamw8bit")
    moved = run(whole, gradients[:3]) - start
    assert (run(small, gradients[:3]) - start - moved).abs().mean() < 0.02 * moved.abs().mean()
    assert state_bytes(small) < 0.35 * state_bytes(whole)  # a quarter, and the tables of eight-bit values
    tensors = {k: v.clone() for k, v in small.state_tensors().items()}
    with torch.no_grad():
        for name, parameter in resumed.parameters.items():
            parameter.copy_(small.parameters[name])
    resumed.load_state_tensors(tensors)
    assert torch.equal(run(resumed, gradients[3:]), run(small, gradients[3:]))


def test_eight_bit_moments_without_bitsandbytes_are_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)
    with pytest.raises(ValueError, match="needs bitsandbytes: pip install"):
        RoleOptimizer.make({"w": nn.Parameter(torch.ones(1))}, learning_rate=0.1, weight_decay=0, kind="adamw8bit")
