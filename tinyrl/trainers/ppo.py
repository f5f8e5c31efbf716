"""PPO for language models: Schulman et al. (1707.06347), with the reward shaping of Ziegler et al. (1909.08593) and
InstructGPT (2203.02155).

    for each step:
        1. sample a response for each prompt, score it
        2. reward of a token: -kl_coef * KL to the reference, and the score on the last token
        3. values of the critic; advantages by GAE, whitened over the step
        4. for each epoch, for each minibatch: clipped policy loss, clipped value loss, an optimizer step each
        5. adapt kl_coef to the KL observed

What differs from the papers: gamma is 1 and the value after the last token 0; policy and critic have their own
gradient norms and learning rates (except with critic.kind=shared, where the value loss also moves the policy's
trunk, weighted by ppo.value_coef); the first critic.warmup rollouts train the critic only, since advantages against
an untrained critic are noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tinyrl.algorithms import kl as kl_estimators
from tinyrl.algorithms.advantages import gae
from tinyrl.algorithms.kl import next_kl_coef
from tinyrl.algorithms.losses import clipped_policy_loss, clipped_value_loss, entropy_bonus, kl_loss
from tinyrl.algorithms.masking import masked_mean, masked_whiten
from tinyrl.algorithms.reward_shaping import token_rewards
from tinyrl.components import Parts
from tinyrl.components import load_parts as load
from tinyrl.config.config import PpoConfig
from tinyrl.models.batches import SequenceBatch
from tinyrl.rollout import Rollout
from tinyrl.trainers.on_policy import Sampler
from tinyrl.trainers.on_policy import evaluate_heldout as evaluate
from tinyrl.training.session import Session
from tinyrl.training.update import Pass

__all__ = ["evaluate", "load", "train"]

Metrics = dict[str, Tensor]


def train(session: Session, parts: Parts) -> None:
    """Run PPO from where the session stands to run.num_steps."""
    config, critic = parts.config.ppo, parts.config.critic
    assert config is not None
    assert critic is not None
    sampler = Sampler(session, parts, num_prompts=config.num_prompts, group_size=1)
    controllers = session.controllers
    controllers.setdefault("kl_coef", config.kl_coef)
    for step in session.steps():
        rollout = session.rollout
        if rollout is None:
            with session.timed("rollout"):
                rollout = sampler.collect(sampler.prompts(step), step)
            with session.timed("reference"):
                sampler.score_under_roles(rollout, reference=parts.roles.has_reference, several_steps=True)
            with session.timed("values"):
                rollout.values = predict_values(rollout, parts, sampler)
            session.start_update(rollout, **sampler.metrics(rollout), **{"objective/kl_coef": controllers["kl_coef"]})
        rewards = shaped_rewards(rollout, config, kl_coef=controllers["kl_coef"])
        assert rollout.values is not None
        advantages, returns = gae(
            rewards, rollout.values, rollout.response_mask, gamma=config.gamma, gae_lambda=config.gae_lambda
        )
        losses = Losses(
            rollout,
            masked_whiten(advantages, rollout.response_mask),
            returns,
            parts=parts,
            sampler=sampler,
            warmup=step < critic.warmup,
        )
        stopped, sizes = False, rollout.sizes(parts.roles)
        with session.timed("update"):
            for rows in session.minibatches(len(rollout), num_epochs=config.num_epochs, size=config.minibatch_size):
                metrics = session.updater.step(rows, sizes, passes=losses.passes(rows), train=losses.trained)
                session.metrics.add(metrics)
                if config.stop_kl is not None and metrics.get("policy/approx_kl", 0.0) > config.stop_kl:
                    stopped = True
                    break
        if config.kl_controller == "adaptive" and rollout.ref_logprobs is not None:
            observed = observed_kl(rollout)
            if math.isfinite(observed):  # else no weight was changed either
                controllers["kl_coef"] = next_kl_coef(
                    controllers["kl_coef"],
                    observed_kl=observed,
                    target_kl=config.target_kl,
                    horizon=config.kl_horizon,
                    num_samples=len(rollout),
                )
        sampler.record(rollout, advantages, step)
        explained = explained_variance(rollout.values, returns, rollout.response_mask)
        session.end_step(**{"value/explained_variance": explained, "policy/early_stop": float(stopped)})


def predict_values(rollout: Rollout, parts: Parts, sampler: Sampler) -> Tensor:
    """The critic's values before this rollout's update, (B, T)."""
    own = parts.roles.critic_kind in ("adapter", "separate")

    def compute(batch: SequenceBatch) -> tuple[Tensor, ...]:
        return (parts.roles.values(batch, states=None if own else parts.roles.policy_states(batch)),)

    return sampler.forward(rollout, role="critic" if own else "policy", compute=compute)


def shaped_rewards(rollout: Rollout, config: PpoConfig, *, kl_coef: float) -> Tensor:
    """(B, T): score on the last token, and the KL penalty where it belongs to the reward."""
    scores = torch.nan_to_num(rollout.totals)
    if config.clip_rewards is not None:
        scores = scores.clamp(-config.clip_rewards, config.clip_rewards)
    in_reward = config.kl_placement == "reward" and rollout.ref_logprobs is not None
    kl = (
        getattr(kl_estimators, config.kl_estimator)(rollout.old_logprobs, rollout.ref_logprobs)
        if in_reward
        else torch.zeros_like(rollout.sampling_logprobs)
    )
    rewards = token_rewards(scores, kl, rollout.response_mask, kl_coef=kl_coef)
    if config.whiten_rewards:
        mean = masked_mean(rewards, rollout.response_mask)
        rewards = torch.where(rollout.response_mask, masked_whiten(rewards, rollout.response_mask) + mean, 0.0)
    return rewards


def observed_kl(rollout: Rollout) -> float:
    """Nats per response: k1 summed over a response, mean over the batch."""
    assert rollout.old_logprobs is not None
    assert rollout.ref_logprobs is not None
    return float(torch.where(rollout.response_mask, rollout.old_logprobs - rollout.ref_logprobs, 0.0).sum(1).mean())


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over tokens that count; 0 when the returns do not vary."""
    chosen, predicted = returns[mask], values[mask]
    variance = chosen.var() if len(chosen) > 1 else torch.zeros(())
    return float(1.0 - (chosen - predicted).var() / variance) if variance > 0 else 0.0


class Losses:
    """The policy's and the critic's loss on micro-batches of one rollout, in as few forward passes as the critic's
    kind allows.
    """

    def __init__(
        self, rollout: Rollout, advantages: Tensor, returns: Tensor, *, parts: Parts, sampler: Sampler, warmup: bool
    ) -> None:
        self.rollout, self.advantages, self.returns = rollout, advantages, returns
        self.roles, self.sampler, self.warmup = parts.roles, sampler, warmup
        assert parts.config.ppo is not None
        assert parts.config.generation is not None
        self.config, self.temperature = parts.config.ppo, parts.config.generation.temperature
        self.trained = ["critic"] if warmup else ["policy", "critic"]

    def passes(self, minibatch: list[int]) -> list[Pass]:
        """Forward and backward passes of one optimizer step; losses divide by the tokens of the whole minibatch."""
        tokens = max(1, int(self.rollout.response_mask[minibatch].sum()))
        if self.roles.critic_kind in ("shared", "shared-detached"):
            return [Pass("policy", lambda rows: self._both(rows, tokens))]
        policy = [] if self.warmup else [Pass("policy", lambda rows: self._policy(rows, tokens))]
        return [*policy, Pass("critic", lambda rows: self._value(rows, tokens))]

    def _policy(self, rows: list[int], tokens: int) -> tuple[Tensor, Metrics]:
        batch = self.rollout.batch(rows, self.roles)
        return self._policy_loss(rows, batch, self.roles.policy_states(batch), tokens)

    def _value(self, rows: list[int], tokens: int) -> tuple[Tensor, Metrics]:
        batch = self.rollout.batch(rows, self.roles)
        return self._value_loss(rows, batch, self.roles.values(batch), tokens)

    def _both(self, rows: list[int], tokens: int) -> tuple[Tensor, Metrics]:
        """Policy and value from one forward pass of the shared trunk; warm-up lets no value gradient into it."""
        batch = self.rollout.batch(rows, self.roles)
        states = self.roles.policy_states(batch)
        shared = self.roles.critic_kind == "shared" and not self.warmup
        value_loss, value_metrics = self._value_loss(
            rows, batch, self.roles.values(batch, states=states if shared else states.detach()), tokens
        )
        if self.warmup:
            return value_loss, value_metrics
        loss, metrics = self._policy_loss(rows, batch, states, tokens)
        return loss + (self.config.value_coef if shared else 1.0) * value_loss, metrics | value_metrics

    def _policy_loss(
        self, rows: list[int], batch: SequenceBatch, states: Tensor, tokens: int
    ) -> tuple[Tensor, Metrics]:
        config, rollout = self.config, self.rollout
        assert rollout.old_logprobs is not None
        logprobs, entropy = self.roles.logprobs(
            "policy", batch, temperature=self.temperature, states=states, entropy_grad=config.entropy_coef > 0
        )
        mask, old, sampled = (
            rollout.take(x, rows, batch=batch)
            for x in (rollout.response_mask, rollout.old_logprobs, rollout.sampling_logprobs)
        )
        loss, metrics = clipped_policy_loss(
            logprobs,
            old,
            rollout.take(self.advantages, rows, batch=batch),
            mask,
            clip_eps=config.clip_eps,
            dual_clip=config.dual_clip,
            denominator=tokens,
            token_weights=self.sampler.token_weights(rollout, old, sampled),
        )
        bonus, entropy_metrics = entropy_bonus(entropy, mask, denominator=tokens)
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * bonus
        if config.kl_placement == "loss" and config.kl_coef > 0 and rollout.ref_logprobs is not None:
            estimate = getattr(kl_estimators, config.kl_estimator)(
                logprobs, rollout.take(rollout.ref_logprobs, rows, batch=batch)
            )
            kl, kl_metrics = kl_loss(estimate, mask, denominator=tokens)
            loss, metrics = loss + self.sampler.session.controllers["kl_coef"] * kl, metrics | kl_metrics
        gap = masked_mean((old - sampled).abs(), mask) * (mask.sum() / tokens)
        return loss, {**metrics, **entropy_metrics, "policy/sampling_gap": gap}

    def _value_loss(self, rows: list[int], batch: SequenceBatch, values: Tensor, tokens: int) -> tuple[Tensor, Metrics]:
        rollout = self.rollout
        assert rollout.values is not None
        mask, old_values, returns = (
            rollout.take(x, rows, batch=batch) for x in (rollout.response_mask, rollout.values, self.returns)
        )
        return clipped_value_loss(
            values, old_values, returns, mask, value_clip_eps=self.config.value_clip_eps, denominator=tokens
        )
