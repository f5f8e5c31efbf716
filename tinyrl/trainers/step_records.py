"""What a step leaves in the records of its run: completions as text, some of them token by token, prompts solved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tinyrl.algorithms.masking import masked_mean
from tinyrl.algorithms.reward_shaping import token_rewards
from tinyrl.config.sections import RunConfig
from tinyrl.data.messages import policy_text
from tinyrl.data.rows import row_key
from tinyrl.rollout.buffer import FINISH_REASONS, Rollout
from tinyrl.rollout.components import SamplingParts
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.text import hidden

TOKEN_BY_TOKEN = 8  # completions of an evaluation step in tokens.jsonl
MOST_TOKEN_BYTES = 20_000_000  # of tokens.jsonl
CHARACTER_TOKENS = 8  # no character is made of more


def written(rollout: Rollout, row: int, parts: SamplingParts) -> str:
    if rollout.transcripts is not None:
        return policy_text(rollout.transcripts[row])
    return parts.scorer.text(rollout.response(row))


def sample_lines(
    rollout: Rollout, advantages: Tensor, *, parts: SamplingParts, texts: dict[int, str], group_size: int, most: int
) -> list[dict[str, Any]]:
    """Lines of samples.jsonl, whole groups first, with each row's mean advantage. `texts`: of prompts, by index."""
    per_row = advantages if advantages.dim() == 1 else masked_mean(advantages, rollout.loss_mask, dim=1)
    return [
        {
            **_place(rollout, row, texts, group_size),
            "completion": written(rollout, row, parts),
            **rollout.episode_of(row),
            "rewards": dict(zip(parts.scorer.names, rollout.scores[row].tolist(), strict=True)),
            "reward": float(rollout.rewards[row]),
            "advantage": float(per_row[row]),
            "finish_reason": FINISH_REASONS[int(rollout.finish_reasons[row])],
        }
        for row in range(min(most, rollout.num_episodes))
    ]


def _place(rollout: Rollout, row: int, texts: dict[int, str], group_size: int) -> dict[str, Any]:
    index = int(rollout.prompt_rows[rollout.prompt_index[row]])
    of = row if rollout.parent is None else int(rollout.parent[row])
    return {"kind": "train", "prompt_index": index, "sample": of % group_size, "prompt": texts[index]}


# ---- token by token ----


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
    parts: SamplingParts,
    texts: dict[int, str],
    group_size: int,
) -> Iterator[dict[str, Any]]:
    """Lines of tokens.jsonl: each token with its advantage in the loss, its log-probability before the update, after it
    and under the reference, its value, and the reward that stands on it. Tokens that were only read have none of these.

    new_logprobs (len(rows), T); rewards (B, T) of tokens, None: the score is on the last one.
    """
    assert rollout.advantages is not None
    if rewards is None:
        no_kl = torch.zeros_like(rollout.sampling_logprobs)
        scores = torch.nan_to_num(rollout.final_scores)
        rewards = rollout.with_turn_rewards(token_rewards(scores, no_kl, rollout.loss_mask, kl_coef=0.0))
    old = rollout.sampling_logprobs if rollout.old_logprobs is None else rollout.old_logprobs
    advantages = rollout.advantages
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1).expand_as(old)
    kinds = {"advantage": advantages, "old": old, "ref": rollout.ref_logprobs, "value": rollout.values}
    kinds |= {"teacher": rollout.teacher_logprobs, "reward": rewards}
    for place, row in enumerate(rows):
        tokens = rollout.response(row)
        if hidden(whole := str(parts.tokenizer.decode(tokens))) != whole:
            continue  # the value of a secret variable, which no single piece would show
        columns = {name: None if x is None else x[row].tolist() for name, x in kinds.items()}
        columns["new"] = new_logprobs[place].tolist()
        chosen = rollout.response_mask[row].tolist()
        before = rollout.prompt_tokens[int(rollout.prompt_index[row])][-1:]
        yield {
            **_place(rollout, row, texts, group_size),
            "reward": float(rollout.rewards[row]),
            "tokens": [
                {"piece": piece, "chosen": chosen[t]}
                | {name: round(column[t], 3) if column and chosen[t] else None for name, column in columns.items()}
                for t, piece in enumerate(pieces(parts.tokenizer, tokens, before=before))
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


# ---- prompts ----


class Tried:
    """Of a step's prompts, how many completions had a reward, and how many of these were right."""

    def __init__(self, solved_reward: float) -> None:
        self.solved_reward = solved_reward
        self._counts: dict[int, tuple[str, int, int]] = {}

    def look(self, prompts: list[PreparedPrompt], rollout: Rollout) -> None:
        rewards = rollout.rewards.reshape(len(prompts), -1)
        tried, solved = (~rewards.isnan()).sum(1).tolist(), (rewards >= self.solved_reward).sum(1).tolist()
        for prompt, n, right in zip(prompts, tried, solved, strict=True):
            _, before, before_right = self._counts.get(prompt.index, ("", 0, 0))
            self._counts[prompt.index] = (row_key(prompt.row), before + n, before_right + right)

    def take(self) -> list[list[Any]]:
        """What the line of prompts.jsonl holds, by index; the count begins anew."""
        counts, self._counts = self._counts, {}
        return [[index, *counts[index]] for index in sorted(counts)]
