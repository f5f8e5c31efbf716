"""Learning from a policy's own samples, shared by GRPO, PPO and distillation: sampling, rescoring, loss, records."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tinyrl.algorithms.losses import Metrics
from tinyrl.algorithms.masking import masked_mean
from tinyrl.config.method_sections import PolicyGradientSection
from tinyrl.evaluation.evaluate import Evaluation, evaluate
from tinyrl.generation.sample import (
    Logprobs,
    Sample,
    apply_length_rules,
    environment_metrics,
    kl_per_response,
    length_metrics,
    loss_mask,
    num_episodes,
    rewards_of,
    sampled_logprobs,
    scores_of,
    token_rewards_of,
)
from tinyrl.models.batch import Batch, Tokens
from tinyrl.models.parallel import ALONE, World
from tinyrl.process.signals import stop_held
from tinyrl.rollout.records import (
    TokenColumns,
    completion_text,
    room_for_samples,
    sample_key,
    sample_lines,
    shown_samples,
    token_lines,
)
from tinyrl.training.failing_rewards import check_failure_streak, check_outcome, describe_failures
from tinyrl.training.method import Method
from tinyrl.training.policy_loss import (
    ROUNDING,
    Counts,
    Experience,
    PolicyLossOptions,
    TeacherOutputs,
    only_rounding,
    policy_loss,
    sampling_gap,
)
from tinyrl.training.prompt_sampler import PassRates, PromptSampler

if TYPE_CHECKING:
    from pathlib import Path

    from tinyrl.rollout.collect import Collector
    from tinyrl.tasks.prompts import PreparedPrompt
    from tinyrl.training.run import Run
    from tinyrl.training.teacher import Teacher
    from tinyrl.workers.calls import WorkerFunction

SHOWN_SAMPLES = 16  # completions of each step in samples.jsonl
MOST_TOKEN_BYTES = 20_000_000  # of tokens.jsonl

NEAR = 1e-3  # nats: a policy none of whose tokens is further from its reference may be the reference


class OnPolicy(Method):
    """A method that learns from its own samples: draws prompts, samples, scores, and watches for failing rewards."""

    def __init__(self, collector: Collector) -> None:
        super().__init__(collector.policy, collector.config)
        self.collector = collector
        self.row_fingerprints = collector.row_fingerprints
        self.by_index = {prompt.index: prompt for prompt in collector.train_prompts}
        self.temperature = self.config.generation.temperature
        self.group_size = self.config.on_policy.group_size
        self.warned: set[str] = set()  # rewards that were tried row by row, as a warning has said
        self.failures = ""  # sentences about those of the last batch
        sampler = PassRates if self.config.task.sampler == "difficulty" else PromptSampler
        self.sampler = sampler(
            prompts=collector.train_prompts,
            num_prompts=self.config.on_policy.num_prompts,
            seed=self.config.run.seed,
            solved_reward=self.config.task.solved_reward,
        )
        self.teacher: Teacher | None = None
        if self.config.learns_from_teacher:
            from tinyrl.training.teacher import LocalTeacher, ServerTeacher  # with the client of servers

            kind = ServerTeacher if self.config.teacher.kind == "server" else LocalTeacher
            self.teacher = kind(self.policy, collector, self.config)

    @property
    def engine_name(self) -> str:
        return self.collector.engine.name

    @property
    def rows_of_epoch(self) -> tuple[int, int]:
        return len(self.collector.train_prompts), self.config.on_policy.num_prompts

    @property
    def max_rows(self) -> int | None:
        return self.collector.engine.max_rows

    def restore_max_rows(self, rows: int) -> None:
        self.collector.engine.max_rows = rows

    def epoch_note(self) -> str:
        """Return the steps per epoch, and the completions and optimizer steps per step."""
        section = self.config.on_policy
        updates = 1
        if isinstance(section, PolicyGradientSection):
            updates = section.num_epochs * (section.batch_size // section.update_size)
        sampled = f"{section.num_prompts:,} prompts x {section.group_size} = {section.batch_size:,} completions"
        steps = "1 optimizer step" if updates == 1 else f"{updates:,} optimizer steps"
        return f"{super().epoch_note()}; a step is {sampled}, {steps}"

    def check(self) -> list[str]:
        return self.collector.check()

    def evaluate(self) -> Evaluation:
        return evaluate(self.collector, self.collector.eval_prompts[: self.config.run.eval_prompts])

    def describe_memory(self) -> str:
        return self.collector.describe_memory()

    def keep_output(self, write: Callable[[str], None]) -> None:
        self.collector.keep_output(write)

    @property
    def workers(self) -> list[WorkerFunction]:
        return self.collector.code_workers

    def start_code(self) -> None:
        if self.world.is_main:  # which calls the rewards
            self.collector.scorer.start()

    def judge_requests(self) -> dict[str, int]:
        return {name: judge.asked for name, judge in self.collector.scorer.judges().items()}

    def add_judge_requests(self, before: dict[str, int]) -> None:
        for name, judge in self.collector.scorer.judges().items():
            judge.asked += before.get(name, 0)

    def close(self) -> None:
        self.collector.close()

    @property
    def reads_reference(self) -> bool:
        return self.config.policy_gradient.kl_coef > 0

    @property
    def uses_old_logprobs(self) -> bool:
        """Return whether the ratio is to log-probabilities computed before the update: where several optimizer steps
        use a step's samples. With one, the old ones are the training pass's own, detached, so the ratio is exactly 1.
        """
        section = self.config.policy_gradient
        return section.num_epochs > 1 or section.update_size < section.batch_size

    def samples_exactly(self, run: Run) -> bool:
        """Return whether the engine's log-probabilities equal a training pass's, up to rounding: the engine says so,
        training is in float32, and no step has measured otherwise.
        """
        in_float32 = self.policy.run_device.dtype == torch.float32
        return self.collector.engine.exact and in_float32 and not run.state.controllers.inexact_sampling

    def measures_gap(self, run: Run) -> bool:
        """Return whether the optimizer step under way shows how far sampling and training disagree: the first one on
        a step's samples, where no pass before the update has shown it.
        """
        rescored = self.uses_old_logprobs and not self.samples_exactly(run)
        return run.update == 0 and not rescored

    @property
    def teacher_coef(self) -> float:
        """Return the weight of the distance to a teacher beside the policy loss; 0 without a teacher."""
        return 0.0 if self.teacher is None else self.config.teacher.kl_coef

    # ---- sampling ----

    def prompts(self, run: Run, step: int) -> list[PreparedPrompt]:
        """Return the prompts of a step, a function of (seed, step), and with task.sampler=difficulty of pass rates."""
        places = self.sampler.draw(step, run.state.controllers.pass_rates)
        return [self.collector.train_prompts[place] for place in places]

    def collect(self, run: Run, prompts: list[PreparedPrompt], step: int) -> list[Sample]:
        """Sample and score a group for each prompt; failing rewards are counted, shown, and eventually stop the run."""
        run.display.phase("sampling")
        samples = self.collector.collect(prompts, group_size=self.group_size, step=step)
        samples = apply_length_rules(samples, self.config.reward, max_new_tokens=self.config.generation.max_new_tokens)
        self.sampler.update(prompts, scores_of(samples))
        for note in self.collector.notes():
            run.display.note(note)
        self._report_failures(run, samples, step)
        return samples

    def _report_failures(self, run: Run, samples: list[Sample], step: int) -> None:
        for function in self.collector.workers:
            if (why := function.retried) is not None and function.name not in self.warned:
                self.warned.add(function.name)
                run.display.note(f"warning: `{function.name}` was tried row by row: on the whole batch it {why}")
        failed = [sample for sample in samples if sample.failures]
        self.failures = " ".join(self._describe_failed(failed, count=len(samples), log=run.folder.failed_rewards))
        if failed:
            run.display.note(f"warning: {self.failures}")
            lines = [
                {
                    "step": step + 1,
                    **sample_key(sample, prompts=self.by_index, group_size=self.group_size),
                    "completion": completion_text(sample, self.collector.scorer),
                    **({} if sample.played is None else {"episode": sample.played.transcript}),
                    "reason": reason,
                }
                for sample in failed
                for reason in sample.failures
            ]
            run.folder.append(run.folder.failed_rewards, lines)
        if self.config.trains.rewarded:
            controllers = run.state.controllers
            lost = sum(not sample.rewarded for sample in failed)
            rewarded = sum(sample.rewarded for sample in samples)
            counts = {"rows": len(samples), "failed": lost, "rewarded": rewarded}
            streak = check_failure_streak(controllers.failing_batches, **counts, failures=self.failures)
            controllers.failing_batches = streak

    def _describe_failed(self, failed: list[Sample], *, count: int, log: Path) -> list[str]:
        """Return a sentence for the samples of a batch of `count` whose episode failed, and one for those whose rewards
        did; `log`: where they are.
        """
        sentences = []
        episodes = [(self.by_index[s.row].prompt, s.play_failure) for s in failed if s.play_failure is not None]
        scored = [sample for sample in failed if sample.play_failure is None]
        if episodes and self.collector.runner is not None:
            environment = self.collector.runner.environment
            who = f"{environment.noun} `{environment.name}`"
            what = f"{who} failed in {len(episodes)} of {count} episodes, which are dropped (they are in {log})"
            sentences.append(f"{what}. {describe_failures(episodes)}")
        if scored:
            lost = sum(not sample.rewarded for sample in scored)
            what = f"{len(scored)} of {count} rewards failed, and {lost} responses are dropped (they are in {log})"
            reasons = [(self.by_index[sample.row].prompt, sample.failures[0]) for sample in scored]
            sentences.append(f"{what}. {describe_failures(reasons)}")
        return sentences

    def check_end(self, run: Run) -> None:
        if self.config.trains.rewarded:
            unrewarded = run.state.controllers.unrewarded_steps
            check_outcome(steps=run.state.step, unrewarded=unrewarded, failures=self.failures)

    def record_prompts(self, run: Run, step: int) -> dict[str, float]:
        """Log which prompts of a step were solved; return metrics of the sampler."""
        prompts, metrics = self.sampler.drain(step, run.state.controllers.pass_rates)
        run.folder.append(run.folder.prompts, [{"step": step + 1, "prompts": prompts}])
        return metrics

    # ---- passes without gradient, and the memory of those with one ----

    def trial_loss(self, batch: Batch, states: Tensor | None = None) -> tuple[Tensor, Metrics]:
        """Sum log-probabilities, and entropies where the loss has their gradient; states (N, H): of the policy."""
        section = self.config.on_policy
        with_entropy = isinstance(section, PolicyGradientSection) and section.entropy_coef > 0
        logprobs, entropy = self.policy.logprobs(
            "policy", batch, temperature=self.temperature, states=states, entropy_grad=with_entropy
        )
        loss = logprobs.sum()
        return (loss + entropy.sum() if with_entropy else loss), {}

    def compute_logprobs(
        self, run: Run, samples: list[Sample], minibatches: list[list[int]], *, scored: bool = False
    ) -> tuple[Logprobs, dict[str, float]]:
        """Compute `reference` where a KL needs it, and `old` where the ratio does; return the log-probabilities, and
        what the passes have measured. minibatches: places of samples.

        All passes are over each minibatch by itself, of the update's own micro-batches, so that one policy has the same
        numbers in all of them: the ratio is 1 before the first optimizer step, and a policy that is its reference has a
        KL of exactly 0. Rounding would otherwise be all that there is to learn from where rewards are equal, and an
        optimizer that divides a gradient by its size would make a full step of it.

        `old` is what was recorded while sampling, or where that is not exact comes from a pass. A KL in the reward
        takes `rescored`, from a pass, where `old` would add the engine's rounding to it: where sampling is not exact,
        and where the policy may be its reference.

        `scored`: of every sample with a reward, those that are left out of the loss among them.
        """
        tokens: Tokens = "rewarded" if scored else "loss"
        exact = self.samples_exactly(run)
        compute = partial(self._logprobs_by_minibatch, run, samples, minibatches, tokens=tokens)
        measured: dict[str, float] = {}
        sampled = sampled_logprobs(samples)
        reference = compute("reference") if self.reads_reference else None
        old = None
        if self.uses_old_logprobs and exact:
            old = sampled
        elif self.uses_old_logprobs:
            old = compute("policy")
            measured["policy/sampling_gap"] = float(masked_mean((old - sampled).abs(), loss_mask(samples)))
        found = Logprobs(sampled=sampled, reference=reference, old=old)
        if self.reads_reference and self.config.policy_gradient.kl_in_reward:
            farthest = found.kl(loss_mask(samples, tokens)).abs().max()
            as_sampled = exact or not self.uses_old_logprobs
            if as_sampled and (farthest <= NEAR or not exact):
                rescored = compute("policy")
                found = Logprobs(sampled=sampled, reference=reference, old=old, rescored=rescored)
        return found, measured

    def _logprobs_by_minibatch(
        self,
        run: Run,
        samples: list[Sample],
        minibatches: list[list[int]],
        role: Literal["policy", "reference"],
        *,
        tokens: Tokens,
    ) -> Tensor:
        """Compute the log-probabilities (B, T) of samples under a role, by a pass over each minibatch."""
        found = torch.zeros(len(samples), max(len(sample.response) for sample in samples))
        for rows in minibatches:
            of_minibatch = self.logprobs(run, [samples[row] for row in rows], role, tokens=tokens)
            found[rows, : of_minibatch.shape[1]] = of_minibatch
        return found

    def logprobs(
        self,
        run: Run,
        samples: list[Sample],
        role: Literal["policy", "reference"],
        *,
        tokens: Tokens = "loss",
        among: World | None = None,
    ) -> Tensor:
        """Compute the log-probabilities (B, T) of the tokens that count, under a role."""
        run.display.phase(role)
        compute = partial(self.policy.logprobs, role, temperature=self.temperature)
        return self.policy.map_samples(lambda b: compute(b)[:1], samples, role=role, tokens=tokens, among=among)[0]

    def ask_teacher(self, run: Run, samples: list[Sample]) -> tuple[TeacherOutputs | None, dict[str, float]]:
        """Score the samples by the teacher, if there is one; return what it says, and metrics of that."""
        if self.teacher is None:
            return None, {}
        with run.timed("teacher"):
            outputs = self.teacher.score(samples, self.teacher.prompts(samples))
        return outputs, self.teacher.metrics(samples, outputs)

    # ---- the loss of a micro-batch ----

    def policy_terms(
        self,
        batch: Batch,
        states: Tensor | None = None,
        *,
        minibatch: Experience,
        counts: Counts,
        options: PolicyLossOptions,
        measure_gap: bool,
    ) -> tuple[Tensor, Metrics]:
        """Compute the policy's loss of a micro-batch of a minibatch with `counts`; the policy must be acting. states
        (N, H): the policy's, where they are known already.

        surrogate - entropy_coef * entropy + kl_coef * KL(policy || reference) [+ teacher.kl_coef * distance]
        """
        states = self.policy.states("policy", batch) if states is None else states
        logprobs, entropy = self.policy.logprobs(
            "policy", batch, temperature=self.temperature, states=states, entropy_grad=options.entropy_coef > 0
        )
        inputs = minibatch.inputs.of(batch)
        loss, metrics = policy_loss(logprobs, entropy, inputs, counts, options)
        if self.teacher is not None and minibatch.teacher is not None and self.teacher_coef > 0:
            distance, of_distance = self.teacher.distance(batch, states, minibatch.teacher, counts)
            loss = loss + self.teacher_coef * distance
            metrics = of_distance | metrics
        if measure_gap:
            metrics |= sampling_gap(logprobs, inputs, counts)
        has_advantage = any(minibatch.has_advantage[row] for row in batch.rows)
        is_taught = self.teacher_coef > 0 and any(minibatch.is_taught[row] for row in batch.rows)
        learns = has_advantage or is_taught or options.entropy_coef > 0
        if not learns and only_rounding(logprobs, inputs, kl_coef=options.kl_coef):
            loss = loss.detach()
        return loss, metrics

    # ---- metrics and records ----

    def update_controllers(self, run: Run, samples: list[Sample]) -> dict[str, float]:
        """Take what the step has shown into the state of the run. Metric: optim/flat_steps.

        A step in which the policy had no gradient is counted, and one in which no sample had a reward. Where sampling
        and training were further apart than ROUNDING, sampling counts as inexact from the next step on: old
        log-probabilities are computed and the mismatch is corrected for (`importance_correction`). All processes have
        measured the same.
        """
        controllers = run.state.controllers
        norms, _ = run.metrics.sums.get("optim/grad_norm", (None, 0))  # None: only the critic is trained
        if norms == 0.0:
            controllers.flat_steps += 1
        if not any(sample.rewarded for sample in samples):
            controllers.unrewarded_steps += 1
        gap, count = run.metrics.sums.get("policy/sampling_gap", (0.0, 1))
        if self.samples_exactly(run) and gap / count > ROUNDING:
            controllers.inexact_sampling = True
            run.display.note(
                f"warning: sampling and training differ by {gap / count:.2g} nats per token, more than rounding in "
                f"float32 ({ROUNDING:g}). From the next step on log-probabilities before the update are computed, and "
                "the mismatch is corrected for."
            )
        return {"optim/flat_steps": controllers.flat_steps}

    def record(
        self,
        run: Run,
        step: int,
        experience: Experience,
        advantages: Tensor,
        *,
        rewards: Tensor | None = None,
    ) -> None:
        """Append some of the samples to samples.jsonl, with each one's mean of `advantages` (before any whitening, so
        that it reads as a reward) and those of its turns, and in a step that is evaluated to tokens.jsonl, with
        `rewards` (B, T) where tokens have them. Rank 0 does it, and waits for nobody; no signal stops it, as a step's
        records are written once.
        """
        if not self.world.is_main:
            return
        folder = run.folder
        settings = self.config.run
        samples = experience.samples
        how: dict[str, Any] = {"prompts": self.by_index, "group_size": self.group_size}
        if run.evaluates_after(step + 1) and (shown := shown_samples(samples, group_size=self.group_size)):
            with stop_held(), run.timed("evaluation"):
                columns = self.token_columns(run, experience.rows(shown), None if rewards is None else rewards[shown])
                chosen = [samples[row] for row in shown]
                lines = token_lines(chosen, columns, tokenizer=self.policy.tokenizer, **how)
                numbered = ({"step": step + 1, **line} for line in lines)
                room = MOST_TOKEN_BYTES * (step + 1) / settings.num_steps
                folder.append(folder.tokens, numbered, most_bytes=room)
        scorer = self.collector.scorer
        first = samples[: min(SHOWN_SAMPLES, num_episodes(samples))]
        texts = [completion_text(sample, scorer) for sample in first]
        by_turn = self.config.credits_turns
        of_tokens = advantages if by_turn else None
        if advantages.dim() == 2:
            advantages = masked_mean(advantages, loss_mask(samples), dim=1)
        how |= {"names": scorer.names, "advantages": advantages, "by_turn": by_turn, "of_tokens": of_tokens}
        lines = sample_lines(samples, texts, kind="train", **how)
        numbered = [{"step": step + 1, **line} for line in lines]
        folder.append(folder.samples, numbered, most_bytes=room_for_samples(step + 1, settings.num_steps))

    def token_columns(self, run: Run, shown: Experience, rewards: Tensor | None) -> TokenColumns:
        """Collect the numbers of each token that the update has seen, and its log-probability after that."""
        inputs = shown.inputs
        if rewards is None:
            no_kl = torch.zeros(loss_mask(shown.samples).shape)  # of the rows shown, which may be shorter
            rewards = token_rewards_of(shown.samples, no_kl, kl_coef=0.0)
        return TokenColumns(
            advantage=inputs.advantage,
            old=inputs.sampled if inputs.old is None else inputs.old,
            ref=inputs.reference,
            value=inputs.values,
            teacher=None if shown.teacher is None else shown.teacher.logprobs,
            reward=rewards,
            new=self.logprobs(run, shown.samples, "policy", among=ALONE),
        )

    def reward_metrics(self, samples: list[Sample]) -> dict[str, float]:
        """Measure mean and standard deviation of the rewards, the mean of each by name, and samples without one."""
        rewards = rewards_of(samples)
        valid = rewards[~rewards.isnan()]
        out: dict[str, float] = {}
        if len(valid):
            spread = float(valid.std()) if len(valid) > 1 else 0.0
            out |= {"reward/mean": float(valid.mean()), "reward/std": spread}
        out["reward/dropped"] = float(rewards.isnan().sum())
        for i, name in enumerate(self.collector.scorer.names):
            column = torch.tensor([sample.scores[i] for sample in samples])
            applies = column[~column.isnan()]
            if len(applies):
                out[f"reward/{name}"] = float(applies.mean())
        return out | self.collector.scorer.metrics()

    def metrics(self, samples: list[Sample], logprobs: Logprobs | None = None) -> dict[str, float]:
        """Measure the samples besides their rewards: lengths, truncation, turns, KL in nats per response (by the update
        where the KL is in the loss of a single optimizer step).
        """
        out = {**environment_metrics(samples), **length_metrics(samples)}
        if logprobs is None or logprobs.reference is None or not any(sample.in_loss for sample in samples):
            return out
        if self.uses_old_logprobs or self.config.policy_gradient.kl_in_reward:
            out["objective/kl"], _ = kl_per_response(samples, logprobs)
        return out
