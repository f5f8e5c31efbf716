"""PPO's choices: A2C against A2C written down, and a KL weight that waits for the critic."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import running
from tests.tiny_models import TinyModels
from tinyrl.models.policy import Policy
from tinyrl.rollout.sample import Sample
from tinyrl.training.run import Run
from tinyrl.training.step import Pass, Updater

A2C = {"preset": "a2c", "num_epochs": 1, "minibatch_size": None}
KL_COEF = 0.05


def hand_written(roles: Policy, samples: list[Sample]) -> dict[str, list[Tensor]]:
    """Gradients of A2C, a response at a time, by the model's own forward pass: that of the mean over tokens of
    -(G - V) log pi for the policy, of 0.5 (V - G)^2 for the critic; G is what a token is followed by, KL to the
    reference included.
    """
    tokens = sum(sample.num_actions for sample in samples)
    totals = {role: [torch.zeros_like(p) for p in roles.parameters[role].values()] for role in ("policy", "critic")}
    assert roles.value_head is not None

    def add(role: str, loss: Tensor) -> None:
        for total, part in zip(
            totals[role], torch.autograd.grad(loss / tokens, list(roles.parameters[role].values())), strict=True
        ):
            total += part

    for sample in samples:
        prompt, response = sample.prompt, sample.response
        ids, at = torch.tensor([prompt + response]), slice(len(prompt) - 1, -1)
        with torch.no_grad(), roles.acting("reference") as model:
            reference = model(input_ids=ids).logits[0, at].log_softmax(-1)
        with torch.no_grad(), roles.acting("critic"):
            values = roles.value_head(roles.backbone("critic")(input_ids=ids).last_hidden_state[0, at])
        with roles.acting("policy") as model:
            logprobs = model(input_ids=ids).logits[0, at].log_softmax(-1)
            returns, to_come = [0.0] * len(response), sample.reward
            for t in reversed(range(len(response))):
                to_come -= KL_COEF * float(logprobs[t, response[t]].detach() - reference[t, response[t]])
                returns[t] = to_come
            terms = [-(returns[t] - float(values[t])) * logprobs[t, response[t]] for t in range(len(response))]
            add("policy", torch.stack(terms).sum())
        with roles.acting("critic"):
            values = roles.value_head(roles.backbone("critic")(input_ids=ids).last_hidden_state[0, at])
            add("critic", (0.5 * (values - torch.tensor(returns)).square()).sum())
    return totals


def test_a2c_is_the_gradient_of_a2c(tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of three steps, so against a critic that has learnt and at a KL that is not 0."""
    steps: list[list[Sample]] = []
    norms: list[float] = []
    minibatches, accumulate = Run.minibatches, Updater._accumulate

    def watched(self: Run, samples: list[Sample], **how: Any) -> Iterator[list[Sample]]:
        steps.append(samples)
        return minibatches(self, samples, **how)

    def compared(self: Updater, passes: Sequence[Pass]) -> dict[str, float]:
        said = accumulate(self, passes)
        for role, wanted in hand_written(self.policy, steps[-1]).items():
            for (name, parameter), gradient in zip(self.policy.parameters[role].items(), wanted, strict=True):
                assert parameter.grad is not None, name
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: n + m)
            norms.append(float(torch.cat([g.flatten() for g in wanted]).norm()))
        return said

    monkeypatch.setattr(Run, "minibatches", watched)
    monkeypatch.setattr(Updater, "_accumulate", compared)
    settings = running.config("ppo", tiny("llama"), ppo={**A2C, "kl_coef": KL_COEF}, critic={"warmup_steps": 0})
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    assert len(norms) == 2 * 3  # one optimizer step a rollout, of policy and critic
    assert min(norms) > 1e-2
    for line in running.metrics(run)[1:]:
        assert line["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
        assert line["policy/clipfrac"] == 0.0
        assert "value/clipfrac" not in line
    assert running.metrics(run)[-1]["objective/kl"] > 1e-4


def test_the_weight_of_the_kl_waits_while_the_critic_warms_up(tiny: TinyModels, tmp_path: Path) -> None:
    """The policy does not move, so its KL of 0 says nothing of the weight."""
    adaptive = {"target_kl": 6.0}
    settings = running.config("ppo", tiny("llama"), critic={"warmup_steps": 2}, ppo=adaptive, run={"num_steps": 4})
    _, run, _ = running.train(settings, tmp_path)
    kl_coefs = [line["objective/kl_coef"] for line in running.metrics(run)[1:]]
    assert kl_coefs[:3] == [0.05] * 3
    assert kl_coefs[3] != 0.05
