"""On-policy distillation (GKD, 2306.13649): the student samples, a teacher says how likely each token was.

    for each step:
        1. sample responses to prompts (for a share of them: take given ones)
        2. the teacher reads them
        3. for each minibatch: mean distance of the student's next-token distributions to the teacher's, optimizer step

What differs from the paper: the distance is the reverse KL by default (teacher.divergence), which on-policy keeps a
small student to what it can do. As in the paper no gradient goes through the sampling. Under distill.objective=sampled
only the log-probability of the token that came is used, as the advantage in a clipped policy gradient: weaker, and all
that some servers tell. Rewards are scored and shown, and not learnt from.
"""

from __future__ import annotations

import torch

from tinyrl.algorithms.distillation import token_advantages
from tinyrl.models.batch import padded
from tinyrl.rollout.sample import Sample, conversations, fill, loss_mask
from tinyrl.tasks.answers import answer_tokens
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.training.method import Pass
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.run import Run


class Distill(OnPolicy):
    def train(self, run: Run) -> None:
        config = self.config.distill
        self.begin(run)
        for step in run.steps():
            # 1. Responses to the step's prompts.
            with run.timed("rollout"):
                samples = conversations(self.responses(step))
            # 2. Log-probabilities of their tokens under the teacher.
            taught = self.ask_teacher(samples)
            if config.objective == "sampled":
                with run.timed("reference"):
                    self.compute_logprobs(samples)
            rewards = self.reward_metrics(samples) if any(sample.rewarded for sample in samples) else {}
            run.start_update(**rewards, **self.metrics(samples), **taught, **self.record_prompts(step))
            before = padded(samples, "logprobs" if samples[0].old is None else "old")
            advantages = token_advantages(before, padded(samples, "teacher"), loss_mask(samples))
            fill(samples, "advantage", advantages)
            # 3. An optimizer step for each minibatch.
            with run.timed("update"):
                for minibatch in run.minibatches(samples, num_epochs=config.num_epochs, size=config.minibatch_size):
                    run.metrics.add(run.updater.step(self.passes(minibatch), train=["policy"]))
            self.record(samples, advantages, step)
            run.end_step(**self.count_flat())

    def passes(self, minibatch: list[Sample], *, kl_coef: float = 0.0) -> list[Pass]:
        if self.config.distill.objective == "sampled":
            return super().passes(minibatch, kl_coef=kl_coef)
        assert self.teacher is not None
        distance = self.teacher.distance_loss(minibatch)
        return self.passes_over(minibatch, policy=lambda batch: distance(batch, self.policy.policy_states(batch)))

    def responses(self, step: int) -> list[Sample]:
        """Sample responses to the share distill.on_policy_fraction of the prompts; the others have given answers."""
        prompts = self.prompts(step)
        count = round(self.config.distill.on_policy_fraction * len(prompts))
        samples = self.collect(prompts[:count], step) if count else []
        for sample in samples:  # whatever its reward, a response is learnt from
            sample.in_loss = not (sample.truncated and self.config.reward.truncated == "mask")
        return samples + [self.given(prompt) for prompt in prompts[count:]]

    def given(self, prompt: PreparedPrompt) -> Sample:
        """Take a row's `completion`, or the task's gold answer. Raises ValueError for a row that has none."""
        where, text = self.config.task, prompt.row.get("completion", self.collector.task.gold(prompt.row))
        if not isinstance(text, str) or not text:
            raise ValueError(f"row {prompt.index + 1} has no answer to learn from: it needs a `completion` of text")
        how = {"chat": where.chat, "variables": where.chat_template_kwargs}
        tokens = answer_tokens(self.policy.tokenizer, prompt, text, **how)
        none, count = [torch.nan] * len(self.collector.scorer.names), len(tokens)
        return Sample(prompt.tokens, tokens, [True] * count, [0.0] * count, prompt.index, scores=none)
