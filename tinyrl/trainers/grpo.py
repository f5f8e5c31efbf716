"""GRPO and its family (DAPO, Dr. GRPO, GSPO, CISPO, RLOO, REINFORCE++): DeepSeekMath (2402.03300), Algorithm 1.

    for each step:
        sample a group of responses for each prompt, score them
        advantage of a response: its score against its group
        for each minibatch: clipped policy loss (+ KL to the reference), optimizer step

What differs from the paper: the default preset is DAPO's (2503.14476): no KL, clip 0.2 / 0.28, all tokens of a step
weigh the same; the reference is frozen for the whole run; a rollout feeds one optimizer step unless grpo.num_epochs
or grpo.minibatch_size say otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinyrl.algorithms import kl as kl_estimators
from tinyrl.algorithms.advantages import discounted_returns, group_advantages, rloo_advantages
from tinyrl.algorithms.losses import cispo_loss, clipped_policy_loss, entropy_bonus, importance_ratio, kl_loss
from tinyrl.algorithms.masking import masked_mean, masked_whiten
from tinyrl.algorithms.reward_shaping import token_rewards
from tinyrl.components import Parts
from tinyrl.components import load_parts as load
from tinyrl.config.config import GrpoConfig
from tinyrl.rollout import Rollout
from tinyrl.trainers.on_policy import Sampler
from tinyrl.trainers.on_policy import evaluate_heldout as evaluate
from tinyrl.training.session import Session
from tinyrl.training.update import LossFn, Pass

__all__ = ["evaluate", "load", "train"]


def train(session: Session, parts: Parts) -> None:
    """Run GRPO from where the session stands to run.num_steps."""
    config = parts.config.grpo
    assert config is not None
    sampler = Sampler(session, parts, num_prompts=config.num_prompts, group_size=config.group_size)
    several_steps = config.num_epochs > 1 or (config.minibatch_size or config.batch_size) < config.batch_size
    for step in session.steps():
        rollout = session.rollout
        if rollout is None:
            with session.timed("rollout"):
                rollout = sample_groups(sampler, config, step)
            with session.timed("reference"):
                sampler.score_under_roles(rollout, reference=config.kl_coef > 0, several_steps=several_steps)
            session.start_update(rollout, **sampler.metrics(rollout), **spread(rollout, config))
        advantages, sizes = advantages_of(rollout, config), rollout.sizes(parts.roles)
        with session.timed("update"):
            for rows in session.minibatches(len(rollout), num_epochs=config.num_epochs, size=config.minibatch_size):
                loss = policy_loss(rollout, advantages, config=config, parts=parts, sampler=sampler, minibatch=rows)
                session.metrics.add(session.updater.step(rows, sizes, passes=[Pass("policy", loss)], train=["policy"]))
        sampler.record(rollout, advantages, step)
        session.end_step()


def sample_groups(sampler: Sampler, config: GrpoConfig, step: int) -> Rollout:
    """One rollout; with `grpo.refill_rounds`, groups without spread give way to fresh prompts (DAPO's dynamic
    sampling, bounded).
    """
    prompts = sampler.prompts(step)
    rollout = sampler.collect(prompts, step)
    drawn = {p.index for p in prompts}
    for refill_round in range(config.refill_rounds):
        flat = zero_spread(rollout, config.group_size).nonzero().squeeze(-1).tolist()
        fresh = sampler.fresh_prompts(step, refill_round, count=len(flat), without=drawn)
        if not fresh:
            break
        drawn |= {p.index for p in fresh}
        topped_up = sampler.collect(fresh, step)
        good = (~zero_spread(topped_up, config.group_size)).nonzero().squeeze(-1).tolist()
        rollout = rollout.with_groups(topped_up, good, places=flat[: len(good)], group_size=config.group_size)
    return rollout


def advantages_of(rollout: Rollout, config: GrpoConfig) -> Tensor:
    """(B,) or (B, T), by `grpo.advantage`."""
    if config.advantage == "discounted-return":  # REINFORCE++ (2501.03262): whitened returns of KL-shaped token rewards
        scores = torch.nan_to_num(rollout.totals)
        kl = torch.zeros_like(rollout.sampling_logprobs) if rollout.ref_logprobs is None else sampled_k1(rollout)
        rewards = token_rewards(scores, kl, rollout.response_mask, kl_coef=config.kl_coef)
        return masked_whiten(
            discounted_returns(rewards, rollout.response_mask, gamma=config.gamma), rollout.response_mask
        )
    if config.advantage == "leave-one-out":  # RLOO (2402.14740): the KL of the whole response is part of its score
        scores = rollout.totals
        if rollout.ref_logprobs is not None:
            scores = scores - config.kl_coef * sampled_k1(rollout).sum(1)
        return rloo_advantages(scores, group_size=config.group_size)
    return group_advantages(rollout.totals, group_size=config.group_size, scale=config.advantage_scale)


def policy_loss(
    rollout: Rollout, advantages: Tensor, *, config: GrpoConfig, parts: Parts, sampler: Sampler, minibatch: list[int]
) -> LossFn:
    """The loss of a micro-batch of `minibatch`, divided by the counts of the whole minibatch."""
    generation = parts.config.generation
    assert generation is not None
    mask_of_step = rollout.response_mask[minibatch]
    tokens = max(1, int(mask_of_step.sum()))
    sequences = max(1, int(mask_of_step.any(1).sum()))
    denominator = {"token": tokens, "sequence": sequences, "constant": len(minibatch) * generation.max_new_tokens}[
        config.aggregation
    ]

    def loss_of(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        batch = rollout.batch(rows, parts.roles)
        logprobs, entropy = parts.roles.logprobs("policy", batch, temperature=generation.temperature)
        mask, sampled = (rollout.take(x, rows, batch=batch) for x in (rollout.response_mask, rollout.sampling_logprobs))
        old = (
            logprobs.detach() if rollout.old_logprobs is None else rollout.take(rollout.old_logprobs, rows, batch=batch)
        )
        advantage = rollout.take(advantages, rows, batch=batch)
        if config.loss == "cispo":
            loss, metrics = cispo_loss(
                logprobs,
                old,
                advantage,
                mask,
                ratio_cap=config.ratio_cap,
                aggregation=config.aggregation,
                denominator=denominator,
                metric_denominator=tokens,
            )
        else:
            loss, metrics = clipped_policy_loss(
                logprobs,
                old,
                advantage,
                mask,
                clip_eps=config.clip_eps,
                clip_eps_high=config.clip_eps_high,
                dual_clip=config.dual_clip,
                ratio_level=config.ratio_level,
                aggregation=config.aggregation,
                denominator=denominator,
                token_weights=sampler.token_weights(rollout, old, sampled),
                metric_denominator=tokens,
            )
        if config.kl_coef > 0 and config.kl_placement == "loss":
            assert rollout.ref_logprobs is not None
            estimate = getattr(kl_estimators, config.kl_estimator)(
                logprobs, rollout.take(rollout.ref_logprobs, rows, batch=batch)
            )
            ratio = importance_ratio(logprobs, old, mask) if config.kl_ratio_weight else None
            kl, kl_metrics = kl_loss(
                estimate, mask, aggregation=config.aggregation, denominator=denominator, ratio=ratio
            )
            loss, metrics = loss + config.kl_coef * kl, metrics | kl_metrics
        gap = masked_mean((logprobs.detach() - sampled).abs(), mask) * (mask.sum() / tokens)
        return loss, {
            **metrics,
            **entropy_bonus(entropy.detach(), mask, denominator=tokens)[1],
            "policy/sampling_gap": gap,
        }

    return loss_of


def sampled_k1(rollout: Rollout) -> Tensor:
    """k1 of each token against the reference, 0 where it does not count."""
    assert rollout.ref_logprobs is not None
    policy = rollout.sampling_logprobs if rollout.old_logprobs is None else rollout.old_logprobs
    return torch.where(rollout.response_mask, kl_estimators.k1(policy, rollout.ref_logprobs), 0.0)


def zero_spread(rollout: Rollout, group_size: int) -> Tensor:
    """(P,) bool: groups whose valid scores are all the same, so that they teach nothing."""
    groups = rollout.totals.reshape(-1, group_size)
    highest = torch.where(groups.isnan(), -torch.inf, groups).amax(1)
    lowest = torch.where(groups.isnan(), torch.inf, groups).amin(1)
    return ~(highest > lowest)


def spread(rollout: Rollout, config: GrpoConfig) -> dict[str, float]:
    return {"reward/zero_spread_groups": float(zero_spread(rollout, config.group_size).float().mean())}
