"""What an environment says is read and never trained on: no gradient, no count and no mean knows of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.faults.lookup_runs import lookup
from tinyrl.algorithms.advantages import gae
from tinyrl.algorithms.masking import masked_whiten
from tinyrl.config.sections import RewardConfig
from tinyrl.environments.environment import Episode
from tinyrl.generation.engine import Completion
from tinyrl.models.batches import SequenceBatch
from tinyrl.rollout.buffer import Rollout
from tinyrl.rollout.collector import (
    _as_tensors,
    apply_length_rules,
    sample_and_score,
)
from tinyrl.rollout.components import Options, SamplingParts
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.trainers.grpo import advantages_of
from tinyrl.trainers.on_policy import PolicyLoss
from tinyrl.trainers.policy_loss import Counts, LossSettings
from tinyrl.trainers.ppo import ValueLoss, adapted_kl_coef, explained_variance, shaped_rewards

GRPO: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in ("grpo", "gspo", "cispo", "reinforce++")},
    "masked by sequence": {"mismatch": "sequence"},
    "with an entropy bonus": {"entropy_coef": 0.1},
    "KL in the group's scores": {"kl_coef": 0.1, "kl_estimator": "k1"},
}
PER_TOKEN = ("sampling_logprobs", "old_logprobs", "ref_logprobs", "values")


@pytest.fixture(scope="module")
def parts() -> SamplingParts:
    """A PPO run's models: policy, reference and critic; the adapters are not zero."""
    made = SamplingParts(lookup("ppo", environment={"max_turns": 4}), options=Options(device="cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for role in made.roles.parameters.values():
            for parameter in role.values():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return made


@pytest.fixture(scope="module")
def rollout(parts: SamplingParts) -> Rollout:
    """24 episodes, their log-probabilities a little off the policy's, with rewards of turns."""
    out = sample_and_score(parts.train_prompts, parts, group_size=4, step=0)
    read = ~out.response_mask & (torch.arange(out.response_mask.shape[1]) < out.response_lengths[:, None])
    assert int(read.sum()) > 30
    noise = torch.Generator().manual_seed(2)

    def near(x: Tensor) -> Tensor:
        return torch.where(out.response_mask, x + 0.2 * torch.randn(x.shape, generator=noise), 0.0)

    (policy,) = parts.over(out, lambda batch: parts.roles.logprobs("policy", batch, temperature=1.0)[:1], role="policy")
    assert torch.allclose(policy, out.sampling_logprobs, atol=1e-5)
    assert out.turn_rewards is not None
    ends = torch.rand(policy.shape, generator=noise) * (out.response_mask & torch.roll(read, -1, 1))
    return replace(
        out,
        rewards=torch.randn(len(out), generator=noise) + ends.sum(1),
        turn_rewards=ends,
        old_logprobs=near(policy),
        ref_logprobs=near(policy),
        values=near(torch.zeros_like(policy)),
    )


def with_junk(rollout: Rollout, *names: str) -> Rollout:
    """The same with junk at every token that the policy did not choose."""
    junk = torch.Generator().manual_seed(3)
    fields: dict[str, Any] = {}
    for name in names:
        x = getattr(rollout, name)
        fields[name] = torch.where(rollout.response_mask, x, 7.0 * torch.randn(x.shape, generator=junk))
    return replace(rollout, **fields)


def settings_of(section: Any, *, kl_coef: float) -> LossSettings:
    return LossSettings.of(section, max_new_tokens=24, kl_coef=kl_coef, weigh_mismatch=True)


def gradient(parts: SamplingParts, role: Any, loss: Any, rows: list[int]) -> Tensor:
    for parameter in parts.roles.parameters[role].values():
        parameter.grad = None
    with parts.roles.acting(role):
        loss(rows)[0].backward()
    return torch.cat([p.grad.flatten() for p in parts.roles.parameters[role].values() if p.grad is not None])


@pytest.mark.parametrize("name", GRPO)
def test_numbers_at_observed_tokens_move_no_gradient_of_grpo(name: str, parts: SamplingParts, rollout: Rollout) -> None:
    config = lookup(grpo={**GRPO[name], "group_size": 4}).grpo
    rows = list(range(len(rollout)))
    found = []
    for one in (rollout, with_junk(rollout, *PER_TOKEN)):
        one.advantages = advantages_of(one, config, weights=parts.scorer.weights)
        loss = PolicyLoss(
            one, rows, parts.roles, settings_of(config, kl_coef=max(config.kl_coef, 0.05)), temperature=1.0, first=True
        )
        found.append(gradient(parts, "policy", loss, rows))
    assert float(found[0].abs().max()) > 1e-4
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("kl_estimator", ["k1", "k3"])
def test_numbers_at_observed_tokens_move_no_gradient_of_ppo(
    kl_estimator: str, parts: SamplingParts, rollout: Rollout
) -> None:
    config = lookup("ppo", ppo={"kl_estimator": kl_estimator, "target_kl": 1.0, "entropy_coef": 0.01}).ppo
    rows = list(range(len(rollout)))
    found: dict[str, list[Tensor]] = {"policy": [], "critic": []}
    said: list[tuple[float, ...]] = []
    for one in (rollout, with_junk(rollout, *PER_TOKEN)):
        mask = one.loss_mask
        assert one.values is not None
        rewards = shaped_rewards(one, config, kl_coef=0.1)
        advantages, one.returns = gae(rewards, one.values, mask, gamma=0.99, gae_lambda=0.9)
        one.advantages = masked_whiten(advantages, mask)
        policy = PolicyLoss(one, rows, parts.roles, settings_of(config, kl_coef=0.1), temperature=1.0, first=True)
        value = ValueLoss(one, parts.roles, config, tokens=policy.counts.tokens)
        found["policy"].append(gradient(parts, "policy", policy, rows))
        found["critic"].append(gradient(parts, "critic", value, rows))
        explained = explained_variance(one.values, one.returns, mask)
        said.append((explained, one.kl_per_response(), adapted_kl_coef(one, config, kl_coef=0.1)))
    for ours, theirs in found.values():
        assert float(ours.abs().max()) > 1e-4
        assert torch.equal(ours, theirs)
    assert said[0] == said[1]


def test_the_head_runs_on_chosen_tokens_only(parts: SamplingParts, rollout: Rollout) -> None:
    rows = [int(rollout.turns.argmax())] if rollout.turns is not None else []
    batch: SequenceBatch = rollout.batch(rows, parts.roles)
    with torch.no_grad(), parts.roles.acting("policy"):
        states = parts.roles.policy_states(batch)
    assert len(states) == int(rollout.response_mask[rows].sum()) < int(rollout.response_lengths[rows].sum())


# By hand: two episodes, [chose 2, read 3, chose 1] that ended and [chose 4] that was cut off

MASK = [[True, True, False, False, False, True], [True, True, True, True, False, False]]


@pytest.fixture
def two() -> Rollout:
    completions = [
        Completion([5, 6, 7, 8, 9, 5], [-1.0, -2.0, 0.0, 0.0, 0.0, -3.0], "stop", MASK[0]),
        Completion([5, 6, 7, 8], [-1.0] * 4, "length", [True] * 4),
    ]
    prompt = PreparedPrompt(0, {"prompt": "a"}, "a", "a", [4], "")
    turns = [Episode(turn_ends=[1, 5], turn_rewards=[0.5, 0.25]), Episode(turn_ends=[3], turn_rewards=[0.0])]
    out = _as_tensors([prompt], completions, 2, turns)
    out.rewards = torch.tensor([1.75, 3.0])
    out.ref_logprobs = torch.full((2, 6), -1.5)
    return out


def test_counts_and_means_are_of_chosen_tokens(two: Rollout) -> None:
    assert two.response_mask.tolist() == MASK
    assert two.num_actions.tolist() == [3, 4]
    counts = Counts.of(two.loss_mask)
    assert (counts.tokens, counts.sequences, counts.rows) == (7, 2, 2)
    dr_grpo = settings_of(lookup(grpo={"preset": "dr_grpo"}).grpo, kl_coef=0.0)
    assert counts.denominator(dr_grpo) == 2 * 24
    assert two.kl().tolist() == [[0.5, -0.5, 0, 0, 0, -1.5], [0.5, 0.5, 0.5, 0.5, 0, 0]]
    assert two.kl_per_response() == pytest.approx((-1.5 + 2.0) / 2)
    assert two.environment_metrics() == {
        "environment/turns": 1.5,
        "environment/invalid_calls": 0.0,
        "environment/observation_tokens": 1.5,
        "environment/out_of_turns": 0.0,
    }


def test_penalties_for_length_count_chosen_tokens(two: Rollout) -> None:
    """Four may be written; the soft penalty begins after two: 3 of 4 cost a half, 4 of 4 the whole."""
    apply_length_rules(two, RewardConfig(truncated="penalize", overlong_tokens=2), max_new_tokens=4)
    assert two.rewards.tolist() == [1.75 - 0.5, 3.0 - 1.0 - 1.0]


def test_rewards_of_turns_are_on_their_last_tokens_and_the_rest_on_the_last(two: Rollout) -> None:
    config = lookup("ppo", ppo={}).ppo
    shaped = shaped_rewards(two, config, kl_coef=0.0)
    assert shaped.tolist() == [[0, 0.5, 0, 0, 0, 0.25 + 1.0], [0, 0, 0, 3.0, 0, 0]]
