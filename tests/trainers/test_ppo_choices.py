"""PPO's choices: A2C against A2C written down, a lambda each for policy and critic, a critic that pretrains."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import running
from tests.algorithms.test_advantages import naive_gae
from tests.tiny_models import TinyModels
from tests.trainers.test_on_policy import rollout_of
from tinyrl.config.method_sections import PpoConfig
from tinyrl.models.roles import Roles
from tinyrl.rollout.buffer import Rollout
from tinyrl.trainers.ppo import advantages_and_returns
from tinyrl.training.session import Session
from tinyrl.training.update import Pass, Updater

A2C = {"preset": "a2c", "num_epochs": 1, "minibatch_size": None}
KL_COEF = 0.05


def hand_written(roles: Roles, rollout: Rollout) -> dict[str, list[Tensor]]:
    """Gradients of A2C, a response at a time, by the model's own forward pass: that of the mean over tokens of
    -(G - V) log pi for the policy, of 0.5 (V - G)^2 for the critic; G is what a token is followed by, KL to the
    reference included.
    """
    tokens = int(rollout.response_mask.sum())
    totals = {role: [torch.zeros_like(p) for p in roles.parameters[role].values()] for role in ("policy", "critic")}
    assert roles.value_head is not None

    def add(role: str, loss: Tensor) -> None:
        for total, part in zip(
            totals[role], torch.autograd.grad(loss / tokens, list(roles.parameters[role].values())), strict=True
        ):
            total += part

    for row in range(len(rollout)):
        prompt, response = rollout.prompt_tokens[int(rollout.prompt_index[row])], rollout.response(row)
        ids, at = torch.tensor([prompt + response]), slice(len(prompt) - 1, -1)
        with torch.no_grad(), roles.acting("reference") as model:
            reference = model(input_ids=ids).logits[0, at].log_softmax(-1)
        with torch.no_grad(), roles.acting("critic"):
            values = roles.value_head(roles.backbone("critic")(input_ids=ids).last_hidden_state[0, at])
        with roles.acting("policy") as model:
            logprobs = model(input_ids=ids).logits[0, at].log_softmax(-1)
            returns, to_come = [0.0] * len(response), float(rollout.rewards[row])
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
    rollouts: list[Rollout] = []
    norms: list[float] = []
    start_update, accumulate = Session.start_update, Updater._accumulate

    def started(self: Session, rollout: Rollout | None = None, **metrics: float) -> None:
        assert rollout is not None
        rollouts.append(rollout)
        start_update(self, rollout, **metrics)

    def compared(self: Updater, passes: Sequence[Pass]) -> dict[str, float]:
        said = accumulate(self, passes)
        for role, wanted in hand_written(self.roles, rollouts[-1]).items():
            for (name, parameter), gradient in zip(self.roles.parameters[role].items(), wanted, strict=True):
                assert parameter.grad is not None, name
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: n + m)
            norms.append(float(torch.cat([g.flatten() for g in wanted]).norm()))
        return said

    monkeypatch.setattr(Session, "start_update", started)
    monkeypatch.setattr(Updater, "_accumulate", compared)
    settings = running.config("ppo", tiny("llama"), ppo={**A2C, "kl_coef": KL_COEF}, critic={"warmup": 0})
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    assert len(norms) == 2 * 3  # one optimizer step a rollout, of policy and critic
    assert min(norms) > 1e-2
    for line in running.metrics(run)[1:]:
        assert line["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
        assert line["policy/clipfrac"] == 0.0
        assert "value/clipfrac" not in line
    assert running.metrics(run)[-1]["objective/kl"] > 1e-4


# Lambdas: two responses of three and two tokens


def a_rollout() -> tuple[Rollout, Tensor]:
    rollout = rollout_of([1.0, 1.0], [[0.0, 0.0]] * 2)
    rollout.response_mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    rollout.values = torch.tensor([[0.5, -1.0, 2.0, 0.25], [1.5, 0.75, 9.0, 9.0]])
    return rollout, torch.tensor([[0.1, 0.2, -0.3, 1.0], [0.0, 2.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("fields", "pretraining", "of_policy", "of_critic"),
    [
        ({}, False, [0.95, 0.95], [0.95, 0.95]),
        ({"gae_lambda": 0.5}, False, [0.5, 0.5], [0.5, 0.5]),
        ({"gae_lambda": 0.5, "critic_gae_lambda": 1.0}, False, [0.5, 0.5], [1.0, 1.0]),
        ({"gae_lambda_alpha": 0.5}, False, [0.5, 0.0], [0.5, 0.0]),  # 1 - 1 / (0.5 * 4), 1 - 1 / (0.5 * 2)
        ({"gae_lambda_alpha": 1.0, "critic_gae_lambda": 0.9}, False, [0.75, 0.5], [0.9, 0.9]),
        ({"gae_lambda": 0.5}, True, [0.5, 0.5], [1.0, 1.0]),
        ({"gae_lambda": 0.5, "critic_gae_lambda": 0.7}, True, [0.5, 0.5], [1.0, 1.0]),
        ({"preset": "a2c"}, False, [1.0, 1.0], [1.0, 1.0]),
    ],
)
def test_policy_and_critic_have_their_lambdas(
    fields: dict[str, Any], pretraining: bool, of_policy: list[float], of_critic: list[float]
) -> None:
    rollout, rewards = a_rollout()
    config = PpoConfig.model_validate({"gamma": 0.9, **fields})
    advantages, returns = advantages_and_returns(rollout, rewards, config, pretraining=pretraining)
    assert rollout.values is not None
    for b in range(2):
        r, v, m = (x[b].tolist() for x in (rewards, rollout.values, rollout.response_mask))
        assert advantages[b].tolist() == pytest.approx(naive_gae(r, v, m, 0.9, of_policy[b]), abs=1e-6)
        critic = naive_gae(r, v, m, 0.9, of_critic[b])
        wanted = [a + value if chosen else 0.0 for a, value, chosen in zip(critic, v, m, strict=True)]
        assert returns[b].tolist() == pytest.approx(wanted, abs=1e-6)


# A critic that pretrains


def test_the_policy_waits_while_the_critic_pretrains(tiny: TinyModels, tmp_path: Path) -> None:
    """Two steps of pretraining, in which the one of warm-up lies; the KL's controller waits too."""
    settings = running.config(
        "ppo",
        tiny("llama"),
        critic={"pretrain_steps": 2, "warmup": 1},
        ppo={"kl_controller": "adaptive", "kl_horizon": 100},
        run={"num_steps": 4, "save_every": 1, "keep_checkpoints": 9},
    )
    _, run, _ = running.train(settings, tmp_path)
    lines = running.metrics(run)[1:]
    assert ["policy/loss" in line for line in lines] == [False, False, True, True]
    assert all("value/loss" in line for line in lines)
    adapters = [load_file(run.checkpoints / f"step-{s:06d}" / "adapter_model.safetensors") for s in range(5)]
    same = [all(torch.equal(a[n], b[n]) for n in a) for a, b in pairwise(adapters)]
    assert same == [True, True, False, False]
    kl_coefs = [line["objective/kl_coef"] for line in lines]
    assert kl_coefs[0] == kl_coefs[1] == kl_coefs[2] == 0.05
    assert kl_coefs[3] != 0.05


def test_the_weight_of_the_kl_waits_while_the_critic_warms_up(tiny: TinyModels, tmp_path: Path) -> None:
    """The policy does not move, so its KL of 0 says nothing of the weight."""
    adaptive = {"kl_controller": "adaptive", "kl_horizon": 100}
    settings = running.config("ppo", tiny("llama"), critic={"warmup": 2}, ppo=adaptive, run={"num_steps": 4})
    _, run, _ = running.train(settings, tmp_path)
    kl_coefs = [line["objective/kl_coef"] for line in running.metrics(run)[1:]]
    assert kl_coefs[:3] == [0.05] * 3
    assert kl_coefs[3] != 0.05


def test_the_returns_of_pretraining_are_those_of_lambda_1(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a token is followed by, whatever the critic thinks; after pretraining the critic's values are mixed in."""
    seen: list[tuple[Rollout, float]] = []

    def noted(session: Any, trainer: Any, rollout: Rollout, **options: Any) -> bool:
        seen.append((rollout, options["kl_coef"]))
        return update(session, trainer, rollout, **options)

    from tinyrl.trainers.ppo import update

    monkeypatch.setattr("tinyrl.trainers.ppo.update", noted)
    settings = running.config(
        "ppo", tiny("llama"), critic={"pretrain_steps": 2}, ppo={"gae_lambda": 0.0}, optim={"critic_learning_rate": 0.1}
    )
    _, _, _ = running.train(settings, tmp_path)
    differ = []
    for rollout, kl_coef in seen:
        assert rollout.returns is not None
        assert rollout.values is not None
        gap = 0.0
        for row in range(len(rollout)):
            to_come = float(rollout.rewards[row])
            for t in reversed(range(int(rollout.response_lengths[row]))):
                to_come -= kl_coef * float(rollout.kl()[row, t])
                gap = max(gap, abs(float(rollout.returns[row, t]) - to_come))
        differ.append(gap > 1e-4)
    assert differ == [False, False, True]
    assert float(seen[1][0].values.abs().max()) > 0.01  # pyright: ignore[reportOptionalMemberAccess]
