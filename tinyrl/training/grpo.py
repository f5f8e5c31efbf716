"""GRPO and its family (DAPO, Dr. GRPO, GSPO, GDPO, GTPO, CISPO, RLOO, REINFORCE++): DeepSeekMath (2402.03300),
Algorithm 1.

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

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinyrl.algorithms.advantages import (
    decoupled_advantages,
    discounted_returns,
    group_advantages,
    rloo_advantages,
    turn_advantages,
    turn_returns,
)
from tinyrl.algorithms.masking import masked_whiten
from tinyrl.data.rows import seeded_permutation
from tinyrl.generation.sample import (
    Logprobs,
    Sample,
    conversations,
    loss_mask,
    num_episodes,
    rewards_by_turn,
    rewards_of,
    scores_of,
    spread_over_turns,
    token_rewards_of,
)
from tinyrl.training.method import Pass
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.policy_loss import Counts, Experience, LossInputs, PolicyLossOptions

if TYPE_CHECKING:
    from tinyrl.config.method_sections import GrpoConfig
    from tinyrl.training.run import Run

MOST_TURNS = 5  # whose rewards are metrics; those are in the chart of runs/metrics.py


class Grpo(OnPolicy):
    def train(self, run: Run) -> None:
        config = self.config.grpo
        for step in run.steps():
            # 1. A group of responses for each prompt, and their scores.
            with run.timed("rollout"):
                episodes, rewards = self.sample_groups(run, step)
                samples = conversations(episodes, mask_truncated=self.config.reward.truncated == "mask")
                minibatches = run.partition(samples, size=config.minibatch_size)
            # 2. Their log-probabilities under the reference, and before the update.
            run.fit_to_device(self.trial_passes(samples))
            with run.timed("reference"):
                logprobs, measured = self.compute_logprobs(run, samples, minibatches, scored=kl_in_score(config))
            teacher, taught = self.ask_teacher(run, samples)
            recorded = self.record_prompts(run, step)
            of_turns = turn_metrics(samples, config)
            run.start_update(**rewards, **self.metrics(samples, logprobs), **of_turns, **measured, **taught, **recorded)
            # 3. How much better a response, or each of its turns, is than its group; an agent's conversations share
            # their episode's.
            firsts = samples[: num_episodes(samples)]
            advantages = group_relative(firsts, config, logprobs, weights=self.collector.scorer.weights)
            advantages = advantages[[sample.episode for sample in samples]]
            mask = loss_mask(samples)
            inputs = LossInputs(
                mask=mask,
                sampled=logprobs.sampled,
                advantage=advantages if advantages.dim() == 2 else advantages.unsqueeze(1).expand(mask.shape),
                old=logprobs.old,
                reference=logprobs.reference,
            )
            # 4. An optimizer step for each minibatch.
            experience = Experience(samples, inputs, teacher)
            with run.timed("update"):
                for minibatch in run.minibatches(experience, minibatches, num_epochs=config.num_epochs):
                    counts = Counts.of(minibatch)
                    loss = partial(
                        self.policy_terms,
                        minibatch=minibatch,
                        counts=counts,
                        options=loss_options(
                            config,
                            max_new_tokens=self.config.generation.max_new_tokens,
                            inexact=not self.samples_exactly(run),
                        ),
                        measure_gap=self.measures_gap(run),
                    )
                    passes = [Pass("policy", minibatch.samples, loss)] if counts.tokens else []
                    run.metrics.add(run.updater.step(passes, train=["policy"]))
            self.record(run, step, experience, advantages)
            run.end_step(**self.update_controllers(run, samples))

    def sample_groups(self, run: Run, step: int) -> tuple[list[Sample], dict[str, float]]:
        """Return episodes, and reward metrics of the step's own prompts. With `grpo.dynamic_sampling_rounds`, fresh
        prompts replace groups with equal scores (DAPO's dynamic sampling), in at most so many rounds, and groups that
        were not replaced are left out of the loss. The metrics are from before that: groups selected by their rewards
        would bias them. Scores are compared before length penalties: a group that is all wrong would else teach to be
        short and nothing else.
        """
        config = self.config.grpo
        size = self.group_size
        weights = self.collector.scorer.weights
        rows = self.collector.train_prompts
        prompts = self.prompts(run, step)
        samples = self.collect(run, prompts, step)
        drawn = {p.index for p in prompts}
        flat = without_spread(samples, config, weights)
        count = len(prompts)
        metrics = {**self.reward_metrics(samples), "reward/zero_spread_groups": len(flat) / count}
        for refill_round in range(config.dynamic_sampling_rounds):
            order = seeded_permutation(f"refill {self.config.run.seed} {step} {refill_round}", len(rows))
            prompts = [rows[i] for i in order if rows[i].index not in drawn][: len(flat)]
            if not prompts:
                break
            drawn |= {p.index for p in prompts}
            fresh = self.collect(run, prompts, step)
            useless = without_spread(fresh, config, weights)
            informative = [group for group in range(len(prompts)) if group not in useless]
            for place, group in zip(flat, informative, strict=False):
                samples[place * size : (place + 1) * size] = fresh[group * size : (group + 1) * size]
            flat = flat[len(informative) :]
        if config.dynamic_sampling_rounds:
            metrics["reward/zero_spread_kept"] = len(flat) / count
            for place in flat:
                group = samples[place * size : (place + 1) * size]
                samples[place * size : (place + 1) * size] = [replace(sample, in_loss=False) for sample in group]
        return samples, metrics


def loss_options(config: GrpoConfig, *, max_new_tokens: int, inexact: bool) -> PolicyLossOptions:
    """Return what the loss of an optimizer step is made of; inexact: as PolicyLossOptions has it."""
    return PolicyLossOptions(
        clip_eps=config.clip_eps,
        kl_coef=0.0 if config.kl_in_reward else config.kl_coef,
        kl_estimator=config.kl_estimator,
        entropy_coef=config.entropy_coef,
        max_new_tokens=max_new_tokens,
        inexact=inexact,
        surrogate=config.surrogate,
        clip_eps_high=config.clip_eps_high,
        aggregation=config.aggregation,
        importance_correction=config.importance_correction,
        kl_unbiased=config.kl_unbiased,
    )


def kl_in_score(config: GrpoConfig) -> bool:
    """Return whether the KL of a response is compared with its group (RLOO), and not by token (REINFORCE++)."""
    return config.kl_in_reward and config.kl_coef > 0 and config.advantage in ("group", "leave-one-out")


def group_relative(
    samples: list[Sample], config: GrpoConfig, logprobs: Logprobs, *, weights: Tensor | None = None
) -> Tensor:
    """Compute advantages (B,) or (B, T) of whole groups, by `grpo.advantage` and `grpo.credit`. The returns of
    REINFORCE++ are whitened over the step; others compare score - kl_coef * summed k1 with the group; GDPO each reward,
    with its weight; GTPO the return of each turn, which all tokens of the turn have.

    Under advantage=group only the rewards are divided by their deviation, and the KL keeps its weight: normalised
    together, as in verl, a group of equal rewards would be driven by the KL alone, whatever kl_coef is.
    """
    scores = rewards_of(samples)
    group_size = config.group_size
    if config.credit == "turn":
        returns = turn_returns(rewards_by_turn(samples, scores), gamma=config.turn_gamma)
        by_turn = turn_advantages(returns, group_size=group_size, scale=config.advantage_scale)
        return spread_over_turns(samples, by_turn)
    if config.advantage in ("reinforce++", "reinforce++-baseline"):
        mask = loss_mask(samples)
        against_group = None
        if config.advantage == "reinforce++-baseline":  # REINFORCE++-baseline: against the group first
            against_group = group_advantages(scores, group_size=group_size, scale="none")
        kl_coef = config.kl_coef if config.kl_in_reward else 0.0
        rewards = token_rewards_of(samples, logprobs.kl(mask), kl_coef=kl_coef, scores=against_group)
        return masked_whiten(discounted_returns(rewards, mask, gamma=1.0), mask)
    penalties = torch.zeros_like(scores)
    if kl_in_score(config):
        penalties = config.kl_coef * logprobs.kl(loss_mask(samples, "rewarded")).sum(1)
        penalties = torch.where(scores.isnan(), torch.nan, penalties)
    if config.advantage == "leave-one-out":
        return rloo_advantages(scores - penalties, group_size=group_size)
    if config.reward_aggregation == "normalize-then-sum":
        assert weights is not None, "several rewards are weighed after each is normalised"
        each = compared_scores(samples, config)
        return decoupled_advantages(each, weights=weights, group_size=group_size, scale=config.advantage_scale)
    advantages = group_advantages(scores, group_size=group_size, scale=config.advantage_scale)
    return advantages - group_advantages(penalties, group_size=group_size, scale="none")


def compared_scores(samples: list[Sample], config: GrpoConfig) -> Tensor:
    """Return what a group is compared by; NaN: none. (B, 1) the scores, of GDPO (B, R) each reward, with credit by turn
    (B, K) the return of each turn.
    """
    scores = scores_of(samples)
    if config.credit == "turn":
        return turn_returns(rewards_by_turn(samples, scores), gamma=config.turn_gamma)
    if config.reward_aggregation == "sum":
        return scores.unsqueeze(1)
    return torch.where(scores.unsqueeze(1).isnan(), torch.nan, torch.tensor([sample.scores for sample in samples]))


def has_spread(scores: Tensor, *, group_size: int) -> Tensor:
    """Return (P, C) bool: the columns of scores (B, C) in which a group has two different values; NaN is none."""
    groups = scores.reshape(-1, group_size, scores.shape[1])
    highest = torch.where(groups.isnan(), -torch.inf, groups).amax(1)
    lowest = torch.where(groups.isnan(), torch.inf, groups).amin(1)
    return highest > lowest


def without_spread(samples: list[Sample], config: GrpoConfig, weights: Tensor) -> list[int]:
    """Return groups whose valid scores are all the same, so that they teach nothing; weights (R,) of the rewards."""
    scores = compared_scores(samples, config)
    if config.reward_aggregation == "normalize-then-sum":
        scores = scores[:, weights != 0]
    return (~has_spread(scores, group_size=config.group_size).any(1)).nonzero().flatten().tolist()


def turn_metrics(samples: list[Sample], config: GrpoConfig) -> dict[str, float]:
    """Measure credit by turn, else {}: the mean reward of each of the first turns, over episodes that reached it, and
    the share of turns that teach nothing, since the group's returns there are equal or no other episode reached them.
    """
    if config.credit == "episode":
        return {}
    rewards = rewards_by_turn(samples, rewards_of(samples))
    means = rewards.nanmean(dim=0)[:MOST_TURNS].tolist()
    out = {f"turn/reward_{turn}": mean for turn, mean in enumerate(means, start=1) if not math.isnan(mean)}
    returns = turn_returns(rewards, gamma=config.turn_gamma)
    reached = (~returns.isnan()).reshape(-1, config.group_size, returns.shape[1])
    varied = has_spread(returns, group_size=config.group_size).unsqueeze(1)
    if reached.any():
        out["turn/zero_spread"] = float((reached & ~varied).sum() / reached.sum())
    return out
