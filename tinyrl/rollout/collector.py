"""Sampling and scoring of a rollout, what becomes of truncated responses, and its lines in the run's records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from tinyrl.algorithms.reward_shaping import token_rewards
from tinyrl.config.sections import RewardConfig, RunConfig
from tinyrl.data.messages import policy_text
from tinyrl.environments.environment import Episode
from tinyrl.generation.agents import AgentRunner
from tinyrl.generation.engine import Completion, Request, SampledRole, SampleOptions
from tinyrl.generation.turns import play
from tinyrl.rewards.scorer import Scorer
from tinyrl.rollout.buffer import FINISH_REASONS, Rollout, new_rollout, sampled_fields
from tinyrl.rollout.components import SamplingParts
from tinyrl.tasks.prompts import PreparedPrompt

TOKEN_BY_TOKEN = 8  # completions of an evaluation step in tokens.jsonl
MOST_TOKEN_BYTES = 20_000_000  # of tokens.jsonl
CHARACTER_TOKENS = 8  # no character is made of more


def sample_and_score(
    prompts: list[PreparedPrompt],
    parts: SamplingParts,
    *,
    group_size: int,
    step: int,
    greedy: bool = False,
    role: SampledRole = "policy",
) -> Rollout:
    """Sample `group_size` responses for each prompt and score them: the first step of training and of evaluation.

    Where something answers in between, a response is an episode of turns, or what an agent asked for. A prompt that is
    in the batch twice gets further samples, not the same ones again. Rows without a reward are not kept: it failed, or
    none applies. Each process samples some of the prompts, and all of them get the whole rollout.
    """
    options: SampleOptions = {"seed": parts.config.run.seed, "step": step, "greedy": greedy, "role": role}
    seen: dict[int, int] = {}
    requests = []
    for prompt in prompts:
        first = seen.get(prompt.index, 0)
        seen[prompt.index] = first + group_size
        requests.append(Request(prompt.tokens, prompt_row=prompt.index, first_sample=first))
    if isinstance(parts.runner, AgentRunner):
        played = parts.runner.play(prompts, requests, group_size, engine=parts.engine, options=options)
        completions, prompt_tokens, episodes, others = played
        rollout = _as_tensors(prompts, completions, group_size, episodes)
        rows = rollout.prompt_rows[rollout.prompt_index]
        rollout = replace(  # each agent writes its own prompt
            rollout, prompt_tokens=prompt_tokens, prompt_rows=rows, prompt_index=torch.arange(len(rows)), others=others
        )
    else:
        completions, episodes = _sampled(prompts, requests, group_size, parts, options)
        rollout = _as_tensors(prompts, completions, group_size, episodes)
    repeated = [p for p in prompts for _ in range(group_size)]
    tokens = [c.tokens for c in completions]
    sheet = parts.scorer(repeated, tokens, episodes=episodes, group_size=group_size, world=parts.world)
    rollout.scores, rollout.rewards, rollout.failures = sheet.scores, sheet.rewards, sheet.failures
    rollout.whys = sheet.whys
    rollout.kept = ~rollout.rewards.isnan()
    return rollout


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
    starts = range(0, len(completions), group_size)
    groups = world.merge([[asdict(c) for c in completions[i : i + group_size]] for i in starts])
    merged = [Completion(**fields) for group in groups for fields in group]
    if episodes is None:
        return merged, None
    merged_episodes = world.merge([[asdict(e) for e in episodes[i : i + group_size]] for i in starts])
    return merged, [Episode(**fields) for group in merged_episodes for fields in group]


def apply_length_rules(rollout: Rollout, reward: RewardConfig, *, max_new_tokens: int) -> None:
    """Penalise truncated responses, or leave them out of the loss; they still count in their group's mean and std. An
    episode is penalised once, if any of its conversations was cut off, and by the tokens of all of them.

    Soft overlong punishment (DAPO, 2503.14476, Eq. 13): its reward is 0 up to max - buffer tokens, then falls to -1 at
    max.
    """
    truncated, num_actions = rollout.truncated, rollout.num_actions
    for other in rollout.others:
        completion = other.completion
        truncated[other.episode] |= completion.finish_reason == "length"
        num_actions[other.episode] += sum(completion.action_mask or [True] * len(completion.tokens))
    penalty = torch.where(truncated, float(reward.truncated == "penalize"), 0.0)
    if buffer := reward.overlong_tokens:
        penalty = penalty + ((num_actions - (max_new_tokens - buffer)) / buffer).clamp(0.0, 1.0)
    rollout.rewards = rollout.rewards - penalty
    if reward.truncated == "mask":
        rollout.kept = rollout.kept & ~rollout.truncated


def _as_tensors(
    prompts: list[PreparedPrompt], completions: list[Completion], group_size: int, episodes: list[Episode] | None = None
) -> Rollout:
    tokens, rows = [p.tokens for p in prompts], [p.index for p in prompts]
    rollout = new_rollout(tokens, rows, group_size=group_size, **sampled_fields(completions))
    if episodes is not None:
        rollout.turn_rewards = torch.zeros_like(rollout.sampling_logprobs)
        for row, episode in enumerate(episodes):
            rollout.turn_rewards[row, episode.turn_ends] = torch.tensor(episode.turn_rewards)
        rollout.turns = torch.tensor([len(episode.turn_ends) for episode in episodes])
        rollout.invalid_turns = torch.tensor([episode.invalid for episode in episodes])
        rollout.transcripts = [episode.transcript for episode in episodes]
    return rollout


# ---- lines of samples.jsonl ----


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


# ---- lines of tokens.jsonl: completions token by token, as the update saw them ----


def shown_rows(rollout: Rollout, *, group_size: int) -> list[int]:
    """Rows shown token by token: of each prompt those with the highest and lowest reward, then others that count."""
    rewards, kept = rollout.rewards.tolist(), rollout.kept.tolist()
    first: list[int] = []
    for start in range(0, rollout.num_episodes, group_size):
        group = [row for row in range(start, start + group_size) if kept[row]]
        if group:
            ends = max(group, key=rewards.__getitem__), min(group, key=rewards.__getitem__)
            first += dict.fromkeys(ends)
    taken = set(first)
    others = [row for row in range(len(rollout)) if kept[row] and row not in taken]
    return [*first, *others][:TOKEN_BY_TOKEN]


def token_lines(
    rollout: Rollout,
    rows: list[int],
    *,
    new_logprobs: Tensor,
    rewards: Tensor | None,
    tokenizer: Any,
    prompts: dict[int, str],
    group_size: int,
) -> Iterator[dict[str, Any]]:
    """Lines of tokens.jsonl: each token with its advantage in the loss, its log-probability before the update, after it
    and under the reference, its value, and the reward that stands on it. Tokens that were only read have none of these.

    new_logprobs (len(rows), T); rewards (B, T) of tokens, None: the score is on the last one.
    """
    assert rollout.advantages is not None
    if rewards is None:
        no_kl = torch.zeros_like(rollout.sampling_logprobs)
        scores = torch.nan_to_num(rollout.outcome_rewards)
        rewards = rollout.with_turn_rewards(token_rewards(scores, no_kl, rollout.loss_mask, kl_coef=0.0))
    old = rollout.sampling_logprobs if rollout.old_logprobs is None else rollout.old_logprobs
    advantages = rollout.advantages
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1).expand_as(old)
    kinds = {"advantage": advantages, "old": old, "ref": rollout.ref_logprobs, "value": rollout.values}
    kinds |= {"teacher": rollout.teacher_logprobs, "reward": rewards}
    for place, row in enumerate(rows):
        tokens = rollout.response(row)
        columns = {name: None if x is None else x[row].tolist() for name, x in kinds.items()}
        columns["new"] = new_logprobs[place].tolist()
        chosen = rollout.response_mask[row].tolist()
        before = rollout.prompt_tokens[int(rollout.prompt_index[row])][-1:]
        yield {
            "kind": "train",
            **place_of(rollout, row, prompts=prompts, group_size=group_size),
            "reward": float(rollout.rewards[row]),
            "tokens": [
                {"piece": piece, "chosen": chosen[t]}
                | {name: round(column[t], 3) if column and chosen[t] else None for name, column in columns.items()}
                for t, piece in enumerate(pieces(tokenizer, tokens, before=before))
            ],
        }


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


def allowed_bytes(run: RunConfig, step: int) -> float:
    """Largest size of tokens.jsonl after an evaluation at `step`: its share of the whole run's."""
    every = run.eval_every or run.num_steps
    ahead = max(0, run.num_steps - step)
    done = -(-step // every)
    return MOST_TOKEN_BYTES * done / (done + -(-ahead // every))
