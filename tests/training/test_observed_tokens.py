"""What an environment says is read and never trained on: no gradient, no count and no mean knows of it."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
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
from tinyrl.rollout.collect import Collector
from tinyrl.rollout.load import load_collector
from tinyrl.rollout.sample import (
    Sample,
    apply_length_rules,
    environment_metrics,
    fill,
    kl,
    kl_per_response,
    loss_mask,
    padded,
    token_rewards_of,
)
from tinyrl.runs.launched import Options
from tinyrl.training.grpo import Grpo, group_relative
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.policy_loss import Counts
from tinyrl.training.ppo import Ppo, adapted_kl_coef, explained_variance
from tinyrl.training.step import Pass

GRPO: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in ("grpo", "gspo", "cispo", "reinforce++")},
    "masked by sequence": {"importance_correction": "sequence"},
    "with an entropy bonus": {"entropy_coef": 0.1},
    "KL in the group's scores": {"kl_coef": 0.1, "kl_estimator": "k1"},
}


@pytest.fixture(scope="module")
def parts() -> Collector:
    """A PPO run's models: policy, reference and critic; the adapters are not zero."""
    made = load_collector(lookup("ppo", environment={"max_turns": 4}), options=Options(device="cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for role in made.policy.parameters.values():
            for parameter in role.values():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return made


@pytest.fixture(scope="module")
def samples(parts: Collector) -> list[Sample]:
    """24 episodes, their log-probabilities a little off the policy's, with rewards of turns."""
    out = parts.collect(parts.train_prompts, group_size=4, step=0)
    assert sum(len(sample.response) - sample.num_actions for sample in out) > 30
    noise, mask = torch.Generator().manual_seed(2), loss_mask(out)

    def near(x: Tensor) -> Tensor:
        return torch.where(mask, x + 0.2 * torch.randn(x.shape, generator=noise), 0.0)

    (policy,) = parts.policy.map_samples(
        lambda batch: parts.policy.logprobs("policy", batch, temperature=1.0)[:1], out, role="policy"
    )
    assert torch.allclose(policy, torch.where(mask, padded(out, "logprobs"), 0.0), atol=1e-5)
    for name in ("old", "ref"):
        fill(out, name, near(policy))
    fill(out, "values", near(torch.zeros_like(policy)))
    for sample in out:
        assert sample.played is not None
        sample.played.turn_rewards = torch.rand(len(sample.played.turn_ends), generator=noise).tolist()
        sample.reward = float(torch.randn((), generator=noise)) + sum(sample.played.turn_rewards)
    return out


def with_junk(samples: list[Sample]) -> list[Sample]:
    """The same with junk at every token that the policy did not choose."""
    junk, found = torch.Generator().manual_seed(3), []
    for sample in samples:
        mask, fields = torch.tensor(sample.mask), dict[str, Any]()
        for name in ("logprobs", "old", "ref", "values"):
            x = torch.as_tensor(getattr(sample, name))
            fields[name] = torch.where(mask, x, 7.0 * torch.randn(x.shape, generator=junk))
        fields["logprobs"] = fields["logprobs"].tolist()
        found.append(replace(sample, **fields))
    return found


def gradient(trainer: Any, role: Any, passes: list[Pass]) -> Tensor:
    (one,) = [each for each in passes if each.role == role]
    for parameter in trainer.policy.parameters[role].values():
        parameter.grad = None
    with trainer.policy.acting(role):
        one.loss(trainer.policy.batch_of(one.items))[0].backward()
    return torch.cat([p.grad.flatten() for p in trainer.policy.parameters[role].values() if p.grad is not None])


def trainer_on(parts: Collector, kind: type[OnPolicy], **sections: Any) -> Any:
    """A trainer of these settings on the models of `parts`."""
    trainer: Any = object.__new__(kind)
    trainer.collector, trainer.policy = parts, copy.copy(parts.policy)
    trainer.policy.config, trainer.teacher, trainer.run = lookup(**sections), None, SimpleNamespace(update=0)
    trainer.temperature, trainer.group_size = 1.0, 4
    return trainer


@pytest.mark.parametrize("name", GRPO)
def test_numbers_at_observed_tokens_move_no_gradient_of_grpo(
    name: str, parts: Collector, samples: list[Sample]
) -> None:
    trainer = trainer_on(parts, Grpo, grpo={**GRPO[name], "group_size": 4})
    config, found = trainer.config.grpo, []
    for one in (samples, with_junk(samples)):
        fill(one, "advantage", group_relative(one, config, weights=parts.scorer.weights))
        passes = trainer.passes(one, kl_coef=max(config.kl_coef, 0.05))
        found.append(gradient(trainer, "policy", passes))
    assert float(found[0].abs().max()) > 1e-4
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("kl_estimator", ["k1", "k3"])
def test_numbers_at_observed_tokens_move_no_gradient_of_ppo(
    kl_estimator: str, parts: Collector, samples: list[Sample]
) -> None:
    trainer = trainer_on(parts, Ppo, method="ppo", ppo={"kl_estimator": kl_estimator, "entropy_coef": 0.01})
    found = dict[str, list[Tensor]](policy=[], critic=[])
    numbers: list[tuple[float, ...]] = []
    for one in (samples, with_junk(samples)):
        mask, values = loss_mask(one), padded(one, "values")
        rewards = token_rewards_of(one, kl(one, mask), kl_coef=0.1)
        advantages, returns = gae(rewards, values, mask, gamma=0.99, gae_lambda=0.9)
        fill(one, "advantage", masked_whiten(advantages, mask))
        fill(one, "returns", returns)
        passes = trainer.passes(one, kl_coef=0.1)
        for role, gradients in found.items():
            gradients.append(gradient(trainer, role, passes))
        explained = explained_variance(values, returns, mask)
        numbers.append((explained, *kl_per_response(one), adapted_kl_coef(one, 1.0, kl_coef=0.1)))
    for ours, theirs in found.values():
        assert float(ours.abs().max()) > 1e-4
        assert torch.equal(ours, theirs)
    assert numbers[0] == numbers[1]


def test_the_head_runs_on_chosen_tokens_only(parts: Collector, samples: list[Sample]) -> None:
    longest = max(samples, key=lambda sample: len(sample.response) - sample.num_actions)
    batch = parts.policy.batch_of([longest])
    with torch.no_grad(), parts.policy.acting("policy"):
        states = parts.policy.policy_states(batch)
    assert len(states) == longest.num_actions < len(longest.response)


# By hand: two episodes, [chose 2, read 3, chose 1] that ended and [chose 4] that was cut off

MASK = [[True, True, False, False, False, True], [True, True, True, True, False, False]]


@pytest.fixture
def two() -> list[Sample]:
    first = Completion([5, 6, 7, 8, 9, 5], [-1.0, -2.0, 0.0, 0.0, 0.0, -3.0], "stop", MASK[0])
    second = Completion([5, 6, 7, 8], [-1.0] * 4, "length", [True] * 4)
    turns = [Episode(turn_ends=[1, 5], turn_rewards=[0.5, 0.25]), Episode(turn_ends=[3], turn_rewards=[0.0])]
    samples = [Sample.of([4], first, row=0, reward=1.75, played=turns[0])]
    samples.append(Sample.of([4], second, row=0, episode=1, reward=3.0, played=turns[1]))
    fill(samples, "ref", torch.full((2, 6), -1.5))
    return samples


def test_counts_and_means_are_of_chosen_tokens(two: list[Sample]) -> None:
    assert loss_mask(two).tolist() == MASK
    assert [sample.num_actions for sample in two] == [3, 4]
    counts = Counts.of(loss_mask(two))
    assert (counts.tokens, counts.sequences, counts.rows) == (7, 2, 2)
    assert counts.denominator("constant", max_new_tokens=24) == 2 * 24
    assert kl(two, loss_mask(two)).tolist() == [[0.5, -0.5, 0, 0, 0, -1.5], [0.5, 0.5, 0.5, 0.5, 0, 0]]
    assert kl_per_response(two)[0] == pytest.approx((-1.5 + 2.0) / 2)
    assert environment_metrics(two) == {
        "environment/turns": 1.5,
        "environment/invalid_calls": 0.0,
        "environment/observation_tokens": 1.5,
        "environment/out_of_turns": 0.0,
    }


def test_penalties_for_length_count_chosen_tokens(two: list[Sample]) -> None:
    """Four may be written; the soft penalty begins after two: 3 of 4 cost a half, 4 of 4 the whole."""
    apply_length_rules(two, RewardConfig(truncated="penalize", overlong_tokens=2), max_new_tokens=4)
    assert [sample.reward for sample in two] == [1.75 - 0.5, 3.0 - 1.0 - 1.0]


def test_rewards_of_turns_are_on_their_last_tokens_and_the_rest_on_the_last(two: list[Sample]) -> None:
    shaped = token_rewards_of(two, torch.zeros(2, 6), kl_coef=0.0)
    assert shaped.tolist() == [[0, 0.5, 0, 0, 0, 0.25 + 1.0], [0, 0, 0, 3.0, 0, 0]]
