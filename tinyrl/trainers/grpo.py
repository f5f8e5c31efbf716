"""GRPO and its family (DAPO, Dr. GRPO, GSPO, CISPO, RLOO, REINFORCE++): DeepSeekMath (2402.03300), Algorithm 1.

    for each step:
        1. sample a group of responses for each prompt, score them
        2. log-probabilities under the reference, and of the policy before its update
        3. advantage of a response: its score against its group
        4. for each minibatch: clipped policy loss (+ KL to the reference), optimizer step

What differs from the paper: the default preset is DAPO's (2503.14476): no KL, clip 0.2 / 0.28, all tokens of a step
weigh the same; the reference is frozen for the whole run; a rollout feeds one optimizer step unless grpo.num_epochs
or grpo.minibatch_size say otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinyrl.algorithms.advantages import discounted_returns, group_advantages, rloo_advantages
from tinyrl.algorithms.masking import masked_whiten
from tinyrl.algorithms.reward_shaping import token_rewards
from tinyrl.components import SamplingParts
from tinyrl.components import load_sampling_parts as load
from tinyrl.config.schema import GrpoConfig
from tinyrl.rollout import Rollout
from tinyrl.trainers.on_policy import RolloutCollector
from tinyrl.trainers.on_policy import evaluate_heldout as evaluate
from tinyrl.trainers.policy_loss import PolicyLoss
from tinyrl.training.session import Session
from tinyrl.training.update import Pass

__all__ = ["evaluate", "load", "train"]


def train(session: Session, parts: SamplingParts) -> None:
    """Run GRPO from the session's current step to run.num_steps."""
    config = parts.config.grpo
    collector = RolloutCollector(session, parts, num_prompts=config.num_prompts, group_size=config.group_size)
    several_steps = config.num_epochs > 1 or (config.minibatch_size or config.batch_size) < config.batch_size
    settings = collector.loss_settings(config, kl_coef=config.kl_coef)
    for step in session.steps():
        rollout = session.rollout
        if rollout is None:
            # 1. A group of responses for each prompt, and their scores.
            with session.timed("rollout"):
                rollout = sample_groups(collector, config, step)
            # 2. Their log-probabilities under the reference, and before the update.
            with session.timed("reference"):
                collector.compute_logprobs(rollout, reference=config.kl_coef > 0, several_steps=several_steps)
            session.start_update(rollout, **collector.metrics(rollout), **spread(rollout, config))
        # 3. How much better a response is than its group.
        rollout.advantages = advantages_of(rollout, config)
        # 4. An optimizer step for each minibatch.
        sizes = rollout.sizes(parts.roles)
        with session.timed("update"):
            for rows in session.minibatches(len(rollout), num_epochs=config.num_epochs, size=config.minibatch_size):
                loss = PolicyLoss(rollout, rows, roles=parts.roles, settings=settings)
                session.metrics.add(session.updater.step([Pass("policy", loss, rows, sizes)], train=["policy"]))
        collector.record(rollout, rollout.advantages, step)
        session.end_step()


def sample_groups(collector: RolloutCollector, config: GrpoConfig, step: int) -> Rollout:
    """One rollout; with `grpo.refill_rounds`, fresh prompts replace groups without spread.

    This is DAPO's dynamic sampling, in at most so many rounds.
    """
    prompts = collector.prompts(step)
    rollout = collector.collect(prompts, step)
    drawn = {p.index for p in prompts}
    for refill_round in range(config.refill_rounds):
        flat = zero_spread(rollout, config.group_size).nonzero().squeeze(-1).tolist()
        fresh = collector.fresh_prompts(step, refill_round, count=len(flat), without=drawn)
        if not fresh:
            break
        drawn |= {p.index for p in fresh}
        topped_up = collector.collect(fresh, step)
        good = (~zero_spread(topped_up, config.group_size)).nonzero().squeeze(-1).tolist()
        rollout = rollout.with_groups(topped_up, good, places=flat[: len(good)], group_size=config.group_size)
    return rollout


def advantages_of(rollout: Rollout, config: GrpoConfig) -> Tensor:
    """(B,) or (B, T), by `grpo.advantage`; the KL to the reference is subtracted where it is part of the reward."""
    if config.advantage == "discounted-return":  # REINFORCE++ (2501.03262): whitened returns of KL-shaped token rewards
        scores = torch.nan_to_num(rollout.rewards)
        rewards = token_rewards(scores, rollout.kl(), rollout.loss_mask, kl_coef=config.kl_coef)
        returns = discounted_returns(rewards, rollout.loss_mask, gamma=config.gamma)
        return masked_whiten(returns, rollout.loss_mask)
    if config.advantage == "leave-one-out":  # RLOO (2402.14740): the KL of the whole response is part of its score
        scores = rollout.rewards
        if rollout.ref_logprobs is not None:
            scores = scores - config.kl_coef * rollout.kl().sum(1)
        return rloo_advantages(scores, group_size=config.group_size)
    return group_advantages(rollout.rewards, group_size=config.group_size, scale=config.advantage_scale)


def zero_spread(rollout: Rollout, group_size: int) -> Tensor:
    """(P,) bool: groups whose valid scores are all the same, so that they teach nothing."""
    groups = rollout.rewards.reshape(-1, group_size)
    highest = torch.where(groups.isnan(), -torch.inf, groups).amax(1)
    lowest = torch.where(groups.isnan(), torch.inf, groups).amin(1)
    return ~(highest > lowest)


def spread(rollout: Rollout, config: GrpoConfig) -> dict[str, float]:
    """The share of groups that teach nothing."""
    return {"reward/zero_spread_groups": float(zero_spread(rollout, config.group_size).float().mean())}
