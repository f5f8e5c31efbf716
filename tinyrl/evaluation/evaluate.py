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

from tinyrl.environments.environment import policy_text
from tinyrl.evaluation.intervals import mean, mean_interval
from tinyrl.evaluation.verdicts import verdict_metrics
from tinyrl.parts import SamplingParts
from tinyrl.rollout import FINISH_REASONS
from tinyrl.sampling import forward_pass, sample_and_score
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
    """Sample `samples` completions for the first `num_prompts` held-out prompts, each the best of `best_of` by the
    reward, and one greedily, and judge both.
    """
    chosen = (parts.eval_prompts if prompts is None else prompts)[:num_prompts]
    sampled = _Judged(parts, chosen, samples, role=role, greedy=False, best_of=best_of)
    greedy = _Judged(parts, chosen, 1, role=role, greedy=True)
    metrics = {
        **sampled.metrics(),
        "greedy": {k: v for k, v in greedy.metrics().items() if k not in ("num_prompts", "num_samples")},
    }
    return Evaluation(metrics, sampled.by_prompt(), sampled.lines() + greedy.lines(), sampled.values())


class _Judged:
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
        self.best_of = best_of
        self.rollout = sample_and_score(
            prompts,
            parts.engine,
            parts.scorer,
            group_size=samples * best_of,
            seed=parts.config.run.seed,
            step=EVAL_STEP,
            greedy=greedy,
            role=role,
            game=parts.game,
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
        self.verdicts = self._verdicts(tokens)
        # What is chosen among several is no sample of the policy: its log-probabilities give neither KL nor entropy.
        self.kl, self.entropy = self._passes(role) if not greedy and best_of == 1 else (None, None)

    def _verdicts(self, tokens: list[list[int]]) -> list[float] | None:
        if self.parts.task.verify is None:
            return None
        if self.parts.scorer.uses_verifier:
            return self.rollout.scores[:, 0].tolist()
        parts, transcripts = self.parts, self.rollout.transcripts
        return parts.scorer.verify(self.repeated, tokens, transcripts=transcripts, world=parts.world).scores

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
        """One value a sample, as a list for each prompt."""
        return [values[i : i + self.samples] for i in range(0, len(values), self.samples)]

    def values(self) -> dict[str, list[list[float]]]:
        """What each judge gives each sample, by prompt; nothing of one that applies to none."""
        names = self.parts.scorer.names
        judges = {"reward": self.rewards}
        if len(names) > 1:
            judges |= {f"reward/{n}": column for n, column in zip(names, self.rollout.scores.T.tolist(), strict=True)}
        if self.verdicts is not None and not self.parts.scorer.uses_verifier:
            judges["verifier"] = self.verdicts
        return {judge: self._grouped(column) for judge, column in judges.items() if not all(map(math.isnan, column))}

    def metrics(self) -> dict[str, Any]:
        """What `evaluate` says of completions of one kind."""
        valid = [r for r in self.rewards if not math.isnan(r)]
        out: dict[str, Any] = {
            "reward_mean": mean(valid),
            "reward_median": statistics.median(valid) if valid else math.nan,
            "reward_std": statistics.stdev(valid) if len(valid) > 1 else 0.0,
            "reward_ci": mean_interval(self.by_prompt()),
        }
        out |= self._each_reward()
        if self.verdicts is not None:
            out |= verdict_metrics(self.verdicts, self._answers(), self.samples, is_pass=self.parts.task.is_pass)
        if self.kl is not None:
            out["kl"] = self.kl
        if self.entropy is not None:
            out["entropy"] = self.entropy
        if self.best_of > 1:
            out |= {"best_of": self.best_of, "kl_bound": best_of_kl(self.best_of)}
        return (
            out
            | self.rollout.environment_metrics()
            | {
                "mean_length": mean(self.rollout.chosen_tokens.tolist()),
                "truncated": mean(self.rollout.truncated.tolist()),
                "distinct": len(set(self.texts)) / max(1, len(self.texts)),
                "num_prompts": len(self.prompts),
                "num_samples": self.samples,
            }
        )

    def _each_reward(self) -> dict[str, float]:
        """The mean of each reward before weights, over the completions it applies to; absent where there are none."""
        columns = zip(self.parts.scorer.names, self.rollout.scores.T.tolist(), strict=True)
        applying = {f"reward/{name}": [v for v in column if not math.isnan(v)] for name, column in columns}
        return {name: mean(values) for name, values in applying.items() if values}

    def _answers(self) -> list[Any] | None:
        answer = self.parts.task.answer
        return [answer(text) for text in self.texts] if answer is not None else None

    def lines(self) -> list[dict[str, Any]]:
        """Lines for samples.jsonl."""
        names, reasons = self.parts.scorer.names, self.rollout.finish_reasons.tolist()
        return [
            {
                "kind": "eval-greedy" if self.greedy else "eval",
                "prompt_index": p.index,
                "sample": i % self.samples,
                "prompt": p.text,
                "completion": text,
                **self.rollout.episode_of(i),
                "rewards": dict(zip(names, scores, strict=True)),
                "reward": reward,
                "advantage": None,
                "finish_reason": FINISH_REASONS[reason],
            }
            for i, (p, text, scores, reward, reason) in enumerate(
                zip(self.repeated, self.texts, self.rollout.scores.tolist(), self.rewards, reasons, strict=True)
            )
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
