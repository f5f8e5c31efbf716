"""Learning from a policy's own samples, shared by GRPO and PPO: sampling, rescoring, guard, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from tinyrl.algorithms.losses import Metrics
from tinyrl.algorithms.masking import masked_mean
from tinyrl.config.schema import Config
from tinyrl.data.rows import keyed_order
from tinyrl.evaluation.evaluate import Evaluation, evaluate
from tinyrl.models.batches import SequenceBatch
from tinyrl.models.micro_batches import RowSizes
from tinyrl.models.parallel import ALONE, World
from tinyrl.models.roles import Roles
from tinyrl.rewards.functions import count_bad_batches, describe_failure
from tinyrl.rollout.buffer import Rollout
from tinyrl.rollout.collector import (
    allowed_bytes,
    apply_length_rules,
    sample_and_score,
    sample_lines,
    shown_rows,
    token_lines,
    written,
)
from tinyrl.rollout.components import Options, SamplingParts
from tinyrl.runs.signals import stop_held
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.trainers.choice import PromptStats, prompt_sampler
from tinyrl.trainers.policy_loss import Counts, LossSettings, PolicyBatch, policy_loss, sampling_gap
from tinyrl.trainers.teaching import DistanceLoss, teacher_metrics, teacher_of
from tinyrl.training.session import SAMPLES_BYTES, Session
from tinyrl.training.state import RunState
from tinyrl.training.trainer import Trainer
from tinyrl.training.update import Pass

# Sampling log-probabilities this close to a training pass's are used as old_logprobs: through 30 layers of a real model
# float32 rounds by up to 2e-5.
EXACT_TO = 1e-4
SHOWN_SAMPLES = 16  # completions of each step in samples.jsonl


class OnPolicyTrainer(SamplingParts, Trainer):
    """A method that learns from its own samples: draws prompts, samples, scores, and watches for failing rewards."""

    def __init__(self, config: Config, *, options: Options) -> None:
        generation = config.generation
        if generation.top_p < 1 or generation.top_k:
            name = "top_k" if generation.top_k else "top_p"
            raise ValueError(
                f"generation.{name}={getattr(generation, name)} cuts the distribution that is sampled, not the "
                "one that is scored: KL turns negative, ratios lie. `tinyrl eval` takes it"
            )
        super().__init__(config, options=options)
        self.teacher = teacher_of(self) if config.learns_from_teacher else None
        self.state = RunState()

    def check(self) -> list[str]:
        notes = [] if self.teacher is None else self.teacher.start()
        return [*super().check(), *notes]

    def evaluate(self) -> Evaluation:
        return evaluate(self, num_prompts=self.config.run.eval_prompts)

    def passes(self, rollout: Rollout, rows: list[int], sizes: RowSizes, settings: LossSettings) -> list[Pass]:
        """The passes of an optimizer step on a minibatch; none where no token of it counts."""
        policy = self.policy_loss(rollout, rows, settings)
        return [Pass("policy", policy, rows, sizes)] if rollout.counts(rows) else []

    @property
    def reads_reference(self) -> bool:
        """Whether each rollout is read under the reference."""
        return self.config.on_policy.kl_coef > 0

    @property
    def several_steps(self) -> bool:
        """Whether several optimizer steps use a rollout."""
        section = self.config.on_policy
        return section.num_epochs > 1 or (section.minibatch_size or section.batch_size) < section.batch_size

    # ---- rollouts ----

    def begin(self, session: Session) -> None:
        """Collect rollouts for a session from now on."""
        self.session, self.state, self.group_size = session, session.state, self.config.on_policy.group_size
        self._told: set[str] = set()
        controllers, device = self.state.controllers, self.accelerator.device.type
        here = f"{self.engine.name} on {device}, mixed precision {self.accelerator.mixed_precision}"
        if controllers.measured_on != here:
            controllers.measured_on, controllers.exact_sampling = here, None
        self._texts = {prompt.index: prompt.text for prompt in self.train_prompts}
        self.tried = PromptStats(self.config.task.solved_reward)
        self.choice = prompt_sampler(self.config, self.train_prompts, self.state.controllers)

    def prompts(self, step: int) -> list[PreparedPrompt]:
        """The prompts of a step: a function of (seed, step), and of what was seen so far where task says so."""
        return [self.train_prompts[i] for i in self.choice.draw(step)]

    def fresh_prompts(self, step: int, refill_round: int, *, count: int, without: set[int]) -> list[PreparedPrompt]:
        """Prompts to top up a step's batch: a function of (seed, step, round) and of what was drawn before."""
        rows = self.train_prompts
        order = keyed_order(f"refill {self.config.run.seed} {step} {refill_round}", len(rows))
        return [rows[i] for i in order if rows[i].index not in without][:count]

    def collect(self, prompts: list[PreparedPrompt], step: int) -> Rollout:
        """Sample and score a group for each prompt; failing rewards are counted, shown, and eventually stop the run."""
        self.session.display.phase("sampling")
        rollout = sample_and_score(prompts, self, group_size=self.group_size, step=step)
        most = self.config.generation.max_new_tokens
        apply_length_rules(rollout, self.config.reward, max_new_tokens=most)
        self.tried.look(prompts, rollout.rewards)
        self._watch(rollout, prompts, step)
        self.state.completions += len(rollout)
        self.state.tokens += int(rollout.response_mask.sum())
        return rollout

    def count_flat(self, rollout: Rollout) -> dict[str, float]:
        """Count a step in which the policy had no gradient, and warn of the first. Metric: optim/flat_steps."""
        controllers = self.state.controllers
        norms, _ = self.session.metrics.sums.get("optim/grad_norm", (None, 0))  # None: only the critic is trained
        flat, why = norms == 0.0, "the loss has no gradient, as where all responses to a prompt have the same reward"
        if not rollout.loss_mask.any():
            lost = int(rollout.rewards.isnan().sum())
            why = f"no response counts: {lost} of {len(rollout)} have no reward"
            if self.config.reward.truncated == "mask":
                cut = int((rollout.truncated & ~rollout.rewards.isnan()).sum())
                why += f", {cut} were cut off at generation.max_new_tokens (reward.truncated=mask)"
        elif not flat:
            why = ""
        if why and "flat" not in self._told:
            self._told.add("flat")
            self.session.display.note(
                f"warning: in this step there is nothing to learn from: {why}. Weights stay as they are; "
                "optim/flat_steps counts such steps"
            )
        controllers.flat_steps += flat
        return {"optim/flat_steps": controllers.flat_steps}

    def _watch(self, rollout: Rollout, prompts: list[PreparedPrompt], step: int) -> None:
        retried = self.scorer.retried | (self.runner.environment.retried if self.runner else {})
        for name, why in retried.items():
            if name not in self._told:
                self._told.add(name)
                self.session.display.note(f"warning: `{name}` was tried row by row: on the whole batch it {why}")
        sentence, rows = "", {failure.row for failure in rollout.failures}
        failed = sum(bool(rollout.rewards[row].isnan()) for row in rows)
        if rollout.failures:
            first = rollout.failures[0]
            sentence = describe_failure(prompts[first.row // self.group_size].prompt, first.reason)
            dropped = "their rows are" if failed == len(rows) else f"{failed} of their rows are"
            self.session.display.note(
                f"warning: {len(rows)} of {len(rollout)} rewards failed and {dropped} dropped "
                f"(they are in {self.session.run.failed_rewards}). {sentence}"
            )
            self._set_aside(rollout, prompts, step)
        if self.config.trains.rewarded:
            self.state.controllers.failing_batches = count_bad_batches(
                self.state.controllers.failing_batches,
                rows=len(rollout),
                failed=failed,
                rewarded=int((~rollout.rewards.isnan()).sum()),
                first_failure=sentence,
            )

    def _set_aside(self, rollout: Rollout, prompts: list[PreparedPrompt], step: int) -> None:
        failed = [(failure, prompts[failure.row // self.group_size]) for failure in rollout.failures]
        lines = [
            {
                "step": step + 1,
                "prompt_index": prompt.index,
                "sample": failure.row % self.group_size,
                "prompt": prompt.text,
                "completion": written(rollout, failure.row, self.scorer),
                **rollout.episode_of(failure.row),
                "reason": failure.reason,
            }
            for failure, prompt in failed
        ]
        self.session.run.append_failed_rewards(lines)

    def compute_logprobs(self, rollout: Rollout, *, scored: bool = False) -> None:
        """Fill in ref_logprobs where a KL needs them, old_logprobs where several optimizer steps use the rollout. With
        one step the training pass's own values, detached, are the old ones, so the ratio is exactly 1; a KL then takes
        the policy's from a pass like the reference's, as an engine that is not exact would add its own noise to it.

        `scored`: of every row with a reward, those that are left out of the loss among them.
        """
        read = replace(rollout, kept=~rollout.rewards.isnan()) if scored else rollout
        if self.reads_reference:
            rollout.ref_logprobs = self._logprobs(read, "reference")
        if not self.several_steps:
            if self.reads_reference and not self.samples_exactly:
                rollout.rescored_logprobs = self._logprobs(read, "policy")
            return
        controllers, rollout.old_logprobs = self.state.controllers, rollout.sampling_logprobs
        if controllers.exact_sampling:
            return
        rescored = self._logprobs(read, "policy")
        if controllers.exact_sampling is None and rollout.loss_mask.any():  # not measured yet
            gap = float(torch.where(rollout.loss_mask, rescored - rollout.sampling_logprobs, 0.0).abs().max())
            controllers.exact_sampling = self.engine.exact and gap < EXACT_TO
        if not controllers.exact_sampling:
            rollout.old_logprobs = rescored

    @property
    def samples_exactly(self) -> bool:
        """Whether the engine's log-probabilities are those of a training pass, up to rounding in float32."""
        return self.engine.exact and self.accelerator.mixed_precision == "no"

    def watch_sampling(self, metrics: dict[str, float]) -> None:
        """Measure anew, by a rescoring pass, whether sampling is exact when an update's pass says it is not."""
        if metrics.get("policy/sampling_gap", 0.0) > EXACT_TO and self.state.controllers.exact_sampling:
            self.state.controllers.exact_sampling = None

    def _logprobs(
        self, rollout: Rollout, role: Literal["policy", "reference"], *, among: World | None = None
    ) -> Tensor:
        temperature = self.config.generation.temperature

        def compute(batch: SequenceBatch) -> tuple[Tensor, ...]:
            return self.roles.logprobs(role, batch, temperature=temperature)[:1]

        self.session.display.phase(role)
        return self.over(rollout, compute, role=role, among=among)[0]

    def loss_settings(self, *, kl_coef: float) -> LossSettings:
        """The settings of the policy loss. A KL in the reward is not one in the loss: `kl_coef` is 0 there."""
        section, generation = self.config.on_policy, self.config.generation
        in_loss = not section.kl_in_reward and self.roles.has_reference
        return LossSettings.of(
            section,
            max_new_tokens=generation.max_new_tokens,
            kl_coef=kl_coef if in_loss else 0.0,
            teacher_coef=self.teacher_coef,
            weigh_mismatch=not self.samples_exactly,
        )

    @property
    def teacher_coef(self) -> float:
        return self.config.teacher.coef if self.config.method != "distill" else 0.0

    def read_teacher(self, rollout: Rollout) -> dict[str, float]:
        """Let the teacher read a rollout, where there is one; its metrics."""
        if self.teacher is None:
            return {}
        with self.session.timed("teacher"):
            self.teacher.read(rollout)
        return teacher_metrics(rollout)

    def policy_loss(self, rollout: Rollout, rows: list[int], settings: LossSettings) -> PolicyLoss:
        first = self.session.update == 0
        distance = self.distance_loss(rollout, rows) if settings.teacher_coef > 0 else None
        temperature = self.config.generation.temperature
        return PolicyLoss(rollout, rows, self.roles, settings, temperature=temperature, first=first, distance=distance)

    def distance_loss(self, rollout: Rollout, rows: list[int]) -> DistanceLoss:
        assert self.teacher is not None
        temperature = self.config.generation.temperature
        return DistanceLoss(rollout, rows, roles=self.roles, teacher=self.teacher, temperature=temperature)

    def record_prompts(self, step: int) -> dict[str, float]:
        """Put on record which prompts of a step were solved; its metrics."""
        metrics = self.choice.keep(step, self.tried)
        self.session.run.append_prompts(step + 1, self.tried.take())
        return metrics

    def record(self, rollout: Rollout, advantages: Tensor, step: int, *, rewards: Tensor | None = None) -> None:
        """Append some of the rollout to samples.jsonl, with each row's mean advantage (before any whitening, so that it
        reads as a reward), and in a step that is evaluated to tokens.jsonl, with `rewards` (B, T) where tokens have
        them. No signal stops it: what comes before and after it in a step is not to be done twice. Rank 0 does it, and
        waits for nobody.
        """
        if not self.world.is_main:
            return
        run, settings = self.session.run, self.config.run
        how: Any = {"prompts": self._texts, "group_size": self.group_size}
        if self.session.evaluates_after(step + 1) and (rows := shown_rows(rollout, group_size=self.group_size)):
            with stop_held(), self.session.timed("evaluation"):
                now = self._logprobs(rollout.select(rows), "policy", among=ALONE)
                lines = token_lines(rollout, rows, new_logprobs=now, rewards=rewards, tokenizer=self.tokenizer, **how)
                numbered = ({"step": step + 1, **line} for line in lines)
                run.append_tokens(numbered, most_bytes=allowed_bytes(settings, step + 1))
        shown = range(min(SHOWN_SAMPLES, rollout.num_episodes))
        samples = sample_lines(
            rollout,
            [written(rollout, row, self.scorer) for row in shown],
            kind="train",
            names=self.scorer.names,
            advantages=advantages if advantages.dim() == 1 else masked_mean(advantages, rollout.loss_mask, dim=1),
            **how,
        )
        last = step + 1 >= settings.num_steps
        run.append_samples(
            [{"step": step + 1, **line} for line in samples],
            turn=0 if last else step + 1,
            most_bytes=SAMPLES_BYTES / 2 / settings.num_steps,
        )

    def reward_metrics(self, rollout: Rollout) -> dict[str, float]:
        """Mean and spread of the rewards, the mean of each by name, rows without one."""
        valid = rollout.rewards[~rollout.rewards.isnan()]
        out: dict[str, float] = {}
        if len(valid):
            spread = float(valid.std()) if len(valid) > 1 else 0.0
            out |= {"reward/mean": float(valid.mean()), "reward/std": spread}
        out["reward/dropped"] = float(rollout.rewards.isnan().sum())
        for name, column in zip(self.scorer.names, rollout.scores.T, strict=True):
            applies = column[~column.isnan()]
            if len(applies):
                out[f"reward/{name}"] = float(applies.mean())
        if self.scorer.judges:
            spent = self.scorer.spent()
            out |= {
                "judge/requests": spent.requests,
                "judge/cached": spent.cached,
                "judge/tokens": spent.tokens,
                "judge/seconds": spent.seconds,
            }
        return out

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """Metrics of a rollout besides its rewards: lengths, truncation, turns, KL in nats per response."""
        out = {**rollout.environment_metrics(), **rollout.completion_metrics()}
        if rollout.ref_logprobs is not None and rollout.kept.any():
            out["objective/kl"] = rollout.kl_per_response()
        return out


class PolicyLoss:
    """The loss of a minibatch, micro-batch by micro-batch: called with rows of the rollout, the policy acting.

    `first`: no optimizer step has used the rollout yet, so the policy is the one that sampled it, and its
    log-probabilities here show how far sampling and training differ, at no cost.
    """

    def __init__(
        self,
        rollout: Rollout,
        minibatch: Sequence[int],
        roles: Roles,
        settings: LossSettings,
        *,
        temperature: float,
        first: bool,
        distance: DistanceLoss | None = None,
    ) -> None:
        self.rollout, self.roles, self.settings, self.first = rollout, roles, settings, first
        self.temperature, self.distance = temperature, distance
        self.counts = Counts.of(rollout.loss_mask[list(minibatch)])

    def __call__(self, rows: list[int]) -> tuple[Tensor, Metrics]:
        batch = self.rollout.batch(rows, self.roles)
        return self.from_states(rows, batch, self.roles.policy_states(batch))

    def from_states(self, rows: list[int], batch: SequenceBatch, states: Tensor) -> tuple[Tensor, Metrics]:
        """The same from the policy's hidden states (N, H), where they are used elsewhere too."""
        rollout, settings = self.rollout, self.settings
        logprobs, entropy = self.roles.logprobs(
            "policy", batch, temperature=self.temperature, states=states, entropy_grad=settings.entropy_coef > 0
        )
        assert rollout.advantages is not None, "advantages come before the first minibatch"

        def take(x: Tensor) -> Tensor:
            return rollout.take(x, rows, batch=batch)

        mask, advantages = take(rollout.loss_mask), take(rollout.advantages)
        minibatch = PolicyBatch(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if rollout.old_logprobs is None else take(rollout.old_logprobs),
            sampling_logprobs=take(rollout.sampling_logprobs),
            ref_logprobs=None if rollout.ref_logprobs is None else take(rollout.ref_logprobs),
            entropy=entropy,
            advantages=advantages if advantages.dim() == 2 else advantages.unsqueeze(1).expand_as(mask),
            mask=mask,
        )
        loss, metrics = policy_loss(minibatch, self.counts, settings=settings)
        if self.distance is not None:
            apart, of_distance = self.distance.from_states(rows, batch, states)
            loss, metrics = loss + settings.teacher_coef * apart, of_distance | metrics
        if self.first:
            metrics = metrics | sampling_gap(minibatch, self.counts)
        return loss, metrics
