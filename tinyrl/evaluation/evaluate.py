"""Held-out evaluation: rewards with intervals, pass@k, majority@k, KL, entropy; sampled, and greedy beside it.

Every evaluation of a run and all sides of a comparison use the same uniforms, so differences are paired.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tinyrl.evaluation.statistics import grouped, interval, prompts_for_a_gain, share_interval, verdict_metrics
from tinyrl.generation.sample import (
    STOPPED_IN_THOUGHT,
    Sample,
    by_episode,
    conversations,
    environment_metrics,
    length_metrics,
)
from tinyrl.nan import mean, numbers
from tinyrl.rollout.records import completion_text, sample_lines

if TYPE_CHECKING:
    from tinyrl.generation.request import SampledRole
    from tinyrl.rewards.scorer import Scorer
    from tinyrl.rollout.collect import Collector
    from tinyrl.tasks.prompts import PreparedPrompt

EVAL_STEP = 1 << 40  # the step in the key of evaluation samples: no training step reaches it


@dataclass
class Evaluation:
    """Metrics of a policy or a reward model by name, an interval being [low, high]."""

    metrics: dict[str, Any]
    greedy: dict[str, Any] = field(default_factory=dict)  # metrics of the greedy completions; {} where none are sampled
    rewards: list[list[float]] = field(default_factory=list)  # of the samples of each prompt
    samples: list[dict[str, Any]] = field(default_factory=list)  # lines for samples.jsonl
    why_dropped: str = ""  # the first reason for which a sample has no reward
    prompts_for_a_gain: int | None = None  # where fewer than these were sampled, which can show none

    def flat(self) -> dict[str, Any]:
        """Return the metrics as metrics.jsonl names them."""
        greedy = {f"greedy/{name}": value for name, value in self.greedy.items()}
        return {f"eval/{name}": value for name, value in {**self.metrics, **greedy}.items()}

    def as_json(self) -> dict[str, Any]:
        """Return the metrics of a sampled policy, and why samples were dropped if any were."""
        why = {"why_dropped": self.why_dropped} if self.why_dropped else {}
        return {**self.metrics, "greedy": self.greedy, **why}

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts that were sampled."""
        return self.metrics["num_prompts"]

    @property
    def num_samples(self) -> int:
        """Return the number of samples per prompt."""
        return self.metrics["num_samples"]

    def dropped_warning(self) -> str:
        """Return a sentence about the samples without a reward, sampled and greedy; "" where all have one."""
        greedy = self.greedy.get("dropped", 0)
        sampled = self.metrics.get("dropped", 0)
        if not sampled + greedy:
            return ""
        samples = self.num_prompts * self.num_samples
        counts = f"{sampled} of {samples} samples and {greedy} of {self.num_prompts} greedy ones"
        return f"{counts} have no reward: {self.why_dropped or 'every score was None, so no reward applies'}"


def evaluate(
    collector: Collector, prompts: list[PreparedPrompt], *, samples: int = 1, role: SampledRole = "policy"
) -> Evaluation:
    """Sample and score completions of the prompts, and one greedy completion of each."""
    sampled = _evaluate(collector, prompts, samples, role=role)
    greedy = _evaluate(collector, prompts, 1, role=role, greedy=True)
    shared = ("num_prompts", "num_samples")
    collector.scorer.forget()
    return replace(
        sampled,
        prompts_for_a_gain=_prompts_for_a_gain(collector, sampled.rewards, greedy.rewards),
        greedy={name: value for name, value in greedy.metrics.items() if name not in shared},
        samples=sampled.samples + greedy.samples,
        why_dropped=sampled.why_dropped or greedy.why_dropped,
    )


def _prompts_for_a_gain(collector: Collector, *rewards: list[list[float]]) -> int | None:
    """Return `prompts_for_a_gain` of the rewards of sampled and greedy completions by prompt; None of shares."""
    if collector.scorer.right_or_wrong:
        return None
    every = [reward for by_prompt in rewards for group in by_prompt for reward in group]
    sampled = numbers([mean(group) for group in rewards[0]])
    return prompts_for_a_gain(every, prompts=len(sampled), best=collector.config.task.solved_reward)


def _evaluate(
    collector: Collector, prompts: list[PreparedPrompt], samples: int, *, role: SampledRole, greedy: bool = False
) -> Evaluation:
    """Measure `samples` completions of each prompt. Metrics are in the order in which they are shown."""
    scorer = collector.scorer
    answers = collector.collect(prompts, group_size=samples, step=EVAL_STEP, greedy=greedy, role=role)
    texts = [completion_text(answer, scorer) for answer in answers]
    by_prompt = grouped([answer.reward for answer in answers], samples)
    whole = conversations(answers)
    lengths = length_metrics(whole)
    metrics = reward_metrics(scorer, answers, by_prompt)
    metrics |= environment_metrics(whole)
    metrics |= {
        "mean_length": lengths["completion/mean_length"],
        "truncated": lengths["completion/truncated"],
        "dropped": sum(not answer.rewarded for answer in answers) if scorer.names else 0,
        "distinct": len(set(texts)) / max(1, len(texts)),
        "num_prompts": len(by_prompt),
        "num_samples": len(texts) // max(1, len(by_prompt)),
    }
    if STOPPED_IN_THOUGHT in lengths:
        metrics["stopped_in_thought"] = lengths[STOPPED_IN_THOUGHT]
    if not greedy:
        metrics |= _divergence(collector, whole, role)
    metrics |= verifier_metrics(collector, prompts, answers, samples)
    lines = sample_lines(
        answers,
        texts,
        kind="eval-greedy" if greedy else "eval",
        prompts={p.index: p for p in prompts},
        group_size=samples,
        names=scorer.names,
        by_turn=collector.config.credits_turns,
    )
    reasons = [answer.failures[0] for answer in answers if answer.failures and not answer.rewarded]
    return Evaluation(metrics, rewards=by_prompt, samples=lines, why_dropped=next(iter(reasons), ""))


def reward_metrics(scorer: Scorer, answers: list[Sample], by_prompt: list[list[float]]) -> dict[str, Any]:
    """Compute statistics of the rewards, `by_prompt`, and the mean of each reward function before weights."""
    valid = numbers([answer.reward for answer in answers])
    interval_of = share_interval if scorer.right_or_wrong else interval
    metrics: dict[str, Any] = {
        "reward_mean": mean(valid),
        "reward_median": statistics.median(valid) if valid else math.nan,
        "reward_std": statistics.stdev(valid) if len(valid) > 1 else 0.0,
        "reward_ci": interval_of([mean(group) for group in by_prompt]),
    }
    for i, name in enumerate(scorer.names):
        scores = [answer.scores[i] for answer in answers]
        if numbers(scores):
            metrics[f"reward/{name}"] = mean(scores)
    return metrics


def verifier_metrics(
    collector: Collector, prompts: list[PreparedPrompt], answers: list[Sample], samples: int
) -> dict[str, Any]:
    """Compute pass@k and the like by the task's verifier, whether or not it is the reward; {} of a task without one."""
    scorer = collector.scorer
    task = collector.task
    repeated = [prompt for prompt in prompts for _ in range(samples)]
    tokens = [answer.response for answer in answers]
    transcripts = [answer.played.transcript for answer in answers if answer.played is not None] or None
    if scorer.uses_verifier:
        verdicts = [answer.scores[0] for answer in answers]
    elif task.has_verifier:
        verdicts = scorer.verify(repeated, tokens, transcripts=transcripts, world=collector.world).values
    else:
        return {}
    final = task.answers(scorer.answers(repeated, tokens, transcripts), [prompt.row for prompt in repeated])
    return verdict_metrics(verdicts, final, samples, is_pass=task.is_pass, equal_by_verdict=task.equal_by_verdict)


def _divergence(collector: Collector, samples: list[Sample], role: SampledRole) -> dict[str, float]:
    """Compute the KL to the reference in nats per response (if there is one) and the mean entropy of a chosen token."""
    policy = collector.policy
    temperature = collector.config.generation.temperature

    def run(who: SampledRole) -> tuple[torch.Tensor, ...]:
        named = "reference" if who == "reference" else "policy"
        compute = partial(policy.logprobs, named, temperature=temperature)
        return collector.policy.map_samples(compute, samples, role=who, tokens="all")  # also samples without a reward

    logprobs, entropy = run(role)
    mean_entropy = {"entropy": float(entropy.sum() / sum(sample.num_actions for sample in samples))}
    if not policy.has_reference:
        return mean_entropy
    ref_logprobs, _ = run("reference")
    return {"kl": float(by_episode(samples, (logprobs - ref_logprobs).sum(1)).mean()), **mean_entropy}
