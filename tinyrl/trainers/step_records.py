"""Completions of a step token by token, as the update saw them: lines of tokens.jsonl."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tinyrl.algorithms.reward_shaping import token_rewards
from tinyrl.config.sections import RunConfig
from tinyrl.rollout.buffer import Rollout
from tinyrl.rollout.collector import place_of
from tinyrl.text import hidden

TOKEN_BY_TOKEN = 8  # completions of an evaluation step in tokens.jsonl
MOST_TOKEN_BYTES = 20_000_000  # of tokens.jsonl
CHARACTER_TOKENS = 8  # no character is made of more


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
        if hidden(whole := str(tokenizer.decode(tokens))) != whole:
            continue  # the value of a secret variable, which no single piece would show
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
