"""Sampling and scoring of a rollout, what becomes of truncated responses, and passes over it without gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tinyrl.config.sections import RewardConfig
from tinyrl.data.messages import policy_text
from tinyrl.environments.environment import Episode
from tinyrl.generation.agents import AgentRunner
from tinyrl.generation.engine import Completion, Request, SampleOptions, SamplingEngine
from tinyrl.generation.turns import EpisodeRunner, play
from tinyrl.models.batches import SequenceBatch
from tinyrl.models.device import to_device
from tinyrl.models.distributed import ALONE, World
from tinyrl.models.micro_batches import MicroBatches, Work, own_rows
from tinyrl.models.roles import Role, Roles
from tinyrl.rewards.scorer import Scorer
from tinyrl.rollout.buffer import FINISH_REASONS, Rollout, sampled_fields
from tinyrl.rollout.thinking import sample_within_budget
from tinyrl.tasks.prompts import PreparedPrompt


def sample_and_score(
    prompts: list[PreparedPrompt],
    engine: SamplingEngine,
    scorer: Scorer,
    *,
    group_size: int,
    runner: EpisodeRunner | AgentRunner | None = None,
    first_sample: int = 0,
    thinking: tuple[int, int] | None = None,
    world: World = ALONE,
    **options: Unpack[SampleOptions],
) -> Rollout:
    """Sample `group_size` responses for each prompt and score them: the first step of training and of evaluation.

    With a `runner` a response is an episode of turns, or what an agent asked for. A prompt that is in the batch twice
    gets further samples, not the same ones again; `first_sample` is the number of its first, by which it is drawn.
    `thinking`: the most tokens of thinking, and of all, where there is a budget (thinking.py). Rows without a reward
    are not kept: it failed, or none applies. The processes of `world` sample some of the prompts each, and all of them
    get the whole rollout.
    """
    seen: dict[int, int] = {}
    requests = []
    for prompt in prompts:
        first = seen.get(prompt.index, first_sample)
        seen[prompt.index] = first + group_size
        requests.append(Request(prompt.tokens, prompt_row=prompt.index, first_sample=first))
    if isinstance(runner, AgentRunner):
        played = runner.play(prompts, requests, group_size, engine=engine, options=options)
        completions, prompt_tokens, episodes, others = played
        rollout = _as_tensors(prompts, completions, group_size, episodes)
        rows = rollout.prompt_rows[rollout.prompt_index]
        rollout = replace(  # each agent writes its own prompt
            rollout, prompt_tokens=prompt_tokens, prompt_rows=rows, prompt_index=torch.arange(len(rows)), others=others
        )
    else:
        completions, episodes = _sampled(
            prompts,
            requests,
            group_size,
            engine,
            runner=runner,
            tokenizer=scorer.tokenizer,
            thinking=thinking,
            options=options,
            world=world,
        )
        rollout = _as_tensors(prompts, completions, group_size, episodes)
    repeated = [p for p in prompts for _ in range(group_size)]
    sheet = scorer(repeated, [c.tokens for c in completions], episodes=episodes, world=world)
    rollout.scores, rollout.rewards, rollout.failures = sheet.scores, sheet.rewards, sheet.failures
    rollout.whys = sheet.whys
    rollout.kept = ~rollout.rewards.isnan()
    return rollout


def _sampled(
    prompts: list[PreparedPrompt],
    requests: list[Request],
    group_size: int,
    engine: SamplingEngine,
    *,
    runner: EpisodeRunner | None,
    tokenizer: PreTrainedTokenizerBase,
    thinking: tuple[int, int] | None,
    options: SampleOptions,
    world: World,
) -> tuple[list[Completion], list[Episode] | None]:
    own, episodes = world.own(range(len(requests))), None
    prompts, requests = [prompts[i] for i in own], [requests[i] for i in own]
    if runner is None and thinking is not None:
        budget, most = thinking
        completions = sample_within_budget(
            requests,
            group_size,
            engine=engine,
            tokenizer=tokenizer,
            opened=[prompt.opened for prompt in prompts],
            budget=budget,
            max_new_tokens=most,
            **options,
        )
    elif runner is None:
        completions = [completion for group in engine.sample(requests, group_size, **options) for completion in group]
    elif own:
        completions, episodes = play(prompts, requests, group_size, engine=engine, runner=runner, **options)
    else:
        completions, episodes = [], []
    if world.size == 1:
        return completions, episodes
    starts = range(0, len(completions), group_size)
    groups = world.merge([[asdict(c) for c in completions[i : i + group_size]] for i in starts])
    merged = [Completion(**fields) for group in groups for fields in group]
    if episodes is None:
        return merged, None
    played = world.merge([[asdict(e) for e in episodes[i : i + group_size]] for i in starts])
    return merged, [Episode(**fields) for group in played for fields in group]


def finalize_truncated(rollout: Rollout, reward: RewardConfig, *, max_new_tokens: int) -> None:
    """Penalise truncated responses, or leave them out of the loss; they still count in their group's mean and std.

    Soft overlong punishment (DAPO, 2503.14476, Eq. 13): its reward is 0 up to max - buffer tokens, then falls to -1 at
    max.
    """
    penalty = torch.where(rollout.truncated, reward.truncated_penalty if reward.truncated == "penalize" else 0.0, 0.0)
    if buffer := reward.overlong_tokens:
        penalty = penalty + ((rollout.chosen_tokens - (max_new_tokens - buffer)) / buffer).clamp(0.0, 1.0)
    rollout.rewards = rollout.rewards - penalty
    if reward.truncated == "mask":
        rollout.kept = rollout.kept & ~rollout.truncated


def written(rollout: Rollout, row: int, scorer: Scorer) -> str:
    """What the policy wrote."""
    if rollout.transcripts is not None:
        return policy_text(rollout.transcripts[row])
    return scorer.text(rollout.response(row))


def place_of(rollout: Rollout, row: int, *, prompts: Mapping[int, str], group_size: int) -> dict[str, Any]:
    """What a row is a sample of; prompts: their texts, by index."""
    index = int(rollout.prompt_rows[rollout.prompt_index[row]])
    of = row if rollout.parent is None else int(rollout.parent[row])
    return {"prompt_index": index, "sample": of % group_size, "prompt": prompts[index]}


def sample_lines(
    rollout: Rollout,
    texts: list[str],
    *,
    kind: str,
    prompts: Mapping[int, str],
    group_size: int,
    names: list[str],
    advantages: Tensor | None = None,
) -> list[dict[str, Any]]:
    """Lines of samples.jsonl, without their step, of the first rows of a rollout: those whose texts are given.

    prompts: their texts, by index; advantages (B,).
    """
    scores, rewards, reasons = (x.tolist() for x in (rollout.scores, rollout.rewards, rollout.finish_reasons))
    return [
        {
            "kind": kind,
            **place_of(rollout, row, prompts=prompts, group_size=group_size),
            "completion": text,
            **rollout.episode_of(row),
            "rewards": dict(zip(names, scores[row], strict=True)),
            "reward": rewards[row],
            "advantage": None if advantages is None else float(advantages[row]),
            "finish_reason": FINISH_REASONS[reasons[row]],
        }
        for row, text in enumerate(texts)
    ]


def _as_tensors(
    prompts: list[PreparedPrompt], completions: list[Completion], group_size: int, episodes: list[Episode] | None = None
) -> Rollout:
    rollout = Rollout(
        prompt_tokens=[p.tokens for p in prompts],
        prompt_rows=torch.tensor([p.index for p in prompts]),
        prompt_index=torch.arange(len(prompts)).repeat_interleave(group_size),
        **sampled_fields(completions),
        scores=torch.empty(len(completions), 0),
        rewards=torch.zeros(len(completions)),
        kept=torch.ones(len(completions), dtype=torch.bool),
    )
    if episodes is not None:
        rollout.turn_rewards = torch.zeros_like(rollout.sampling_logprobs)
        for row, episode in enumerate(episodes):
            rollout.turn_rewards[row, episode.turn_ends] = torch.tensor(episode.turn_rewards)
        rollout.turns = torch.tensor([len(episode.turn_ends) for episode in episodes])
        rollout.invalid_turns = torch.tensor([episode.invalid for episode in episodes])
        rollout.transcripts = [episode.transcript for episode in episodes]
    return rollout


def forward_pass(
    rollout: Rollout,
    roles: Roles,
    *,
    role: Role,
    compute: Callable[[SequenceBatch], tuple[Tensor, ...]],
    micro_batches: MicroBatches,
    autocast: Callable,
    world: World = ALONE,
) -> tuple[Tensor, ...]:
    """Run `compute` (batch -> tensors (b, T')) over the rollout without gradient; returns (B, T) tensors on the CPU.

    The processes of `world` compute some of the rows each.
    """
    outputs: list[Tensor] = []

    def run(rows: list[int]) -> None:
        batch = rollout.batch(rows, roles)
        results = compute(batch)
        if not outputs:
            outputs.extend(torch.zeros(rollout.response_tokens.shape, device=roles.device) for _ in results)
        where = to_device(torch.as_tensor(rows), roles.device)
        for output, result in zip(outputs, results, strict=True):
            output[where, : batch.num_columns] = result.float()

    with torch.no_grad(), roles.acting(role), autocast():
        sizes = rollout.sizes(roles)
        micro_batches.run(Work(sizes, run, own_rows(sizes, None, world)))
    shape, count = rollout.response_tokens.shape, max(world.gather(len(outputs)))
    outputs += [torch.zeros(shape, device=roles.device) for _ in range(count - len(outputs))]  # it had no rows
    world.sum(*outputs)
    return tuple(output.cpu() for output in outputs)
