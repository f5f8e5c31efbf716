"""Sampling and scoring of a rollout, what becomes of truncated responses, and its lines in the run's records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from tinyrl.algorithms.advantages import token_rewards
from tinyrl.config.sections import RewardConfig
from tinyrl.data.messages import policy_text
from tinyrl.environments.environment import Episode
from tinyrl.generation.agents import AgentRunner
from tinyrl.generation.engine import Completion, Request, SampledRole, SampleOptions
from tinyrl.generation.turns import play
from tinyrl.rewards.scorer import Scorer
from tinyrl.rollout.components import SamplingParts
from tinyrl.rollout.sample import Sample, loss_mask, num_episodes, rewards_of, turn_rewards
from tinyrl.tasks.prompts import PreparedPrompt

TOKEN_BY_TOKEN = 8  # completions of an evaluation step in tokens.jsonl
CHARACTER_TOKENS = 8  # no character is made of more


def sample_and_score(
    prompts: list[PreparedPrompt],
    parts: SamplingParts,
    *,
    group_size: int,
    step: int,
    greedy: bool = False,
    role: SampledRole = "policy",
) -> list[Sample]:
    """Sample `group_size` responses for each prompt and score them: the first step of training and of evaluation.

    Where something answers in between, a response is an episode of turns, or what an agent asked for. A prompt that is
    in the batch twice gets further samples, not the same ones again. Samples without a reward are not in the loss: it
    failed, or none applies. Each process samples some of the prompts, and all of them get all samples.
    """
    options: SampleOptions = {"seed": parts.config.run.seed, "step": step, "greedy": greedy, "role": role}
    seen: dict[int, int] = {}
    requests = []
    for prompt in prompts:
        first = seen.get(prompt.index, 0)
        seen[prompt.index] = first + group_size
        requests.append(Request(prompt.tokens, prompt_row=prompt.index, first_sample=first))
    repeated = [prompt for prompt in prompts for _ in range(group_size)]
    texts, others = [prompt.tokens for prompt in repeated], []
    if isinstance(parts.runner, AgentRunner):  # each agent writes its own prompt
        played = parts.runner.play(prompts, requests, group_size, engine=parts.engine, options=options)
        completions, texts, episodes, others = played
    else:
        completions, episodes = _sampled(prompts, requests, group_size, parts, options)
    samples = [
        Sample.of(tokens, completion, row=prompt.index, played=episodes[i] if episodes else None)
        for i, (tokens, completion, prompt) in enumerate(zip(texts, completions, repeated, strict=True))
    ]
    for other in others:
        first = samples[other.episode]
        first.further.append(Sample.of(other.prompt, other.completion, row=first.row))
    tokens = [completion.tokens for completion in completions]
    found = parts.scorer(repeated, tokens, episodes=episodes, group_size=group_size, world=parts.world)
    for i, sample in enumerate(samples):
        sample.scores, sample.reward = found.scores[i].tolist(), float(found.rewards[i])
        sample.episode, sample.in_loss = i, sample.rewarded
        sample.comment = found.whys[i] if found.whys else ""
    for failure in found.failures:
        samples[failure.row].failures.append(failure.reason)
    return samples


def _sampled(
    prompts: list[PreparedPrompt],
    requests: list[Request],
    group_size: int,
    parts: SamplingParts,
    options: SampleOptions,
) -> tuple[list[Completion], list[Episode] | None]:
    runner, engine, world = parts.runner, parts.engine, parts.world
    assert not isinstance(runner, AgentRunner)
    own, episodes = world.own(range(len(requests))), None
    prompts, requests = [prompts[i] for i in own], [requests[i] for i in own]
    if runner is None:
        completions = [completion for group in engine.sample(requests, group_size, **options) for completion in group]
    elif own:
        completions, episodes = play(prompts, requests, group_size, engine=engine, runner=runner, **options)
    else:
        completions, episodes = [], []
    if world.size == 1:
        return completions, episodes

    def gathered(own: list[Any], kind: Callable[..., Any]) -> list[Any]:
        """Exchange whole groups, so that they are in order."""
        groups = [[asdict(one) for one in own[i : i + group_size]] for i in range(0, len(own), group_size)]
        return [kind(**fields) for group in world.merge(groups) for fields in group]

    return gathered(completions, Completion), None if episodes is None else gathered(episodes, Episode)


def apply_length_rules(samples: list[Sample], reward: RewardConfig, *, max_new_tokens: int) -> None:
    """Penalise truncated responses, or leave them out of the loss; they still count in their group's mean and std. An
    episode is penalised once, if any of its conversations was cut off, and by the tokens of all of them.

    Soft overlong punishment (DAPO, 2503.14476, Eq. 13): its reward is 0 up to max - buffer tokens, then falls to -1 at
    max.
    """
    episodes = [[sample, *sample.further] for sample in samples]
    truncated = torch.tensor([any(sample.truncated for sample in episode) for episode in episodes])
    penalty = torch.where(truncated, float(reward.truncated == "penalize"), 0.0)
    if buffer := reward.overlong_tokens:
        num_actions = torch.tensor([sum(sample.num_actions for sample in episode) for episode in episodes])
        penalty = penalty + ((num_actions - (max_new_tokens - buffer)) / buffer).clamp(0.0, 1.0)
    for sample, rewarded in zip(samples, (rewards_of(samples) - penalty).tolist(), strict=True):
        sample.reward = rewarded
        if reward.truncated == "mask":
            sample.in_loss = sample.in_loss and not sample.truncated


# ---- lines of samples.jsonl ----


def completion_text(sample: Sample, scorer: Scorer) -> str:
    """What the policy wrote."""
    return scorer.text(sample.response) if sample.played is None else policy_text(sample.played.transcript)


def sample_key(sample: Sample, *, prompts: Mapping[int, str], group_size: int) -> dict[str, Any]:
    """The prompt of a sample and its number in the group; prompts: their texts, by index."""
    return {"prompt_index": sample.row, "sample": sample.episode % group_size, "prompt": prompts[sample.row]}


def sample_lines(
    samples: Sequence[Sample],
    texts: list[str],
    *,
    kind: str,
    prompts: Mapping[int, str],
    group_size: int,
    names: list[str],
    advantages: Tensor | None = None,
) -> list[dict[str, Any]]:
    """Lines of samples.jsonl, without their step, of the first samples: those whose texts are given.

    prompts: their texts, by index; advantages (B,).
    """
    return [
        {
            "kind": kind,
            **sample_key(sample, prompts=prompts, group_size=group_size),
            "completion": text,
            **({} if sample.played is None else {"episode": sample.played.transcript}),
            "rewards": dict(zip(names, sample.scores, strict=True)),
            "reward": sample.reward,
            "advantage": None if advantages is None else float(advantages[row]),
            "finish_reason": sample.finish,
        }
        for row, (sample, text) in enumerate(zip(samples, texts, strict=False))
    ]


# ---- lines of tokens.jsonl: completions token by token, as the update saw them ----


def shown_samples(samples: list[Sample], *, group_size: int) -> list[Sample]:
    """Those shown token by token: of each prompt those with the highest and lowest reward, then others in the loss."""
    first: dict[int, Sample] = {}
    for start in range(0, num_episodes(samples), group_size):
        group = [sample for sample in samples[start : start + group_size] if sample.in_loss]
        if group:
            ends = max(group, key=lambda sample: sample.reward), min(group, key=lambda sample: sample.reward)
            first |= {id(sample): sample for sample in ends}
    others = [sample for sample in samples if sample.in_loss and id(sample) not in first]
    return [*first.values(), *others][:TOKEN_BY_TOKEN]


def token_lines(
    samples: list[Sample],
    *,
    new_logprobs: Tensor,
    rewards: Tensor | None,
    tokenizer: Any,
    prompts: dict[int, str],
    group_size: int,
) -> Iterator[dict[str, Any]]:
    """Lines of tokens.jsonl: each token with its advantage in the loss, its log-probability before the update, after it
    and under the reference, its value, and the reward that stands on it. Tokens that were only read have none of these.

    new_logprobs (B, T); rewards (B, T) of tokens, None: the score is on the last one.
    """
    if rewards is None:
        rewards = token_rewards_of(samples, torch.zeros(new_logprobs.shape), kl_coef=0.0)
    for row, sample in enumerate(samples):
        assert sample.advantage is not None
        tokens = sample.response
        kinds = {
            "advantage": sample.advantage.expand(len(tokens)),
            "old": torch.tensor(sample.logprobs) if sample.old is None else sample.old,
            "ref": sample.ref,
            "value": sample.values,
            "teacher": sample.teacher,
            "reward": rewards[row],
            "new": new_logprobs[row],
        }
        columns = {name: None if x is None else x.tolist() for name, x in kinds.items()}
        yield {
            "kind": "train",
            **sample_key(sample, prompts=prompts, group_size=group_size),
            "reward": sample.reward,
            "tokens": [
                {"piece": piece, "chosen": sample.mask[t]}
                | {name: round(column[t], 3) if column and sample.mask[t] else None for name, column in columns.items()}
                for t, piece in enumerate(pieces(tokenizer, tokens, before=sample.prompt[-1:]))
            ],
        }


def token_rewards_of(samples: Sequence[Sample], kl: Tensor, *, kl_coef: float, scores: Tensor | None = None) -> Tensor:
    """(B, T): the score (None: the reward) on the last token, the environment's rewards on each turn's last in its
    place where there are some, less kl_coef * kl.
    """
    mask, turns = loss_mask(samples), turn_rewards(samples)
    if scores is not None:
        return token_rewards(torch.nan_to_num(scores), kl, mask, kl_coef=kl_coef)
    rewards = rewards_of(samples)
    outcome = torch.nan_to_num(rewards if turns is None else rewards - turns.sum(1))
    shaped = token_rewards(outcome, kl, mask, kl_coef=kl_coef)
    return shaped if turns is None else shaped + torch.where(mask, turns, 0.0)


def pieces(tokenizer: Any, tokens: list[int], *, before: list[int]) -> list[str]:
    """The text each token adds behind `before`; a character of several tokens is the last one's."""
    out: list[str] = []
    ids, known, read = [*before, *tokens], 0, len(before)

    def text(start: int, end: int) -> str:
        return str(tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False))

    for end in range(len(before) + 1, len(ids) + 1):
        now = text(known, end)
        if now.endswith("\ufffd") and end - read < CHARACTER_TOKENS and end < len(ids):
            out.append("")
            continue
        out.append(now[len(text(known, read)) :])
        known, read = read, end
    return out
