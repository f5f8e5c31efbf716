"""PPO for language models: KL-shaped token rewards, GAE, clipped policy and value losses.

Schulman et al. (1707.06347), with the reward shaping of Ziegler et al. (1909.08593) and InstructGPT (2203.02155).

    for each step:
        1. sample a response for each prompt, score it
        2. log-probabilities under the reference, and of the policy before its update; values of the critic
        3. reward of a token: -kl_coef * KL to the reference, and the score on the last token
        4. advantages by GAE, whitened over the step
        5. for each epoch, for each minibatch: clipped policy loss, clipped value loss, an optimizer step each
        6. adapt kl_coef to the KL observed, and entropy_coef to the entropy

What differs from the papers: gamma is 1 by default and the value after the last token 0 (ppo.bootstrap_truncated takes
the critic's for a response that was cut off, by max_new_tokens or by max_turns); policy and critic have their own
gradient norms and learning rates (except with critic.kind=shared, where the value loss also moves the policy's trunk,
weighted by ppo.value_coef). The first critic.warmup rollouts train only the critic: against a critic that knows
nothing, advantages are noise. The first critic.pretrain_steps do too, and regress on returns of lambda 1, into which no
value of the critic's own enters but that of a bootstrapped end: the value pretraining of VC-PPO (2503.01491) and VAPO
(2504.05118).

A2C (ppo.preset=a2c) is PPO with one epoch of one minibatch, lambda 1, advantages as they are and a plain square for the
value: the ratio is 1 and never clipped, so what is left is the policy gradient (Huang et al., 2205.09123). Its
optimizer is Adam here, not RMSprop. With ppo.ptx_coef every optimizer step of the policy adds a loss on text (ptx.py).
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from tinyrl.algorithms.advantages import gae, length_adaptive_lambda
from tinyrl.algorithms.kl import next_kl_coef
from tinyrl.algorithms.masking import masked_mean, masked_whiten
from tinyrl.algorithms.reward_shaping import token_rewards
from tinyrl.config.method_sections import PpoConfig
from tinyrl.rollout import Rollout
from tinyrl.trainers.entropy_control import steer_entropy
from tinyrl.trainers.on_policy import RolloutCollector
from tinyrl.trainers.on_policy import evaluate_heldout as evaluate
from tinyrl.trainers.policy_loss import PolicyLoss
from tinyrl.trainers.ptx import PpoParts, ptx_pass
from tinyrl.trainers.ptx import load_ppo_parts as load
from tinyrl.trainers.value_loss import (
    SharedTrunkLoss,
    ValueLoss,
    explained_variance,
    predict_final_values,
    predict_values,
)
from tinyrl.training.session import Session
from tinyrl.training.update import Pass

__all__ = ["evaluate", "load", "train"]


def train(session: Session, parts: PpoParts) -> None:
    """Run PPO from the session's current step to run.num_steps."""
    config, critic = parts.config.ppo, parts.config.critic
    collector = RolloutCollector(session, parts, num_prompts=config.num_prompts, group_size=1)
    for step in session.steps():
        controllers, rollout = session.state.controllers, session.rollout
        kl_coef = config.kl_coef if controllers.kl_coef is None else controllers.kl_coef
        if rollout is None:
            # 1. A response for each prompt, and its score.
            with session.timed("rollout"):
                rollout = collector.collect(collector.prompts(step), step)
            # 2. Their log-probabilities under the reference and before the update, and the critic's values.
            with session.timed("reference"):
                collector.compute_logprobs(rollout, reference=parts.roles.has_reference, several_steps=True)
            with session.timed("values"):
                rollout.values = predict_values(rollout, parts.roles, collector)
                if config.bootstrap_truncated:
                    rollout.final_values = predict_final_values(rollout, parts)
            rewards_by_name = collector.reward_metrics(rollout)
            metrics = collector.metrics(rollout) | collector.end_sampling(step) | {"objective/kl_coef": kl_coef}
            session.start_update(rollout, **rewards_by_name, **metrics)
        # 3. One reward for each token.
        rewards, mask = shaped_rewards(rollout, config, kl_coef=kl_coef), rollout.loss_mask
        # 4. Advantages, and the returns that the critic is to predict.
        assert rollout.values is not None
        pretraining = step < critic.pretrain_steps
        advantages, returns = advantages_and_returns(rollout, rewards, config, pretraining=pretraining)
        rollout.advantages = masked_whiten(advantages, mask) if config.whiten_advantages else advantages
        rollout.returns = returns
        # 5. Minibatches, each an optimizer step of the policy and of the critic.
        warming_up = pretraining or step < critic.warmup
        with session.timed("update"):
            stopped = update(session, parts, collector, rollout, kl_coef=kl_coef, warming_up=warming_up)
        # 6. A KL above its target gets a larger weight from the next step on, one below it a smaller.
        if config.kl_controller == "adaptive" and rollout.ref_logprobs is not None and not pretraining:
            controllers.kl_coef = adapted_kl_coef(rollout, config, kl_coef=kl_coef)
        collector.record(rollout, advantages, step, rewards=rewards)
        explained = explained_variance(rollout.values, returns, mask)
        session.end_step(
            **{"value/explained_variance": explained, "policy/early_stop": float(stopped)},
            **steer_entropy(config, session),
        )


def shaped_rewards(rollout: Rollout, config: PpoConfig, *, kl_coef: float) -> Tensor:
    """(B, T): score on the last token, the environment's rewards on the last of each turn, and the KL penalty where it
    belongs to the reward.
    """
    scores = torch.nan_to_num(rollout.final_scores)
    if config.clip_rewards is not None:
        scores = scores.clamp(-config.clip_rewards, config.clip_rewards)
    kl = torch.zeros_like(rollout.sampling_logprobs)
    if config.kl_placement == "reward" and rollout.ref_logprobs is not None:
        kl = rollout.kl()
    mask = rollout.loss_mask
    rewards = rollout.with_turn_rewards(token_rewards(scores, kl, mask, kl_coef=kl_coef))
    if config.whiten_rewards:
        rewards = torch.where(mask, masked_whiten(rewards, mask) + masked_mean(rewards, mask), 0.0)
    return rewards


def advantages_and_returns(
    rollout: Rollout, rewards: Tensor, config: PpoConfig, *, pretraining: bool = False
) -> tuple[Tensor, Tensor]:
    """(advantages for the policy, returns for the critic), each (B, T), by one lambda or by two: the policy's may
    depend on the length of a response (VAPO, 2504.05118), the critic's be its own (VC-PPO, 2503.01491) and is 1 while
    it pretrains.
    """
    mask, alpha = rollout.loss_mask, config.gae_lambda_alpha
    assert rollout.values is not None
    estimate = partial(gae, rewards, rollout.values, mask, gamma=config.gamma, final_values=rollout.final_values)
    policy_lambda = config.gae_lambda if alpha is None else length_adaptive_lambda(mask, alpha=alpha)
    critic_lambda = 1.0 if pretraining else config.critic_gae_lambda
    advantages, returns = estimate(gae_lambda=policy_lambda)
    return advantages, returns if critic_lambda is None else estimate(gae_lambda=critic_lambda)[1]


def update(
    session: Session,
    parts: PpoParts,
    collector: RolloutCollector,
    rollout: Rollout,
    *,
    kl_coef: float,
    warming_up: bool,
) -> bool:
    """The optimizer steps of a rollout; True where `ppo.stop_kl` ended them early."""
    config = parts.config.ppo
    settings = collector.loss_settings(config, kl_coef=kl_coef)
    trained, sizes = ["critic"] if warming_up else ["policy", "critic"], rollout.sizes(parts.roles)
    with_text = config.ptx_coef > 0 and not warming_up
    for rows in session.minibatches(len(rollout), num_epochs=config.num_epochs, size=config.minibatch_size):
        policy = PolicyLoss(rollout, rows, roles=parts.roles, settings=settings, first=session.state.first_update)
        value = ValueLoss(rollout, parts.roles, config, tokens=policy.counts.tokens)
        if parts.roles.critic_kind in ("shared", "shared-detached"):
            passes = [Pass("policy", SharedTrunkLoss(policy, value, warming_up=warming_up), rows, sizes)]
        else:
            passes = [] if warming_up else [Pass("policy", policy, rows, sizes)]
            passes += [Pass("critic", value, rows, sizes)]
        if with_text:
            passes += [ptx_pass(parts, session.state)]
        metrics = session.updater.step(passes, train=trained)
        collector.watch_sampling(metrics)
        session.metrics.add(metrics)
        if config.stop_kl is not None and metrics.get("policy/approx_kl", 0.0) > config.stop_kl:
            return True
    return False


def adapted_kl_coef(rollout: Rollout, config: PpoConfig, *, kl_coef: float) -> float:
    """The weight of the KL after this rollout: Ziegler et al. (1909.08593), section 2.2."""
    observed, num_samples = rollout.kl_per_response(), int(rollout.kept.sum())
    if not math.isfinite(observed):  # such a rollout changed no weight either
        return kl_coef
    target, horizon = config.target_kl, config.kl_horizon
    return next_kl_coef(kl_coef, observed_kl=observed, target_kl=target, horizon=horizon, num_samples=num_samples)
