"""On-policy distillation (GKD, 2306.13649): the student samples, a teacher says how likely each token was.

    for each step:
        1. sample responses to prompts (for a share of them: take given ones)
        2. the teacher reads them
        3. an optimizer step on the mean distance of the student's next-token distributions to the teacher's

What differs from the paper: the distance is the reverse KL by default (teacher.divergence), which on-policy keeps a
small student to what it can do. As in the paper no gradient goes through the sampling. Rewards are scored and shown,
and not learnt from.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tinyrl.algorithms.distillation import token_advantages
from tinyrl.algorithms.losses import Metrics
from tinyrl.generation.sample import Sample, conversations, fill, loss_mask, sampled_rows
from tinyrl.models.batch import Batch, padded
from tinyrl.process.signals import watched
from tinyrl.rollout.collect import Collector
from tinyrl.tasks.answers import answer_tokens
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.training.method import Pass
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.policy_loss import Counts
from tinyrl.training.run import Run


class Distill(OnPolicy):
    def __init__(self, collector: Collector) -> None:
        super().__init__(collector)
        if self.config.distill.on_policy_fraction < 1:
            self.check_given_answers()

    def train(self, run: Run) -> None:
        for step in run.steps():
            # 1. Responses to the step's prompts.
            with run.timed("rollout"):
                samples = conversations(self.responses(run, step))
            # 2. What the teacher says to them.
            run.fit_to_device(self.trial_passes(samples))
            taught = self.ask_teacher(run, samples)
            rewards = self.reward_metrics(samples) if any(sample.rewarded for sample in samples) else {}
            recorded = self.record_prompts(run, step)
            run.start_update(**rewards, **self.metrics(samples), **taught, **recorded)
            # How much likelier than the student the teacher finds each sampled token: for the records only.
            sampled = loss_mask(samples) & sampled_rows(samples)
            advantages = token_advantages(padded(samples, "logprobs"), padded(samples, "teacher"), sampled)
            fill(samples, "advantage", advantages)
            # 3. One optimizer step on all of them.
            with run.timed("update"):
                for minibatch in run.minibatches([samples], num_epochs=1):
                    counts = Counts.of(minibatch)
                    passes = [Pass("policy", minibatch, partial(self.loss, counts=counts))] if counts.tokens else []
                    run.metrics.add(run.updater.step(passes, train=["policy"]))
            self.record(run, samples, advantages, step)
            run.end_step(**self.update_controllers(run, samples))

    def loss(self, batch: Batch, *, counts: Counts) -> tuple[Tensor, Metrics]:
        """Compute the distance of a micro-batch to the teacher; the policy must be acting."""
        assert self.teacher is not None
        return self.teacher.distance(batch, self.policy.policy_states(batch), counts)

    def responses(self, run: Run, step: int) -> list[Sample]:
        """Sample responses to the share distill.on_policy_fraction of the prompts; the others have given answers."""
        prompts = self.prompts(run, step)
        count = round(self.config.distill.on_policy_fraction * len(prompts))
        samples = self.collect(run, prompts[:count], step) if count else []
        for sample in samples:  # whatever its reward, a response is learnt from
            sample.in_loss = not (sample.truncated and self.config.reward.truncated == "mask")
        return samples + [self.given(prompt) for prompt in prompts[count:]]

    def check_given_answers(self) -> None:
        """Raise ValueError for the first row whose answer is absent, or too long for student or teacher."""
        assert self.teacher is not None
        most = self.teacher.positions
        for prompt in watched(self.collector.train_prompts):
            length = len(prompt.tokens) + len(self.given(prompt).response)
            if length > most:
                raise ValueError(
                    f"row {prompt.index + 1} has {length} tokens, prompt and given answer, and student and teacher "
                    f"have {most} positions; leave the row out, or take distill.on_policy_fraction=1"
                )

    def given(self, prompt: PreparedPrompt) -> Sample:
        """Take a row's `completion`, or the task's gold answer. Raises ValueError for a row that has none."""
        where = self.config.task
        gold = self.collector.task.gold(prompt.row)
        whole = prompt.rest_of(gold) if isinstance(gold, str) else gold
        text = prompt.row.get("completion", whole)
        if not isinstance(text, str) or not text:
            raise ValueError(f"row {prompt.index + 1} has no answer to learn from: it needs a `completion` of text")
        how = {"chat": where.chat, "variables": where.chat_template_kwargs}
        tokens = answer_tokens(self.policy.tokenizer, prompt, text, **how)
        count = len(tokens)
        return Sample(
            prompt=prompt.tokens,
            response=tokens,
            mask=[True] * count,
            logprobs=[0.0] * count,
            sampled=False,
            row=prompt.index,
            scores=[torch.nan] * len(self.collector.scorer.names),
        )
