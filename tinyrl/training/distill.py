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

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tinyrl.algorithms.distillation import token_advantages
from tinyrl.algorithms.losses import Metrics
from tinyrl.generation.sample import Sample, conversations, loss_mask, sampled_logprobs, sampled_rows
from tinyrl.models.batch import Batch
from tinyrl.process.signals import watched
from tinyrl.rollout.collect import Collector
from tinyrl.tasks.answers import answer_tokens
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.training.method import Pass
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.policy_loss import Counts, Experience, LossInputs
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
            assert self.teacher is not None
            with run.timed("teacher"):
                prompts = self.teacher.prompts(samples)
                samples = without_untaught(samples, prompts)
                teacher = self.teacher.score(samples, prompts)
            taught = self.teacher.metrics(samples, teacher)
            rewards = self.reward_metrics(samples) if any(sample.rewarded for sample in samples) else {}
            recorded = self.record_prompts(run, step)
            run.start_update(**rewards, **self.metrics(samples), **taught, **recorded)
            # How much likelier than the student the teacher finds each sampled token: for the records only.
            mask = loss_mask(samples)
            logprobs = sampled_logprobs(samples)
            advantages = token_advantages(logprobs, teacher.logprobs, mask & sampled_rows(samples))
            experience = Experience(samples, LossInputs(mask, logprobs, advantages), teacher)
            # 3. One optimizer step on all of them.
            everything = [list(range(len(samples)))]
            with run.timed("update"):
                for minibatch in run.minibatches(experience, everything, num_epochs=1):
                    counts = Counts.of(minibatch)
                    loss = partial(self.loss, minibatch=minibatch, counts=counts)
                    passes = [Pass("policy", minibatch.samples, loss)] if counts.tokens else []
                    run.metrics.add(run.updater.step(passes, train=["policy"]))
            self.record(run, step, experience, advantages)
            run.end_step(**self.update_controllers(run, samples))

    def loss(self, batch: Batch, *, minibatch: Experience, counts: Counts) -> tuple[Tensor, Metrics]:
        """Compute the distance of a micro-batch to the teacher; the policy must be acting."""
        assert self.teacher is not None
        assert minibatch.teacher is not None
        return self.teacher.distance(batch, self.policy.states("policy", batch), minibatch.teacher, counts)

    def responses(self, run: Run, step: int) -> list[Sample]:
        """Sample responses to the share distill.on_policy_fraction of the prompts; the others have given answers."""
        prompts = self.prompts(run, step)
        count = round(self.config.distill.on_policy_fraction * len(prompts))
        samples = self.collect(run, prompts[:count], step) if count else []
        leaves_out = self.config.reward.truncated == "mask"  # whatever its reward, a response is learnt from
        samples = [replace(sample, in_loss=not (sample.truncated and leaves_out)) for sample in samples]
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
                    f"have a context length of {most}; leave the row out, or take distill.on_policy_fraction=1"
                )

    def given(self, prompt: PreparedPrompt) -> Sample:
        """Take a row's `completion`, or the task's reference answer. Raises ValueError for a row that has none."""
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


def without_untaught(samples: list[Sample], prompts: Sequence[list[int] | None]) -> list[Sample]:
    """Leave samples out of the loss that the teacher has no prompt for."""
    pairs = zip(samples, prompts, strict=True)
    return [replace(sample, in_loss=sample.in_loss and prompt is not None) for sample, prompt in pairs]
