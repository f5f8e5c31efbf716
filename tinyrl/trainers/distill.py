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
from tinyrl.models.micro_batches import RowSizes
from tinyrl.rollout.buffer import Rollout, given_rollout, joined
from tinyrl.tasks.answers import answer_tokens
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.trainers.on_policy import OnPolicyTrainer
from tinyrl.trainers.policy_loss import LossSettings
from tinyrl.training.session import Session
from tinyrl.training.update import Pass


class Distill(OnPolicyTrainer):
    def passes(self, rollout: Rollout, rows: list[int], sizes: RowSizes, settings: LossSettings) -> list[Pass]:
        if self.config.distill.objective == "sampled":
            return super().passes(rollout, rows, sizes, settings)
        return [Pass("policy", self.distance_loss(rollout, rows), rows, sizes)] if rollout.counts(rows) else []

    def train(self, session: Session) -> None:
        config = self.config.distill
        self.begin(session)
        for step in session.steps():
            # 1. Responses to the step's prompts.
            with session.timed("rollout"):
                rollout = self.responses(step)
            # 2. What the teacher says of them.
            taught = self.read_teacher(rollout)
            if config.objective == "sampled":
                with session.timed("reference"):
                    self.compute_logprobs(rollout)
            rewards = {} if rollout.rewards.isnan().all() else self.reward_metrics(rollout)  # given answers alone
            session.start_update(rollout, **rewards, **self.metrics(rollout), **taught, **self.record_prompts(step))
            assert rollout.teacher_logprobs is not None
            before = rollout.sampling_logprobs if rollout.old_logprobs is None else rollout.old_logprobs
            rollout.advantages = token_advantages(before, rollout.teacher_logprobs, rollout.loss_mask)
            # 3. An optimizer step for each minibatch.
            settings, sizes = self.loss_settings(kl_coef=config.kl_coef), rollout.sizes(self.roles)
            with session.timed("update"):
                for rows in session.minibatches(rollout, num_epochs=config.num_epochs, size=config.minibatch_size):
                    passes = self.passes(rollout, rows, sizes, settings)
                    session.metrics.add(session.updater.step(passes, train=["policy"]))
            self.record(rollout, rollout.advantages, step)
            session.end_step(**self.count_flat(rollout))

    def responses(self, step: int) -> Rollout:
        """The step's rollout: sampled, and for the rest of distill.on_policy the answers of the rows themselves."""
        prompts = self.prompts(step)
        count = round(self.config.distill.on_policy * len(prompts))
        sampled = self.collect(prompts[:count], step) if count else None
        if sampled is not None:  # whatever its reward, a response is learnt from
            sampled.kept = (
                ~sampled.truncated if self.config.reward.truncated == "mask" else torch.ones_like(sampled.kept)
            )
        given = self.given(prompts[count:]) if count < len(prompts) else None
        if sampled is None or given is None:
            found = sampled or given
            assert found is not None
            return found
        return joined(sampled, given)

    def given(self, prompts: list[PreparedPrompt]) -> Rollout:
        """The rows' own answers: their `completion`, or what the task knows to be right. Raises ValueError for a row
        that has none.
        """
        where, answers = self.config.task, []
        how = {"chat": where.chat, "variables": where.chat_template}
        for prompt in prompts:
            text = prompt.row.get("completion", self.task.gold(prompt.row))
            if not isinstance(text, str) or not text:
                raise ValueError(f"row {prompt.index + 1} has no answer to learn from: it needs a `completion` of text")
            answers.append(answer_tokens(self.tokenizer, prompt, text, **how))
        tokens, rows = [prompt.tokens for prompt in prompts], [prompt.index for prompt in prompts]
        return given_rollout(tokens, answers, rows=rows, num_rewards=len(self.scorer.names))
