"""Learning from a policy's own samples, shared by GRPO, PPO and distillation: sampling, rescoring, loss, records."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tinyrl.algorithms.losses import Metrics
from tinyrl.algorithms.masking import masked_mean
from tinyrl.config.schema import Config
from tinyrl.evaluation.evaluate import Evaluation, evaluate
from tinyrl.models.batches import SequenceBatch
from tinyrl.models.device import to_device
from tinyrl.models.parallel import ALONE, World
from tinyrl.models.roles import Role
from tinyrl.rewards.functions import count_bad_batches, describe_failure
from tinyrl.rollout.collector import (
    apply_length_rules,
    completion_text,
    sample_and_score,
    sample_lines,
    shown_samples,
    token_lines,
)
from tinyrl.rollout.components import Options, SamplingParts
from tinyrl.rollout.sample import (
    Sample,
    Tokens,
    batch_of,
    environment_metrics,
    fill,
    kl_per_response,
    length_metrics,
    loss_mask,
    num_episodes,
    padded,
    rewards_of,
    sizes_of,
)
from tinyrl.runs.signals import stop_held
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.trainers.choice import PassRates, PromptSampler, PromptStats
from tinyrl.trainers.policy_loss import Counts, LossSettings, PolicyBatch, policy_loss, sampling_gap
from tinyrl.trainers.teaching import LocalTeacher, ServerTeacher, teacher_metrics
from tinyrl.training.session import SAMPLES_BYTES, Session, Trainer
from tinyrl.training.state import RunState
from tinyrl.training.update import Pass

# Sampling log-probabilities this close to a training pass's are used as `old`: through 30 layers of a real model
# float32 rounds by up to 2e-5.
EXACT_TO = 1e-4
SHOWN_SAMPLES = 16  # completions of each step in samples.jsonl
MOST_TOKEN_BYTES = 20_000_000  # of tokens.jsonl

SampleLoss = Callable[[list[Sample]], tuple[Tensor, Metrics]]  # of a micro-batch


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
        teacher = ServerTeacher if config.teacher.kind == "server" else LocalTeacher
        self.teacher = teacher(self) if config.learns_from_teacher else None
        self.state = RunState()

    def check(self) -> list[str]:
        notes = [] if self.teacher is None else self.teacher.start()
        return [*super().check(), *notes]

    def evaluate(self) -> Evaluation:
        return evaluate(self, num_prompts=self.config.run.eval_prompts)

    @property
    def reads_reference(self) -> bool:
        """Whether each step's samples are scored under the reference."""
        return self.config.on_policy.kl_coef > 0

    @property
    def several_steps(self) -> bool:
        """Whether several optimizer steps use a step's samples."""
        section = self.config.on_policy
        return section.num_epochs > 1 or (section.minibatch_size or section.batch_size) < section.batch_size

    # ---- sampling ----

    def begin(self, session: Session) -> None:
        """Collect samples for a session from now on."""
        self.session, self.state, self.group_size = session, session.state, self.config.on_policy.group_size
        self._warned: set[str] = set()
        controllers, device = self.state.controllers, self.accelerator.device.type
        here = f"{self.engine.name} on {device}, mixed precision {self.accelerator.mixed_precision}"
        if controllers.measured_on != here:
            controllers.measured_on, controllers.exact_sampling = here, None
        self._texts = {prompt.index: prompt.text for prompt in self.train_prompts}
        self.tried = PromptStats(self.config.task.solved_reward)
        task, how = self.config.task, (self.config.on_policy.num_prompts, self.config.run.seed)
        if task.sampler == "difficulty":
            self.choice = PassRates(task, self.train_prompts, *how, self.state.controllers.pass_rates)
        else:
            self.choice = PromptSampler(task, self.train_prompts, *how)

    def prompts(self, step: int) -> list[PreparedPrompt]:
        """The prompts of a step: a function of (seed, step), and of what was seen so far where task says so."""
        return [self.train_prompts[i] for i in self.choice.draw(step)]

    def collect(self, prompts: list[PreparedPrompt], step: int) -> list[Sample]:
        """Sample and score a group for each prompt; failing rewards are counted, shown, and eventually stop the run."""
        self.session.display.phase("sampling")
        samples = sample_and_score(prompts, self, group_size=self.group_size, step=step)
        apply_length_rules(samples, self.config.reward, max_new_tokens=self.config.generation.max_new_tokens)
        self.tried.look(prompts, rewards_of(samples))
        self._report_failures(samples, step)
        self.state.completions += len(samples)
        self.state.tokens += sum(sample.num_actions for sample in samples)
        return samples

    def _warn_once(self, key: str, sentence: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self.session.display.note(f"warning: {sentence}")

    def _report_failures(self, samples: list[Sample], step: int) -> None:
        retried = self.scorer.retried | (self.runner.environment.retried if self.runner else {})
        for name, why in retried.items():
            self._warn_once(name, f"`{name}` was tried row by row: on the whole batch it {why}")
        failed = [sample for sample in samples if sample.failures]
        lost, sentence = sum(not sample.rewarded for sample in failed), ""
        if failed:
            prompts = {prompt.index: prompt for prompt in self.train_prompts}
            sentence = describe_failure(prompts[failed[0].row].prompt, failed[0].failures[0])
            dropped = "their rows are" if lost == len(failed) else f"{lost} of their rows are"
            self.session.display.note(
                f"warning: {len(failed)} of {len(samples)} rewards failed and {dropped} dropped "
                f"(they are in {self.session.run.failed_rewards}). {sentence}"
            )
            lines = [
                {
                    "step": step + 1,
                    "prompt_index": sample.row,
                    "sample": sample.episode % self.group_size,
                    "prompt": self._texts[sample.row],
                    "completion": completion_text(sample, self.scorer),
                    **({} if sample.played is None else {"episode": sample.played.transcript}),
                    "reason": reason,
                }
                for sample in failed
                for reason in sample.failures
            ]
            self.session.run.append(self.session.run.failed_rewards, lines)
        if self.config.trains.rewarded:
            self.state.controllers.failing_batches = count_bad_batches(
                self.state.controllers.failing_batches,
                rows=len(samples),
                failed=lost,
                rewarded=sum(sample.rewarded for sample in samples),
                first_failure=sentence,
            )

    def record_prompts(self, step: int) -> dict[str, float]:
        """Put on record which prompts of a step were solved; its metrics."""
        metrics = self.choice.keep(step, self.tried)
        run, prompts = self.session.run, self.tried.take()  # of each its index, its key, how often tried and solved
        run.append(run.prompts, [{"step": step + 1, "prompts": prompts}])
        return metrics

    # ---- passes without gradient ----

    def compute_logprobs(self, samples: list[Sample], *, scored: bool = False) -> None:
        """Fill in `ref` where a KL needs it, `old` where several optimizer steps use the samples. With one step the
        training pass's own values, detached, are the old ones, so the ratio is exactly 1; a KL then takes the policy's
        from a pass like the reference's, as an engine that is not exact would add its own noise to it.

        `scored`: of every sample with a reward, those that are left out of the loss among them.
        """
        tokens: Tokens = "rewarded" if scored else "loss"
        if self.reads_reference:
            fill(samples, "ref", self.logprobs(samples, "reference", tokens=tokens))
        if not self.several_steps:
            if self.reads_reference and not self.samples_exactly:
                fill(samples, "rescored", self.logprobs(samples, "policy", tokens=tokens))
            return
        controllers, sampled = self.state.controllers, padded(samples, "logprobs")
        fill(samples, "old", sampled)
        if controllers.exact_sampling:
            return
        rescored = self.logprobs(samples, "policy", tokens=tokens)
        if controllers.exact_sampling is None and (mask := loss_mask(samples)).any():  # not measured yet
            gap = float(torch.where(mask, rescored - sampled, 0.0).abs().max())
            controllers.exact_sampling = self.engine.exact and gap < EXACT_TO
        if not controllers.exact_sampling:
            fill(samples, "old", rescored)

    def logprobs(
        self,
        samples: list[Sample],
        role: Literal["policy", "reference"],
        *,
        tokens: Tokens = "loss",
        among: World | None = None,
    ) -> Tensor:
        """(B, T) log-probabilities of the tokens that count, under a role."""
        self.session.display.phase(role)
        compute = partial(self.roles.logprobs, role, temperature=self.temperature)
        return self.over(samples, lambda batch: compute(batch)[:1], role=role, tokens=tokens, among=among)[0]

    @property
    def samples_exactly(self) -> bool:
        """Whether the engine's log-probabilities are those of a training pass, up to rounding in float32."""
        return self.engine.exact and self.accelerator.mixed_precision == "no"

    def watch_sampling(self, metrics: dict[str, float]) -> None:
        """Measure anew, by a rescoring pass, whether sampling is exact when an update's pass says it is not."""
        if metrics.get("policy/sampling_gap", 0.0) > EXACT_TO and self.state.controllers.exact_sampling:
            self.state.controllers.exact_sampling = None

    def ask_teacher(self, samples: list[Sample]) -> dict[str, float]:
        """Let the teacher, where there is one, score the samples; its metrics."""
        if self.teacher is None:
            return {}
        with self.session.timed("teacher"):
            self.teacher.score(samples)
        return teacher_metrics(samples)

    # ---- the loss ----

    def loss_settings(self, *, kl_coef: float) -> LossSettings:
        """The settings of the policy loss. A KL in the reward is not one in the loss: `kl_coef` is 0 there."""
        config = self.config
        in_loss = not config.on_policy.kl_in_reward and self.roles.has_reference
        return LossSettings.of(
            config.on_policy,
            max_new_tokens=config.generation.max_new_tokens,
            kl_coef=kl_coef if in_loss else 0.0,
            teacher_coef=config.teacher.coef if config.method != "distill" else 0.0,
            weigh_mismatch=not self.samples_exactly,
        )

    def passes(self, minibatch: list[Sample], settings: LossSettings) -> list[Pass]:
        """The passes of an optimizer step on a minibatch; none where no token of it is in the loss."""
        loss = self.policy_loss(minibatch, settings)

        def of_micro_batch(samples: list[Sample]) -> tuple[Tensor, Metrics]:
            batch = batch_of(samples, self.roles)
            return loss(samples, batch, self.roles.policy_states(batch))

        return self.passes_over(minibatch, policy=of_micro_batch)

    def passes_over(self, minibatch: list[Sample], **losses: SampleLoss) -> list[Pass]:
        """A pass of each role over a minibatch; none where no token of it is in the loss."""
        if not loss_mask(minibatch).any():
            return []
        sizes = sizes_of(minibatch, self.roles)

        def of(role: Role, loss: SampleLoss) -> Pass:
            return Pass(role, lambda rows: loss([minibatch[i] for i in rows]), range(len(minibatch)), sizes)

        return [of(role, loss) for role, loss in losses.items()]  # pyright: ignore[reportArgumentType]

    def policy_loss(
        self, minibatch: list[Sample], settings: LossSettings
    ) -> Callable[[list[Sample], SequenceBatch, Tensor], tuple[Tensor, Metrics]]:
        """The loss of a minibatch, micro-batch by micro-batch: of its samples, batch and the policy's hidden states
        (N, H). Before the first optimizer step on the samples the policy is the one that sampled them, so its
        log-probabilities show how far sampling and training differ, at no cost.
        """
        counts, first, temperature = Counts.of(loss_mask(minibatch)), self.session.update == 0, self.temperature
        distance = None
        if settings.teacher_coef > 0:
            assert self.teacher is not None
            distance = self.teacher.distance_loss(minibatch)

        def loss(samples: list[Sample], batch: SequenceBatch, states: Tensor) -> tuple[Tensor, Metrics]:
            logprobs, entropy = self.roles.logprobs(
                "policy", batch, temperature=temperature, states=states, entropy_grad=settings.entropy_coef > 0
            )

            def on_device(x: Tensor) -> Tensor:
                return to_device(x, states.device)

            mask, advantages = on_device(loss_mask(samples)), on_device(padded(samples, "advantage"))
            terms = PolicyBatch(
                logprobs=logprobs,
                old_logprobs=logprobs.detach() if samples[0].old is None else on_device(padded(samples, "old")),
                sampling_logprobs=on_device(padded(samples, "logprobs")),
                ref_logprobs=None if samples[0].ref is None else on_device(padded(samples, "ref")),
                entropy=entropy,
                advantages=advantages if advantages.dim() == 2 else advantages.unsqueeze(1).expand_as(mask),
                mask=mask,
            )
            total, metrics = policy_loss(terms, counts, settings=settings)
            if distance is not None:
                apart, of_distance = distance(samples, batch, states)
                total, metrics = total + settings.teacher_coef * apart, of_distance | metrics
            return total, metrics | sampling_gap(terms, counts) if first else metrics

        return loss

    @property
    def temperature(self) -> float:
        return self.config.generation.temperature

    # ---- metrics and records ----

    def count_flat(self, samples: list[Sample]) -> dict[str, float]:
        """Count a step in which the policy had no gradient, and warn of the first. Metric: optim/flat_steps."""
        controllers = self.state.controllers
        norms, _ = self.session.metrics.sums.get("optim/grad_norm", (None, 0))  # None: only the critic is trained
        flat, why = norms == 0.0, ""
        if not loss_mask(samples).any():
            lost = sum(not sample.rewarded for sample in samples)
            why = f"no response counts: {lost} of {len(samples)} have no reward"
            if self.config.reward.truncated == "mask":
                cut = sum(sample.truncated and sample.rewarded for sample in samples)
                why += f", {cut} were cut off at generation.max_new_tokens (reward.truncated=mask)"
        elif flat:
            why = "the loss has no gradient, as where all responses to a prompt have the same reward"
        if why:
            self._warn_once(
                "flat",
                f"in this step there is nothing to learn from: {why}. Weights stay as they are; "
                "optim/flat_steps counts such steps",
            )
        controllers.flat_steps += flat
        return {"optim/flat_steps": controllers.flat_steps}

    def record(self, samples: list[Sample], advantages: Tensor, step: int, *, rewards: Tensor | None = None) -> None:
        """Append some of the samples to samples.jsonl, with each one's mean advantage (before any whitening, so that it
        reads as a reward), and in a step that is evaluated to tokens.jsonl, with `rewards` (B, T) where tokens have
        them. No signal stops it: what comes before and after it in a step is not to be done twice. Rank 0 does it, and
        waits for nobody.
        """
        if not self.world.is_main:
            return
        run, settings = self.session.run, self.config.run
        how: Any = {"prompts": self._texts, "group_size": self.group_size}
        if self.session.evaluates_after(step + 1) and (shown := shown_samples(samples, group_size=self.group_size)):
            with stop_held(), self.session.timed("evaluation"):
                now = self.logprobs(shown, "policy", among=ALONE)
                if rewards is not None:
                    places = {id(sample): place for place, sample in enumerate(samples)}
                    rewards = rewards[[places[id(sample)] for sample in shown]]
                lines = token_lines(shown, new_logprobs=now, rewards=rewards, tokenizer=self.tokenizer, **how)
                numbered = ({"step": step + 1, **line} for line in lines)
                every = settings.eval_every or settings.num_steps
                done, ahead = -(-(step + 1) // every), -(-max(0, settings.num_steps - step - 1) // every)
                run.append_tokens(numbered, most_bytes=MOST_TOKEN_BYTES * done / (done + ahead))  # its share
        first = samples[: min(SHOWN_SAMPLES, num_episodes(samples))]
        lines = sample_lines(
            samples,
            [completion_text(sample, self.scorer) for sample in first],
            kind="train",
            names=self.scorer.names,
            advantages=advantages if advantages.dim() == 1 else masked_mean(advantages, loss_mask(samples), dim=1),
            **how,
        )
        last = step + 1 >= settings.num_steps
        run.append_samples(
            [{"step": step + 1, **line} for line in lines],
            turn=0 if last else step + 1,
            most_bytes=SAMPLES_BYTES / 2 / settings.num_steps,
        )

    def reward_metrics(self, samples: list[Sample]) -> dict[str, float]:
        """Mean and spread of the rewards, the mean of each by name, samples without one."""
        rewards = rewards_of(samples)
        valid = rewards[~rewards.isnan()]
        out: dict[str, float] = {}
        if len(valid):
            spread = float(valid.std()) if len(valid) > 1 else 0.0
            out |= {"reward/mean": float(valid.mean()), "reward/std": spread}
        out["reward/dropped"] = float(rewards.isnan().sum())
        for i, name in enumerate(self.scorer.names):
            column = torch.tensor([sample.scores[i] for sample in samples])
            applies = column[~column.isnan()]
            if len(applies):
                out[f"reward/{name}"] = float(applies.mean())
        if self.scorer.judges:
            spent = self.scorer.spent()
            out |= {f"judge/{name}": getattr(spent, name) for name in ("requests", "cached", "tokens", "seconds")}
        return out

    def metrics(self, samples: list[Sample]) -> dict[str, float]:
        """Metrics of the samples besides their rewards: lengths, truncation, turns, KL in nats per response."""
        out = {**environment_metrics(samples), **length_metrics(samples)}
        if samples[0].ref is not None and any(sample.in_loss for sample in samples):
            out["objective/kl"], _ = kl_per_response(samples)
        return out
