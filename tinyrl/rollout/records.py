"""Lines of samples.jsonl and tokens.jsonl: samples as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinyrl.generation.sample import Sample, num_episodes, token_rewards_of
from tinyrl.text import IncrementalDetokenizer

if TYPE_CHECKING:
    from tinyrl.rewards.scorer import Scorer

SAMPLES_BYTES = 90e6  # of samples.jsonl, but for the last step
TOKEN_BY_TOKEN = 8  # completions of an evaluation step in tokens.jsonl


def room_for_samples(step: int, num_steps: int) -> float:
    """Return the bytes that samples.jsonl may have after a step: a tenth at first, then in proportion."""
    return SAMPLES_BYTES * (0.1 + 0.9 * step / num_steps) if step < num_steps else float("inf")


def completion_text(sample: Sample, scorer: Scorer) -> str:
    """Return the policy's text, without what an environment replied."""
    if sample.played is None:
        return scorer.text(sample.response)
    return "\n".join(turn["content"] for turn in sample.played.transcript if turn["role"] == "assistant")


def sample_key(sample: Sample, *, prompts: Mapping[int, str], group_size: int) -> dict[str, Any]:
    """Return the prompt of a sample and its number in the group; prompts: their texts, by index."""
    return {"prompt_index": sample.row, "sample": sample.episode % group_size, "prompt": prompts[sample.row]}


def is_penalised(sample: Sample) -> bool:
    """Return whether a length penalty has changed the reward by more than the rounding of float32."""
    return sample.score - sample.reward > 1e-4


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
    """Make lines of samples.jsonl, without their step, of the samples whose texts are given; advantages (B,)."""
    return [
        {
            "kind": kind,
            **sample_key(sample, prompts=prompts, group_size=group_size),
            "completion": text,
            **({} if sample.played is None else {"episode": sample.played.transcript}),
            "rewards": dict(zip(names, sample.scores, strict=True)),
            "reward": sample.reward,
            **({"score": sample.score} if is_penalised(sample) else {}),
            "advantage": None if advantages is None else float(advantages[row]),
            "finish_reason": sample.finish,
        }
        for row, (sample, text) in enumerate(zip(samples, texts, strict=False))
    ]


# ---- lines of tokens.jsonl: completions token by token, as the update saw them ----


def shown_samples(samples: list[Sample], *, group_size: int) -> list[Sample]:
    """Choose those for tokens.jsonl: of each prompt those with highest and lowest reward, then others in the loss."""
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
    """Make lines of tokens.jsonl: each token with its advantage, its log-probability before the update, after it
    (new_logprobs (B, T)) and under the reference, its value and reward (rewards (B, T); None: the score, on the last).
    Tokens that were only read have none of these.
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


def pieces(tokenizer: Any, tokens: list[int], *, before: list[int]) -> list[str]:
    """Return the text that each token adds behind `before`; a character of several tokens is the last one's."""
    text = IncrementalDetokenizer(tokenizer, before=before, clean_up_tokenization_spaces=False)
    return [text.add([token], at_end=count == len(tokens)) for count, token in enumerate(tokens, 1)]
