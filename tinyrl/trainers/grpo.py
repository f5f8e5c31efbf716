"""GRPO and its family (DAPO, Dr. GRPO, GSPO, GDPO, CISPO, RLOO, REINFORCE++): DeepSeekMath (2402.03300), Algorithm 1.

    for each step:
        1. sample a group of responses for each prompt, score them
        2. log-probabilities under the reference (where kl_coef > 0), and of the policy before its update (where several
           optimizer steps use the rollout)
        3. advantage of a response: its score against its group
        4. for each minibatch: clipped policy loss (+ KL to the reference, - entropy bonus), optimizer step

What differs from the paper: the default preset is DAPO's (2503.14476): no KL, clip 0.2 / 0.28, all tokens of a step
weigh the same; the reference is frozen for the whole run; a rollout feeds one optimizer step unless grpo.num_epochs
or grpo.minibatch_size say otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinyrl.algorithms.advantages import decoupled_advantages, discounted_returns, group_advantages, rloo_advantages
from tinyrl.algorithms.masking import masked_whiten
from tinyrl.algorithms.reward_shaping import token_rewards
from tinyrl.config.method_sections import GrpoConfig
from tinyrl.rollout.buffer import Rollout
from tinyrl.trainers.on_policy import OnPolicyTrainer
from tinyrl.training.session import Session


class Grpo(OnPolicyTrainer):
    def train(self, session: Session) -> None:
        config = self.config.grpo
        self.begin(session)
        for step in session.steps():
            settings = self.loss_settings(kl_coef=config.kl_coef)
            # 1. A group of responses for each prompt, and their scores.
            with session.timed("rollout"):
                rollout, rewards = sample_groups(self, config, step)
                rollout = rollout.with_others(mask_truncated=self.config.reward.truncated == "mask")
            # 2. Their log-probabilities under the reference, and before the update.
            with session.timed("reference"):
                self.compute_logprobs(rollout, scored=kl_in_score(config))
            taught = self.read_teacher(rollout)
            session.start_update(rollout, **rewards, **self.metrics(rollout), **taught, **self.record_prompts(step))
            # 3. How much better a response is than its group.
            rollout.advantages = episode_advantages(rollout, config, weights=self.scorer.weights)
            # 4. An optimizer step for each minibatch.
            sizes = rollout.sizes(self.roles)
            with session.timed("update"):
                for rows in session.minibatches(rollout, num_epochs=config.num_epochs, size=config.minibatch_size):
                    metrics = session.updater.step(self.passes(rollout, rows, sizes, settings), train=["policy"])
                    self.watch_sampling(metrics)
                    session.metrics.add(metrics)
            self.record(rollout, rollout.advantages, step)
            session.end_step(**self.count_flat(rollout))


def sample_groups(trainer: OnPolicyTrainer, config: GrpoConfig, step: int) -> tuple[Rollout, dict[str, float]]:
    """(rollout, reward metrics of the step's own prompts). With `grpo.refill_rounds`, fresh prompts replace groups
    without spread: DAPO's dynamic sampling, in at most so many rounds. The metrics are from before the
    refill: groups selected by their rewards would bias them.
    """
    prompts = trainer.prompts(step)
    rollout = trainer.collect(prompts, step)
    drawn = {p.index for p in prompts}
    weights = trainer.scorer.weights
    without_spread = zero_spread(rollout, config, weights)
    metrics = {**trainer.reward_metrics(rollout), "reward/zero_spread_groups": float(without_spread.float().mean())}
    for refill_round in range(config.refill_rounds):
        flat = without_spread.nonzero().squeeze(-1).tolist()
        fresh = trainer.fresh_prompts(step, refill_round, count=len(flat), without=drawn)
        if not fresh:
            break
        drawn |= {p.index for p in fresh}
        topped_up = trainer.collect(fresh, step)
        good = (~zero_spread(topped_up, config, weights)).nonzero().squeeze(-1).tolist()
        rollout = rollout.with_groups(topped_up, good, places=flat[: len(good)], group_size=config.group_size)
        without_spread = zero_spread(rollout, config, weights)
    if config.refill_rounds:
        metrics["reward/zero_spread_kept"] = float(without_spread.float().mean())
    return rollout, metrics


def kl_in_score(config: GrpoConfig) -> bool:
    """Whether the KL of a response is compared with its group: as in RLOO, unlike REINFORCE++, whose KL is by token."""
    return config.kl_in_reward and config.kl_coef > 0 and config.advantage in ("group", "leave-one-out")


def episode_advantages(rollout: Rollout, config: GrpoConfig, *, weights: Tensor | None = None) -> Tensor:
    """`advantages_of` the episodes, which further conversations of theirs share."""
    if rollout.parent is None:
        return advantages_of(rollout, config, weights=weights)
    episodes = rollout.select(range(rollout.num_episodes))
    return advantages_of(episodes, config, weights=weights)[rollout.parent]


def advantages_of(rollout: Rollout, config: GrpoConfig, *, weights: Tensor | None = None) -> Tensor:
    """(B,) or (B, T), by `grpo.advantage`. The returns of REINFORCE++ are whitened over the step; others compare
    score - kl_coef * summed k1 with the group, or each reward on its own, by its one of the `weights`.

    Under advantage=group only the rewards are divided by their deviation, and the KL keeps its weight: normalised
    together, as in verl, a group of equal rewards would be driven by the KL alone, whatever kl_coef is.
    """
    scores, mask, group_size = rollout.rewards, rollout.loss_mask, config.group_size
    if config.advantage in ("discounted-return", "baseline-return"):
        kl_coef = config.kl_coef if config.kl_in_reward else 0.0
        if config.advantage == "baseline-return":  # REINFORCE++-baseline: against the group first
            scores = group_advantages(scores, group_size=group_size, scale="none")
            rewards = token_rewards(torch.nan_to_num(scores), rollout.kl(), mask, kl_coef=kl_coef)
        else:
            scores = torch.nan_to_num(rollout.outcome_rewards)
            rewards = rollout.with_turn_rewards(token_rewards(scores, rollout.kl(), mask, kl_coef=kl_coef))
        return masked_whiten(discounted_returns(rewards, mask, gamma=1.0), mask)
    penalties = torch.zeros_like(scores)
    if kl_in_score(config):
        penalties = config.kl_coef * rollout.kl(rollout.scored_mask).sum(1)
        penalties = torch.where(scores.isnan(), torch.nan, penalties)
    if config.advantage == "leave-one-out":
        return rloo_advantages(scores - penalties, group_size=group_size)
    if config.preset == "gdpo":
        assert weights is not None, "several rewards are weighed after each is normalised"
        each = group_scores(rollout, config)
        return decoupled_advantages(each, weights=weights, group_size=group_size, scale=config.advantage_scale)
    advantages = group_advantages(scores, group_size=group_size, scale=config.advantage_scale)
    return advantages - group_advantages(penalties, group_size=group_size, scale="none")


def group_scores(rollout: Rollout, config: GrpoConfig) -> Tensor:
    """(B, 1) or (B, R) what the responses of a group are compared by: the sum of their rewards, or each; NaN: none."""
    if config.preset != "gdpo":
        return rollout.rewards.unsqueeze(1)
    return torch.where(rollout.rewards.isnan().unsqueeze(1), torch.nan, rollout.scores)


def zero_spread(rollout: Rollout, config: GrpoConfig, weights: Tensor) -> Tensor:
    """(P,) bool: groups whose valid scores are all the same, so that they teach nothing. A reward of weight 0 among the
    `weights` (R,) is compared in nothing.
    """
    scores = group_scores(rollout, config)
    if config.preset == "gdpo":
        scores = scores[:, weights != 0]
    groups = scores.reshape(-1, config.group_size, scores.shape[1])
    highest = torch.where(groups.isnan(), -torch.inf, groups).amax(1)
    lowest = torch.where(groups.isnan(), torch.inf, groups).amin(1)
    return ~(highest > lowest).any(1)
