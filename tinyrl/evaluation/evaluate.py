"""Held-out evaluation: rewards with intervals, pass@k, majority@k, KL, entropy; sampled, and greedy beside it.

Every evaluation of a run and both sides of `--vs` use the same uniforms, so differences between policies are paired.
Best-of-n is a policy too: of every n samples the one that the reward ranks first.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from tinyrl.components import SamplingParts
from tinyrl.environments.environment import policy_text
from tinyrl.evaluation.statistics import mean, mean_interval, verdict_metrics
from tinyrl.rollout.buffer import FINISH_REASONS
from tinyrl.rollout.collector import forward_pass, sample_and_score
from tinyrl.tasks.prompts import PreparedPrompt

EVAL_STEP = 1 << 40  # the step in the key of evaluation samples: no training step reaches it
Role = Literal["policy", "reference", "base"]


@dataclass
class Evaluation:
    """metrics: what `tinyrl eval --json` prints; by_prompt: mean reward of each prompt, for paired differences;
    samples: lines for samples.jsonl; values: by judge (the reward, each reward of several, the verifier where it is
    not the reward), for each prompt what it gives each sample.
    """

    metrics: dict[str, Any]
    by_prompt: list[float]
    samples: list[dict[str, Any]]
    values: dict[str, list[list[float]]] = field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        """The metrics as `eval/...` keys of metrics.jsonl."""
        inner = self.metrics.get("greedy", {})
        own = {f"eval/{k}": v for k, v in self.metrics.items() if k != "greedy"}
        return {**own, **{f"eval/greedy/{k}": v for k, v in inner.items()}}


def evaluate(
    parts: SamplingParts,
    *,
    num_prompts: int,
    samples: int = 1,
    role: Role = "policy",
    prompts: list[PreparedPrompt] | None = None,
    best_of: int = 1,
) -> Evaluation:
    """Sample and judge completions of the first held-out prompts, each the best of `best_of`, and one greedy one."""
    prompts = (parts.eval_prompts if prompts is None else prompts)[:num_prompts]
    sampled = _Scored(parts, prompts, samples, role=role, greedy=False, best_of=best_of)
    greedy = _Scored(parts, prompts, 1, role=role, greedy=True)
    shared = ("num_prompts", "num_samples")
    inner = {name: value for name, value in greedy.metrics().items() if name not in shared}
    lines = sampled.lines() + greedy.lines()
    return Evaluation({**sampled.metrics(), "greedy": inner}, sampled.by_prompt(), lines, sampled.values())


class _Scored:
    """Completions of one kind (sampled or greedy) with their rewards and verdicts."""

    def __init__(
        self,
        parts: SamplingParts,
        prompts: list[PreparedPrompt],
        samples: int,
        *,
        role: Role,
        greedy: bool,
        best_of: int = 1,
    ) -> None:
        self.parts, self.prompts, self.samples, self.greedy = parts, prompts, samples, greedy
        self.best_of, self.names = best_of, parts.scorer.names
        self.rollout = sample_and_score(
            prompts,
            parts.engine,
            parts.scorer,
            group_size=samples * best_of,
            seed=parts.config.run.seed,
            step=EVAL_STEP,
            greedy=greedy,
            role=role,
            runner=parts.game,
            first_sample=samples if best_of > 1 else 0,  # other samples than those it may be compared with
            world=parts.world,
        )
        if best_of > 1:
            self.rollout = self.rollout.select(best_rows(self.rollout.rewards.tolist(), best_of))
        self.repeated = [p for p in prompts for _ in range(samples)]
        tokens = [self.rollout.response(row) for row in range(len(self.rollout))]
        transcripts = self.rollout.transcripts
        texts = None if transcripts is None else [policy_text(transcript) for transcript in transcripts]
        self.texts = texts or [parts.scorer.text(t) for t in tokens]
        self.rewards: list[float] = self.rollout.rewards.tolist()
        self.columns: list[list[float]] = self.rollout.scores.T.tolist()  # of each reward, before weights
        self.verdicts: list[float] | None = None
        if parts.scorer.uses_verifier:
            self.verdicts = self.columns[0]
        elif parts.task.verify is not None:
            scored = parts.scorer.verify(self.repeated, tokens, transcripts=transcripts, world=parts.world)
            self.verdicts = scored.scores
        # What is chosen among several is no sample of the policy: its log-probabilities give neither KL nor entropy.
        self.kl, self.entropy = self._passes(role) if not greedy and best_of == 1 else (None, None)

    def _passes(self, role: Role) -> tuple[float | None, float]:
        """KL to the reference in nats per response (None without a reference), and mean entropy of a chosen token."""
        parts, roles = self.parts, self.parts.roles
        rollout = replace(self.rollout, kept=torch.ones_like(self.rollout.kept))  # whatever its reward, it was sampled
        temperature = parts.config.generation.temperature

        def run(who: Role):
            named = "reference" if who == "reference" else "policy"
            return forward_pass(
                rollout,
                roles,
                role=who,
                micro_batches=parts.micro_batches,
                autocast=parts.accelerator.autocast,  # pyright: ignore[reportArgumentType]
                compute=lambda batch: roles.logprobs(named, batch, temperature=temperature),
                world=parts.world,
            )

        logprobs, entropy = run(role)
        mean_entropy = float(entropy.sum() / rollout.response_mask.sum())
        if not roles.has_reference:
            return None, mean_entropy
        ref_logprobs, _ = run("reference")
        return float((logprobs - ref_logprobs).sum(1).mean()), mean_entropy

    def by_prompt(self) -> list[float]:
        return [mean([r for r in group if not math.isnan(r)]) for group in self._grouped(self.rewards)]

    def _grouped(self, values: list[float]) -> list[list[float]]:
        return [values[i : i + self.samples] for i in range(0, len(values), self.samples)]

    def values(self) -> dict[str, list[list[float]]]:
        """What each judge gives each sample, by prompt; nothing of one that applies to none."""
        judges = {"reward": self.rewards}
        if len(self.names) > 1:
            judges |= {f"reward/{name}": column for name, column in zip(self.names, self.columns, strict=True)}
        if self.verdicts is not None and not self.parts.scorer.uses_verifier:
            judges["verifier"] = self.verdicts
        return {judge: self._grouped(column) for judge, column in judges.items() if not all(map(math.isnan, column))}

    def metrics(self) -> dict[str, Any]:
        valid = [r for r in self.rewards if not math.isnan(r)]
        out: dict[str, Any] = {
            "reward_mean": mean(valid),
            "reward_median": statistics.median(valid) if valid else math.nan,
            "reward_std": statistics.stdev(valid) if len(valid) > 1 else 0.0,
            "reward_ci": mean_interval(self.by_prompt()),
        }
        # The mean of each reward before weights, over the completions it applies to.
        applying = zip(self.names, ([v for v in column if not math.isnan(v)] for column in self.columns), strict=True)
        out |= {f"reward/{name}": mean(values) for name, values in applying if values}
        if self.verdicts is not None:
            task = self.parts.task
            answers = [task.answer(text) for text in self.texts] if task.answer is not None else None
            out |= verdict_metrics(self.verdicts, answers, self.samples, is_pass=task.is_pass)
        if self.kl is not None:
            out["kl"] = self.kl
        if self.entropy is not None:
            out["entropy"] = self.entropy
        if self.best_of > 1:
            out |= {"best_of": self.best_of, "kl_bound": best_of_kl(self.best_of)}
        return {
            **out,
            **self.rollout.environment_metrics(),
            "mean_length": mean(self.rollout.chosen_tokens.tolist()),
            "truncated": mean(self.rollout.truncated.tolist()),
            "distinct": len(set(self.texts)) / max(1, len(self.texts)),
            "num_prompts": len(self.prompts),
            "num_samples": self.samples,
        }

    def lines(self) -> list[dict[str, Any]]:
        scores, reasons = self.rollout.scores.tolist(), self.rollout.finish_reasons.tolist()
        return [
            {
                "kind": "eval-greedy" if self.greedy else "eval",
                "prompt_index": p.index,
                "sample": i % self.samples,
                "prompt": p.text,
                "completion": text,
                **self.rollout.episode_of(i),
                "rewards": dict(zip(self.names, scores[i], strict=True)),
                "reward": self.rewards[i],
                "advantage": None,
                "finish_reason": FINISH_REASONS[reasons[i]],
            }
            for i, (p, text) in enumerate(zip(self.repeated, self.texts, strict=True))
        ]


def best_rows(rewards: list[float], best_of: int) -> list[int]:
    """Of every `best_of` samples the row of the first with the highest reward; NaN is below every number."""
    starts = range(0, len(rewards), best_of)
    rank = [-math.inf if math.isnan(reward) else reward for reward in rewards]
    return [max(range(start, start + best_of), key=rank.__getitem__) for start in starts]


def best_of_kl(n: int) -> float:
    """log n - (n - 1) / n: the KL of best-of-n to the policy that is sampled from is at most that, in nats.

    Beirami et al. (2401.01879); it is nearly reached where no completion is likely and none ties with another.
    """
    return math.log(n) - (n - 1) / n
