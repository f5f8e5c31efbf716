"""Expected gradient of the KL term of the policy loss, over all sequences of a small policy, against divergences."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tinyrl.config.method_sections import GrpoConfig
from tinyrl.training.grpo import loss_options
from tinyrl.training.policy_loss import Counts, LossInputs, policy_loss

V = 4
POLICY = torch.tensor([0.3, -0.8, 1.1, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 0.4, 0.2, 0.9], dtype=torch.float64).log_softmax(-1)
OTHER = torch.tensor([0.9, 0.1, -0.6, 0.3], dtype=torch.float64)  # a policy that has sampled, and is not this one


def kl_term(logprobs: Tensor, *, old: Tensor, ref: Tensor, estimator: str, unbiased: bool) -> Tensor:
    """Return the loss of one sequence (T,) without an advantage: its KL term, summed over tokens."""
    mask = torch.ones(1, len(logprobs), dtype=torch.bool)
    inputs = LossInputs(mask, old[None], torch.zeros(mask.shape), old=old[None], reference=ref[None])
    section = GrpoConfig.model_validate({"kl_coef": 1.0, "kl_estimator": estimator, "kl_unbiased": unbiased})
    options = loss_options(section, max_new_tokens=len(logprobs), inexact=False)
    counts = Counts(tokens=1, sequences=1, rows=1, taught=0, episodes=1)
    return policy_loss(logprobs[None], torch.zeros(mask.shape), inputs, counts, options)[0]


def expected_gradient(sampling: Tensor, *, estimator: str, unbiased: bool) -> Tensor:
    """Average over every token, by its probability under the policy that samples."""
    theta = POLICY.clone().requires_grad_()
    logprobs = theta.log_softmax(-1)
    old = sampling.log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(V):
        one = slice(token, token + 1)
        how: Any = {"estimator": estimator, "unbiased": unbiased}
        total = total + old[token].exp() * kl_term(logprobs[one], old=old[one], ref=REFERENCE[one], **how)
    return torch.autograd.grad(total, theta)[0]


def divergence_gradient(kind: str) -> Tensor:
    theta = POLICY.clone().requires_grad_()
    logprobs = theta.log_softmax(-1)
    reverse = (logprobs.exp() * (logprobs - REFERENCE)).sum()
    forward = (REFERENCE.exp() * (REFERENCE - logprobs)).sum()
    return torch.autograd.grad(reverse if kind == "reverse" else forward, theta)[0]


def is_near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "unbiased", "kind"),
    [("k2", False, "reverse"), ("k3", False, "forward"), ("k3", True, "reverse")],
)
def test_on_policy_each_has_the_gradient_of_one_divergence(estimator: str, unbiased: bool, kind: str) -> None:
    found = expected_gradient(POLICY, estimator=estimator, unbiased=unbiased)
    other = "forward" if kind == "reverse" else "reverse"
    assert is_near(found, divergence_gradient(kind))
    assert not is_near(found, divergence_gradient(other))


def test_off_policy_k3_with_the_ratio_has_that_of_the_reverse_kl() -> None:
    found = expected_gradient(OTHER, estimator="k3", unbiased=True)
    assert is_near(found, divergence_gradient("reverse"))


@pytest.mark.parametrize(("estimator", "unbiased"), [("k2", False), ("k3", False), ("k2", True)])
def test_off_policy_the_others_have_that_of_none(estimator: str, unbiased: bool) -> None:
    found = expected_gradient(OTHER, estimator=estimator, unbiased=unbiased)
    assert not is_near(found, divergence_gradient("reverse"))
    assert not is_near(found, divergence_gradient("forward"))


@pytest.mark.parametrize("on_policy", [True, False])
def test_of_two_tokens_it_is_that_of_the_sum_of_conditional_kls(on_policy: bool) -> None:
    """With the probabilities of prefixes held at those of the policy that samples."""
    generator = torch.Generator().manual_seed(3)
    first, second, ref_first, ref_second, other_first, other_second = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((V,), (V, V), (V,), (V, V), (V,), (V, V))
    )
    theta = [first.clone().requires_grad_(), second.clone().requires_grad_()]
    logprobs = [one.log_softmax(-1) for one in theta]
    ref = [ref_first.log_softmax(-1), ref_second.log_softmax(-1)]
    sampling = [first, second] if on_policy else [other_first, other_second]
    old = [one.log_softmax(-1) for one in sampling]

    total = torch.zeros((), dtype=torch.float64)
    for a, b in product(range(V), range(V)):
        of_sequence = [torch.stack([each[0][a], each[1][a, b]]) for each in (logprobs, old, ref)]
        term = kl_term(of_sequence[0], old=of_sequence[1], ref=of_sequence[2], estimator="k3", unbiased=True)
        total = total + of_sequence[1].sum().exp() * term
    found = torch.autograd.grad(total, theta, retain_graph=True)

    conditional = [(now.exp() * (now - then)).sum(-1) for now, then in zip(logprobs, ref, strict=True)]
    truth = torch.autograd.grad(conditional[0] + (old[0].exp() * conditional[1]).sum(), theta)
    assert all(is_near(one, other) for one, other in zip(found, truth, strict=True))
