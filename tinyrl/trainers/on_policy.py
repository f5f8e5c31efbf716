"""Rollout collection shared by GRPO and PPO: prompts, sampling, rescoring, the failure guard, metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tinyrl.config.method_sections import GrpoConfig, PpoConfig
from tinyrl.data.rows import batch_indices, keyed_order
from tinyrl.distributed import ALONE, World
from tinyrl.evaluation.evaluate import Evaluation, evaluate
from tinyrl.models.batches import SequenceBatch
from tinyrl.parts import SamplingParts
from tinyrl.rewards.functions import FailureGuard, describe_failure
from tinyrl.rollout import Rollout
from tinyrl.runs.signals import stop_held
from tinyrl.sampling import forward_pass, sample_and_score, settle_truncated
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.trainers.entropy_control import entropy_coef
from tinyrl.trainers.policy_loss import LossSettings
from tinyrl.trainers.solved_prompts import SolvedPrompts
from tinyrl.trainers.step_records import Tried, allowed_bytes, sample_lines, shown_rows, token_lines, written
from tinyrl.training.session import Session

EXACT_TO = 1e-5  # sampling log-probabilities this close to a training pass's are used as old_logprobs


class RolloutCollector:
    """Collects the rollouts of a run: draws prompts, samples, scores, and watches for failing rewards."""

    def __init__(self, session: Session, parts: SamplingParts, *, num_prompts: int, group_size: int) -> None:
        self.session, self.parts = session, parts
        self.num_prompts, self.group_size = num_prompts, group_size
        self._told: set[str] = set()
        self._texts = {prompt.index: prompt.text for prompt in parts.train_prompts}
        self.tried = Tried(parts.config.task.solved_reward)
        self.solved = SolvedPrompts(
            parts.config.task,
            parts.train_prompts,
            num_prompts=num_prompts,
            seed=parts.config.run.seed,
            record=session.state.controllers.solved,
        )

    def prompts(self, step: int) -> list[PreparedPrompt]:
        """The prompts of a step: a function of (seed, step), and under task.skip_solved of what was solved so far."""
        rows, seed = self.parts.train_prompts, self.parts.config.run.seed
        places = batch_indices(seed, step, num_prompts=self.num_prompts, num_rows=len(rows))
        return [rows[i] for i in self.solved.replace(places, step)]

    def fresh_prompts(self, step: int, refill_round: int, *, count: int, without: set[int]) -> list[PreparedPrompt]:
        """Prompts to top up a step's batch: a function of (seed, step, round) and of what was drawn before."""
        rows, skipped = self.parts.train_prompts, self.solved.skipped(step)
        order = keyed_order(f"refill {self.parts.config.run.seed} {step} {refill_round}", len(rows))
        return [rows[i] for i in order if rows[i].index not in without and i not in skipped][:count]

    def collect(self, prompts: list[PreparedPrompt], step: int) -> Rollout:
        """Sample and score a group for each prompt; failing rewards are counted, shown, and eventually stop the run."""
        self.session.display.phase("sampling")
        rollout = sample_and_score(
            prompts,
            self.parts.engine,
            self.parts.scorer,
            group_size=self.group_size,
            seed=self.parts.config.run.seed,
            step=step,
            game=self.parts.game,
            world=self.session.world,
        )
        settle_truncated(rollout, self.parts.truncation)
        self.solved.look(prompts, rollout)
        self.tried.look(prompts, rollout)
        self._watch(rollout, prompts, step)
        self.session.state.completions += len(rollout)
        self.session.state.tokens += int(rollout.response_mask.sum())
        return rollout

    def count_flat(self, *, flat: bool) -> int:
        """How many steps so far had nothing to learn from; the first is told."""
        controllers = self.session.state.controllers
        if flat and not controllers.flat_steps:
            self.session.display.note(
                "warning: in this step all responses to a prompt have the same reward, so there is nothing to learn "
                "from, while Adam's momentum still moves the weights; optim/flat_steps counts such steps"
            )
        controllers.flat_steps += flat
        return controllers.flat_steps

    def _watch(self, rollout: Rollout, prompts: list[PreparedPrompt], step: int) -> None:
        guard = FailureGuard(self.session.state.controllers.failing_batches)
        retried = self.parts.scorer.retried | (self.parts.game.environment.retried if self.parts.game else {})
        for name, why in retried.items():
            if name not in self._told:
                self._told.add(name)
                self.session.display.note(f"warning: `{name}` was tried row by row: on the whole batch it {why}")
        sentence = ""
        if rollout.failures:
            first = rollout.failures[0]
            sentence = describe_failure(prompts[first.row // self.group_size].prompt, first.reason)
            count = len({f.row for f in rollout.failures})
            self.session.display.note(
                f"warning: {count} of {len(rollout)} rewards failed and their rows are dropped "
                f"(they are in {self.session.run.failed_rewards}). {sentence}"
            )
            self._set_aside(rollout, prompts, step)
        rewarded = int((~rollout.rewards.isnan()).sum())
        guard.add(len(rollout), len({f.row for f in rollout.failures}), sentence, num_rewarded=rewarded)
        self.session.state.controllers.failing_batches = guard.bad_batches

    def _set_aside(self, rollout: Rollout, prompts: list[PreparedPrompt], step: int) -> None:
        """Append the rows whose reward failed to failed_rewards.jsonl, with the reason."""
        lines = []
        for failure in rollout.failures:
            prompt = prompts[failure.row // self.group_size]
            lines.append(
                {
                    "step": step + 1,
                    "prompt_index": prompt.index,
                    "sample": failure.row % self.group_size,
                    "prompt": prompt.text,
                    "completion": written(rollout, failure.row, self.parts),
                    **rollout.episode_of(failure.row),
                    "reason": failure.reason,
                }
            )
        self.session.run.append_failed_rewards(lines)

    def compute_logprobs(self, rollout: Rollout, *, reference: bool, several_steps: bool, scored: bool = False) -> None:
        """Fill in ref_logprobs where a KL needs them, old_logprobs where several optimizer steps use the rollout. With
        one step the training pass's own values, detached, are the old ones, so the ratio is exactly 1; a KL then takes
        the policy's from a pass like the reference's, as an engine that is not exact would add its own noise to it.

        `scored`: of every row with a reward, those that are left out of the loss among them.
        """
        read = replace(rollout, kept=~rollout.rewards.isnan()) if scored else rollout
        if reference:
            rollout.ref_logprobs = self._logprobs(read, "reference")
        if not several_steps:
            if reference and not self.samples_exactly:
                rollout.rescored_logprobs = self._logprobs(read, "policy")
            return
        controllers = self.session.state.controllers
        if controllers.exact_sampling is None:
            rescored = self._logprobs(read, "policy")
            gap = float(torch.where(rollout.loss_mask, rescored - rollout.sampling_logprobs, 0.0).abs().max())
            exact = controllers.exact_sampling = self.parts.engine.exact and gap < EXACT_TO
            rollout.old_logprobs = rollout.sampling_logprobs if exact else rescored
        else:
            exact = controllers.exact_sampling
            rollout.old_logprobs = rollout.sampling_logprobs if exact else self._logprobs(read, "policy")

    @property
    def samples_exactly(self) -> bool:
        """Whether the engine's log-probabilities are those of a training pass, up to rounding in float32."""
        return self.parts.engine.exact and self.parts.accelerator.mixed_precision == "no"

    def watch_sampling(self, metrics: dict[str, float]) -> None:
        """Measure anew, by a rescoring pass, whether sampling is exact when an update's pass says it is not."""
        if metrics.get("policy/sampling_gap", 0.0) > EXACT_TO and self.session.state.controllers.exact_sampling:
            self.session.state.controllers.exact_sampling = None

    def _logprobs(self, rollout: Rollout, role: Any, *, world: World | None = None) -> Tensor:
        roles, generation = self.parts.roles, self.parts.config.generation

        def compute(batch: SequenceBatch) -> tuple[Tensor, ...]:
            return roles.logprobs(role, batch, temperature=generation.temperature)[:1]

        self.session.display.phase(role)
        return self.forward(rollout, role=role, compute=compute, world=world)

    def forward(self, rollout: Rollout, *, role: Any, compute: Any, world: World | None = None) -> Tensor:
        """One (B, T) tensor from a pass over the rollout without gradient, by the processes of `world` (None: all)."""
        return forward_pass(
            rollout,
            self.parts.roles,
            role=role,
            compute=compute,
            micro_batches=self.parts.micro_batches,
            autocast=self.parts.accelerator.autocast,
            world=self.session.world if world is None else world,
        )[0]

    def loss_settings(self, section: GrpoConfig | PpoConfig, *, kl_coef: float) -> LossSettings:
        """The settings of the policy loss. A KL in the reward is not one in the loss: `kl_coef` is 0 there."""
        generation = self.parts.config.generation
        in_loss = section.kl_placement == "loss" and self.parts.roles.has_reference
        return LossSettings.of(
            section,
            temperature=generation.temperature,
            max_new_tokens=generation.max_new_tokens,
            kl_coef=kl_coef if in_loss else 0.0,
            entropy_coef=entropy_coef(section, self.session),
            weigh_mismatch=not self.samples_exactly,
        )

    def end_sampling(self, step: int) -> dict[str, float]:
        """Put on record which prompts of a step were solved; its metrics."""
        self.session.run.append_prompts(step + 1, self.tried.take())
        return self.solved.keep(step)

    def record(self, rollout: Rollout, advantages: Tensor, step: int, *, rewards: Tensor | None = None) -> None:
        """Append some of the rollout to samples.jsonl, with each row's mean advantage (before any whitening, so that it
        reads as a reward), and in a step that is evaluated to tokens.jsonl, with `rewards` (B, T) where tokens have
        them. No signal stops it: what comes before and after it in a step is not to be done twice. Rank 0 does it, and
        waits for nobody.
        """
        if not self.session.world.is_main:
            return
        run, settings = self.session.run, self.parts.config.run
        how: Any = {"parts": self.parts, "texts": self._texts, "group_size": self.group_size}
        if self.session.evaluates_after(step + 1) and (rows := shown_rows(rollout, group_size=self.group_size)):
            with stop_held(), self.session.timed("evaluation"):
                now = self._logprobs(rollout.select(rows), "policy", world=ALONE)
                lines = token_lines(rollout, rows, new_logprobs=now, rewards=rewards, **how)
                numbered = ({"step": step + 1, **line} for line in lines)
                run.append_tokens(numbered, most_bytes=allowed_bytes(settings, step + 1))
        samples = sample_lines(rollout, advantages, most=settings.keep_samples, **how)
        last = step + 1 >= settings.num_steps
        run.append_samples(
            [{"step": step + 1, **line} for line in samples],
            turn=0 if last else step + 1,
            most_bytes=settings.samples_mb * 1e6 / 2 / settings.num_steps,
        )

    def reward_metrics(self, rollout: Rollout) -> dict[str, float]:
        """Mean and spread of the rewards, the mean of each by name, rows without one."""
        valid = rollout.rewards[~rollout.rewards.isnan()]
        out = {
            "reward/mean": float(valid.mean()) if len(valid) else 0.0,
            "reward/std": float(valid.std()) if len(valid) > 1 else 0.0,
            "reward/dropped": float(rollout.rewards.isnan().sum()),
        }
        for name, column in zip(self.parts.scorer.names, rollout.scores.T, strict=True):
            applies = column[~column.isnan()]
            if len(applies):
                out[f"reward/{name}"] = float(applies.mean())
        return out

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """Metrics of a rollout besides its rewards: lengths, truncation, turns, KL in nats per response."""
        out = {
            **rollout.environment_metrics(),
            "completion/mean_length": float(rollout.chosen_tokens.float().mean()),
            "completion/truncated": float(rollout.truncated.float().mean()),
            "completion/tokens": float(rollout.response_mask.sum()),
        }
        if rollout.ref_logprobs is not None:
            out["objective/kl"] = rollout.kl_per_response()
        return out


def evaluate_heldout(parts: SamplingParts) -> Evaluation:
    """The evaluation during a run: run.eval_prompts held-out prompts, sampled once and greedily."""
    return evaluate(parts, num_prompts=parts.config.run.eval_prompts)
