"""PPO for language models: KL-shaped token rewards, GAE, clipped policy and value losses.

Schulman et al. (1707.06347), with the reward shaping of Ziegler et al. (1909.08593) and InstructGPT (2203.02155).

    for each step:
        1. sample a response for each prompt, score it
        2. log-probabilities under the reference, and of the policy before its update; values of the critic
        3. reward of a token: -kl_coef * KL to the reference, and the score on the last token
        4. advantages by GAE, whitened over the step
        5. for each epoch, for each minibatch: clipped policy loss, clipped value loss, an optimizer step each
        6. adapt kl_coef to the KL observed

What differs from the papers: gamma is 1 by default and the value after the last token 0; policy and critic have
their own gradient norms and learning rates (except with critic.kind=shared, where the value loss moves the policy's
backbone too, weighted by ppo.value_coef). The first critic.warmup_steps rollouts train only the critic: against a
critic that knows nothing, advantages are noise.

A2C (ppo.preset=a2c) is PPO with one epoch of one minibatch, lambda 1, no whitening and a plain square for the value:
the ratio is 1 and never clipped, so what is left is the policy gradient (Huang et al., 2205.09123). Its optimizer is
Adam here, not RMSprop.

With ppo.ptx_coef every optimizer step of the policy adds a next-token loss on text, so that the policy keeps what it is
not rewarded for (InstructGPT, Eq. 2):

    loss = PPO's + ptx_coef * mean of -log pi(token | tokens before) over the tokens of a text batch

The batch is the next PTX_ROWS rows of a stream of shuffled epochs. What differs from the paper: the loss is a mean over
the tokens of the batch, so ptx_coef is not on the scale of the paper's 27.8. The temperature is 1, whatever sampling
has. The tokens that count are sft's; task.system_prompt is not put before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tinyrl.algorithms.advantages import gae
from tinyrl.algorithms.kl import next_kl_coef
from tinyrl.algorithms.losses import Metrics, clipped_value_loss
from tinyrl.algorithms.masking import masked_whiten
from tinyrl.data.readers import Placed, Row
from tinyrl.data.rows import batch_indices, fingerprint
from tinyrl.generation.sample import Logprobs, Sample, conversations, kl_per_response, loss_mask, token_rewards_of
from tinyrl.models.batch import Batch, Example, Item
from tinyrl.models.loading import check_ids
from tinyrl.models.policy import Policy
from tinyrl.process.signals import watched
from tinyrl.rollout.collect import Collector
from tinyrl.training.method import Pass
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.policy_loss import Counts, Experience, LossInputs, PolicyLossOptions
from tinyrl.training.rows import join_turns
from tinyrl.training.run import Run
from tinyrl.training.sft import negative_log_likelihood, turns_of

TEXT = "ppo.ptx_data"
PTX_ROWS = 16  # of text, per optimizer step
LossOfStates = Callable[[Batch, Tensor], tuple[Tensor, Metrics]]  # of a micro-batch, from states that are known
KL_HORIZON = 10_000  # completions over which kl_coef adapts (Ziegler et al.)


class Ppo(OnPolicy):
    """PPO. text: the rows of ppo.ptx_data with their places, which errors quote; kept as the examples of each."""

    def __init__(self, collector: Collector, text: Placed) -> None:
        super().__init__(collector)
        self.text = [text_examples(row, self.policy, place=place) for place, row in watched(text)]
        if text:
            texts = (tokens for row in self.text for one in row for tokens in one.texts)
            check_ids(texts, self.policy.tokenizer, self.policy.causal)
            self.policy.try_images()  # which the prompts may have none of
            self.row_fingerprints = {**self.row_fingerprints, TEXT: fingerprint([row for _, row in text])}

    @property
    def reads_reference(self) -> bool:
        return self.policy.has_reference

    @property
    def uses_old_logprobs(self) -> bool:
        """Return True: the ratio is to the policy before the update, also with one epoch of one minibatch."""
        return True

    def train(self, run: Run) -> None:
        config = self.config.ppo
        critic = self.config.critic
        for step in run.steps():
            controllers = run.state.controllers
            kl_coef = config.kl_coef if controllers.kl_coef is None else controllers.kl_coef
            # 1. A response for each prompt, and its score (of an agent: of each of its conversations).
            with run.timed("rollout"):
                episodes = self.collect(run, self.prompts(run, step), step)
                rewards_by_name = self.reward_metrics(episodes)
                samples = conversations(episodes, mask_truncated=self.config.reward.truncated == "mask")
                minibatches = run.partition(samples, size=config.minibatch_size)
            # 2. Their log-probabilities under the reference and before the update, and the critic's values.
            run.fit_to_device(self.trial_passes(samples))
            with run.timed("reference"):
                logprobs, measured = self.compute_logprobs(run, samples, minibatches)
            with run.timed("values"):
                values = self.predict_values(samples)
            teacher, taught = self.ask_teacher(run, samples)
            recorded = self.record_prompts(run, step)
            metrics = self.metrics(samples, logprobs) | measured | taught | recorded
            metrics["objective/kl_coef"] = kl_coef
            run.start_update(**rewards_by_name, **metrics)
            # 3. One reward for each token.
            mask = loss_mask(samples)
            penalised = logprobs.kl(mask if config.kl_in_reward else torch.zeros_like(mask))
            rewards = token_rewards_of(samples, penalised, kl_coef=kl_coef)
            # 4. Advantages, and the returns that the critic is to predict.
            advantages, returns = gae(rewards, values, mask, gamma=config.gamma, gae_lambda=config.gae_lambda)
            inputs = LossInputs(
                mask=mask,
                sampled=logprobs.sampled,
                advantage=masked_whiten(advantages, mask) if config.whiten_advantages else advantages,
                old=logprobs.old,
                reference=logprobs.reference,
                values=values,
                returns=returns,
            )
            # 5. Minibatches, each an optimizer step of the policy and of the critic.
            warming_up = step < critic.warmup_steps
            trained = ["critic"] if warming_up else ["policy", "critic"]
            experience = Experience(samples, inputs, teacher)
            with run.timed("update"):
                for minibatch in run.minibatches(experience, minibatches, num_epochs=config.num_epochs):
                    passes = self.passes(run, minibatch, kl_coef=kl_coef, warming_up=warming_up)
                    run.metrics.add(run.updater.step(passes, train=trained))
            # 6. A KL above its target gets a larger weight from the next step on, one below it a smaller.
            if config.target_kl is not None and logprobs.reference is not None and not warming_up:
                controllers.kl_coef = adapted_kl_coef(samples, logprobs, config.target_kl, kl_coef=kl_coef)
            self.record(run, step, experience, advantages, rewards=rewards)
            ended = self.update_controllers(run, samples)
            if mask.any():
                ended["value/explained_variance"] = explained_variance(values, returns, mask)
            run.end_step(**ended)

    def passes(self, run: Run, minibatch: Experience, *, kl_coef: float, warming_up: bool) -> list[Pass]:
        """Return the passes of an optimizer step: of policy and critic, or of both at once on one backbone; of the
        critic alone while it warms up; over text where there is a ppo.ptx_coef.
        """
        counts = Counts.of(minibatch)
        policy_terms = partial(
            self.policy_terms,
            minibatch=minibatch,
            counts=counts,
            options=self.loss_options(run, kl_coef=kl_coef),
            measure_gap=self.measures_gap(run),
        )
        critic_loss = partial(self.critic_loss, minibatch=minibatch, counts=counts)
        samples = minibatch.samples
        on_one_backbone = self.policy.critic_kind in ("shared", "shared-detached")
        passes = list[Pass]()
        if counts.tokens and on_one_backbone:
            joint = partial(self.joint_loss, policy_terms=policy_terms, critic_loss=critic_loss, warming_up=warming_up)
            passes.append(Pass("policy", samples, joint))
        elif counts.tokens:
            if not warming_up:
                passes.append(Pass("policy", samples, policy_terms))
            passes.append(Pass("critic", samples, critic_loss))
        if self.config.ppo.ptx_coef > 0 and not warming_up:
            text = self.text_batch(run)
            tokens = sum(sum(one.learnt) for one in text)
            passes.append(Pass("policy", text, partial(self.text_loss, tokens=tokens)))
        return passes

    def loss_options(self, run: Run, *, kl_coef: float) -> PolicyLossOptions:
        """Return what the policy's loss of the optimizer step under way is made of."""
        config = self.config.ppo
        return PolicyLossOptions(
            clip_eps=config.clip_eps,
            kl_coef=0.0 if config.kl_in_reward or not self.policy.has_reference else kl_coef,
            kl_estimator=config.kl_estimator,
            entropy_coef=config.entropy_coef,
            max_new_tokens=self.config.generation.max_new_tokens,
            inexact=not self.samples_exactly(run),
        )

    # ---- losses of a micro-batch, divided by counts of its minibatch; that of the policy is `policy_terms` ----

    def critic_loss(
        self, batch: Batch, states: Tensor | None = None, *, minibatch: Experience, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        """Compute the value's clipped regression; the critic must be acting, or `states` of the policy be given."""
        inputs = minibatch.inputs.of(batch)
        assert inputs.values is not None
        assert inputs.returns is not None
        return clipped_value_loss(
            self.policy.values(batch, states=states),
            inputs.values,
            inputs.returns,
            inputs.mask,
            value_clip_eps=self.config.ppo.value_clip_eps,
            denominator=counts.tokens,
        )

    def joint_loss(
        self, batch: Batch, *, policy_terms: LossOfStates, critic_loss: LossOfStates, warming_up: bool
    ) -> tuple[Tensor, Metrics]:
        """Compute both losses from one forward pass of the policy.

        With critic.kind=shared the value's gradient, weighted by ppo.value_coef, reaches the backbone, but not while
        the critic warms up; with shared-detached it never does.
        """
        states = self.policy.states("policy", batch)
        moves_backbone = self.policy.critic_kind == "shared" and not warming_up
        value_loss, value_metrics = critic_loss(batch, states if moves_backbone else states.detach())
        if warming_up:
            return value_loss, value_metrics
        policy_loss, metrics = policy_terms(batch, states)
        value_coef = self.config.ppo.value_coef if moves_backbone else 1.0
        return policy_loss + value_coef * value_loss, metrics | value_metrics

    def text_loss(self, batch: Batch, *, tokens: int) -> tuple[Tensor, Metrics]:
        """Compute ptx_coef * the mean of -log pi over the text's tokens. Metric: policy/ptx_loss, without ptx_coef."""
        loss = negative_log_likelihood(self.policy, batch) / tokens
        return self.config.ppo.ptx_coef * loss, {"policy/ptx_loss": loss.detach()}

    def trial_passes(self, items: Sequence[Item]) -> list[Pass]:
        """Return a pass of the policy and one of the critic, which may be another model, or of both on one backbone."""
        if self.policy.critic_kind in ("shared", "shared-detached"):
            return [Pass("policy", items, self.joint_trial_loss)]
        of_critic = Pass("critic", items, lambda batch: (self.policy.values(batch).sum(), {}))
        return [Pass("policy", items, self.trial_loss), of_critic]

    def joint_trial_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Sum log-probabilities and values of one forward pass of the policy."""
        states = self.policy.states("policy", batch)
        loss, _ = self.trial_loss(batch, states)
        moves_backbone = self.policy.critic_kind == "shared"
        values = self.policy.values(batch, states=states if moves_backbone else states.detach())
        return loss + values.sum(), {}

    # ---- values and text ----

    def predict_values(self, samples: list[Sample]) -> Tensor:
        """Compute the critic's values (B, T) of the tokens in the loss."""
        policy = self.policy
        role = self.policy.value_role

        def compute(batch: Batch) -> tuple[Tensor]:
            return (policy.values(batch, states=None if role == "critic" else policy.states("policy", batch)),)

        return policy.map_samples(compute, samples, role=role)[0]

    def text_batch(self, run: Run) -> list[Example]:
        """Return the text of an optimizer step: the next PTX_ROWS rows of a stream of shuffled epochs."""
        config = self.config.ppo
        size = min(PTX_ROWS, len(self.text))  # none twice in a batch, but where an epoch ends in it
        minibatches = config.batch_size // config.update_size
        number = run.state.step * config.num_epochs * minibatches + run.update
        rows = batch_indices(self.config.run.seed, number, num_prompts=size, num_rows=len(self.text))
        return [example for row in rows for example in self.text[row]]


def adapted_kl_coef(samples: list[Sample], logprobs: Logprobs, target_kl: float, *, kl_coef: float) -> float:
    """Return the weight of the KL after this rollout: Ziegler et al. (1909.08593), section 2.2."""
    observed, count = kl_per_response(samples, logprobs)
    if not math.isfinite(observed):  # such a rollout changed no weight either
        return kl_coef
    return next_kl_coef(kl_coef, observed_kl=observed, target_kl=target_kl, horizon=KL_HORIZON, num_samples=count)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Compute 1 - Var(returns - values) / Var(returns) over the mask; 0 when the returns do not vary."""
    chosen = returns[mask]
    predicted = values[mask]
    variance = chosen.var() if len(chosen) > 1 else torch.zeros(())
    return float(1.0 - (chosen - predicted).var() / variance) if variance > 0 else 0.0


# ---- text ----


def text_examples(row: Row, policy: Policy, *, place: str) -> list[Example]:
    """Tokenise a row of ppo.ptx_data. Raises ValueError, quoting its place, for an empty or too long one."""
    try:
        variables = policy.config.task.chat_template_kwargs
        found = join_turns(turns_of(row, policy, system_prompt=None, variables=variables))
        if not found:
            raise ValueError("an empty answer teaches nothing")
    except ValueError as error:
        raise ValueError(f"{TEXT}, {place}: {error}") from error
    longest = max(one.length for one in found)
    if longest > policy.positions:
        raise ValueError(f"{TEXT}, {place}: {longest} tokens, and the model's context length is {policy.positions}")
    return found
