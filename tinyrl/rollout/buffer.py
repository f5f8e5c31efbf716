"""The rollout of a step as tensors: prompts, sampled responses, their log-probabilities, values and scores.

Axis letters: B samples, P prompts, T longest response, R rewards. x[:, t] of a (B, T) tensor is of response token t.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tinyrl.algorithms.kl import k1
from tinyrl.environments import Transcript
from tinyrl.generation.agents import Other
from tinyrl.generation.engine import Completion, FinishReason
from tinyrl.models.batches import SequenceBatch
from tinyrl.models.device import to_device
from tinyrl.models.distances import TeacherStates, TeacherTopK, Teaching
from tinyrl.models.logprobs import Head
from tinyrl.models.micro_batches import RowSizes
from tinyrl.models.roles import Roles
from tinyrl.workers.calls import RowFailure

FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_SAMPLED_PER_TOKEN = ("response_tokens", "response_mask", "sampling_logprobs", "turn_rewards")
_SCORED_PER_TOKEN = ("old_logprobs", "rescored_logprobs", "ref_logprobs", "values")
_PER_SAMPLE = ("response_lengths", "scores", "rewards", "finish_reasons", "kept", "turns", "invalid_turns")
_TEXTS = ("transcripts", "whys")
_OPTIONAL = (
    "parent", "hinted", "teacher_logprobs", "teacher_states", "teacher_head", "teacher_head_bias", "teacher_top_ids",
    "teacher_top_logprobs",
)  # fmt: skip
_SAVED = (*_SAMPLED_PER_TOKEN, *_PER_SAMPLE, *_SCORED_PER_TOKEN, *_OPTIONAL)  # of a batch that is not finite


@dataclass
class Rollout:
    """B = P * group samples; the samples of prompt p stand together.

    prompt_tokens       P token lists (ragged)
    prompt_rows         (P,) each prompt's row in the data
    prompt_index        (B,) which of the P prompts
    response_tokens     (B, T)
    response_lengths    (B,) how many of them exist
    response_mask       (B, T) True = a token the policy chose
    sampling_logprobs   (B, T) recorded while sampling
    old_logprobs        (B, T) of the policy before the update, the ratio's denominator: sampling_logprobs where
                        sampling is exact, else from a rescoring pass; None with one optimizer step a rollout, where the
                        training pass's own detached values serve (ratio 1)
    rescored_logprobs   (B, T) of a pass like the reference's, for the KL: where sampling is not exact and there are no
                        old_logprobs; else None
    ref_logprobs        (B, T) under the reference, or None
    values              (B, T) of the critic before the update, or None
    scores              (B, R) of each reward function, NaN = does not apply
    rewards             (B,) weighted sum of the scores, less length penalties; NaN = none
    finish_reasons      (B,) index into FINISH_REASONS
    kept                (B,) True = the row counts in the loss: it has a reward and is not left out as truncated
    turn_rewards        (B, T) what the environment gave, on the last token of each turn, in `rewards` too; or None
    turns               (B,) the policy's turns, and invalid_turns those that asked for what does not exist; or None
    hinted              (B,) True = the row has what teacher.hint shows the teacher; or None: all are taught
    teacher_logprobs    (B, T) under the teacher, or None
    teacher_states      (M, H) its hidden states at the M tokens that count, row by row; or None
    teacher_head        (V, H) what its head was, and teacher_head_bias (V,), where the update trains it; or None
    teacher_top_ids     (M, K) its likeliest tokens there, and teacher_top_logprobs (M, K + 1) of them and of all
                        others together; or None
    transcripts         B lists of messages, policy and environment by turns; or None: one turn, without an environment
    parent              (B,) the episode of each row, which is its first row, where episodes may have several; or None
    others              further conversations of the episodes, for with_others()
    whys                B texts that rewards gave beside their scores, for a teacher to read; or None
    advantages          (B,) or (B, T), returns (B, T): derived from the others at each update
    """

    prompt_tokens: list[list[int]]
    prompt_rows: Tensor
    prompt_index: Tensor
    response_tokens: Tensor
    response_lengths: Tensor
    response_mask: Tensor
    sampling_logprobs: Tensor
    scores: Tensor
    rewards: Tensor
    finish_reasons: Tensor
    kept: Tensor
    old_logprobs: Tensor | None = None
    rescored_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    turn_rewards: Tensor | None = None
    turns: Tensor | None = None
    invalid_turns: Tensor | None = None
    hinted: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    teacher_states: Tensor | None = None
    teacher_head: Tensor | None = None
    teacher_head_bias: Tensor | None = None
    teacher_top_ids: Tensor | None = None
    teacher_top_logprobs: Tensor | None = None
    transcripts: list[Transcript] | None = None
    parent: Tensor | None = None
    others: list[Other] = field(default_factory=list)
    whys: list[str] | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    failures: list[RowFailure] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompt_index)

    @property
    def num_episodes(self) -> int:
        """How many of the rows are episodes; the others, behind them, are further conversations of these."""
        return len(self) if self.parent is None else len(self.parent.unique())

    def rows_of(self, episodes: list[int]) -> list[int]:
        """The rows of some episodes: their first conversations, then the further ones."""
        if self.parent is None:
            return episodes
        chosen, further = set(episodes), self.parent.tolist()[self.num_episodes :]
        return episodes + [self.num_episodes + i for i, episode in enumerate(further) if episode in chosen]

    def by_episode(self, x: Tensor) -> Tensor:
        """(E,) sums over the conversations of each episode of a (B,) tensor."""
        return x if self.parent is None else x.new_zeros(self.num_episodes).index_add(0, self.parent, x)

    @property
    def num_kept(self) -> int:
        """How many episodes have a conversation that counts."""
        return int((self.by_episode(self.kept.long()) > 0).sum())

    @property
    def truncated(self) -> Tensor:
        """(B,) bool: responses that ran into max_new_tokens."""
        return self.finish_reasons == FINISH_REASONS.index("length")

    @property
    def cut_off(self) -> Tensor:
        """(B,) bool: truncated responses, and episodes that ran into environment.max_turns; neither has ended."""
        return self.truncated | (self.finish_reasons == FINISH_REASONS.index("turns"))

    @property
    def loss_mask(self) -> Tensor:
        """(B, T) bool: chosen tokens of rows that count."""
        return self.response_mask & self.kept.unsqueeze(1)

    def counts(self, rows: Sequence[int]) -> bool:
        """Return whether any token of these rows is in the loss."""
        return bool(self.loss_mask[list(rows)].any())

    @property
    def taught_mask(self) -> Tensor:
        """(B, T) bool: tokens in the loss that the teacher scores."""
        return self.loss_mask if self.hinted is None else self.loss_mask & self.hinted.unsqueeze(1)

    @property
    def scored_mask(self) -> Tensor:
        """(B, T) bool: chosen tokens of rows with a reward; one left out of the loss still counts in its group."""
        return self.response_mask & ~self.rewards.isnan().unsqueeze(1)

    @property
    def num_actions(self) -> Tensor:
        """(B,) how many tokens of each response the policy chose."""
        return self.response_mask.sum(1)

    def response(self, row: int) -> list[int]:
        return self.response_tokens[row, : int(self.response_lengths[row])].tolist()

    def sizes(self, roles: Roles) -> RowSizes:
        prompts = [self.prompt_tokens[p] for p in self.prompt_index.tolist()]
        return RowSizes.of(prompts, self.response_lengths.tolist(), packed=roles.packs)

    def batch(self, rows: Sequence[int], roles: Roles) -> SequenceBatch:
        prompts = [self.prompt_tokens[int(self.prompt_index[row])] for row in rows]
        responses, mask = [self.response(row) for row in rows], self.loss_mask[list(rows)].tolist()
        masks = [of_row[: len(response)] for of_row, response in zip(mask, responses, strict=True)]
        return roles.batch(prompts, responses, masks)

    def places(self, rows: Sequence[int]) -> Tensor:
        """(n,) where the tokens of some rows that count stand among those of all, row by row."""
        counts = self.loss_mask.sum(1)
        starts = (counts.cumsum(0) - counts).tolist()
        return torch.cat([torch.arange(starts[row], starts[row] + int(counts[row])) for row in rows])

    def taught(self, rows: Sequence[int], head: Head | None, *, device: torch.device) -> Teaching:
        """What the teacher, whose `head` this is, said of the tokens of some rows that count."""
        where = self.places(rows)
        if self.teacher_states is not None:
            assert head is not None
            if self.teacher_head is not None:
                bias = None if self.teacher_head_bias is None else to_device(self.teacher_head_bias, device)
                head = replace(head, weight=to_device(self.teacher_head, device), bias=bias)
            return TeacherStates(to_device(self.teacher_states[where], device), head)
        assert self.teacher_top_ids is not None
        assert self.teacher_top_logprobs is not None
        return TeacherTopK(*(to_device(x[where], device) for x in (self.teacher_top_ids, self.teacher_top_logprobs)))

    def take(self, x: Tensor, rows: Sequence[int], *, batch: SequenceBatch) -> Tensor:
        """The rows of a (B,) or (B, T) tensor, cut to the width of their micro-batch, on its device."""
        picked = x[torch.as_tensor(rows)]
        cut = picked[:, : batch.num_columns] if picked.dim() == 2 else picked
        return to_device(cut, batch.input_ids.device)

    def environment_metrics(self) -> dict[str, float]:
        """Means over episodes: turns, turns that asked for what does not exist, tokens that were read; the share that
        had no more turns. Nothing where no environment answers.
        """
        if self.turns is None or self.invalid_turns is None:
            return {}
        count, read = self.num_episodes, self.by_episode(self.response_lengths - self.num_actions)
        out_of_turns = self.finish_reasons[:count] == FINISH_REASONS.index("turns")
        return {
            "environment/turns": float(self.turns[:count].float().mean()),
            "environment/invalid_calls": float(self.invalid_turns[:count].float().mean()),
            "environment/observation_tokens": float(read.float().mean()),
            "environment/out_of_turns": float(out_of_turns.float().mean()),
        }

    def completion_metrics(self) -> dict[str, float]:
        """Means over episodes: tokens that the policy chose, and the share with a response that was cut off."""
        return {
            "completion/mean_length": float(self.by_episode(self.num_actions).float().mean()),
            "completion/truncated": float((self.by_episode(self.truncated.long()) > 0).float().mean()),
            "completion/tokens": float(self.response_mask.sum()),
        }

    def episode_of(self, row: int) -> dict[str, Transcript]:
        """The messages of an episode, as a line of samples.jsonl has them; nothing where no environment answers."""
        return {} if self.transcripts is None else {"episode": self.transcripts[row]}

    @property
    def outcome_rewards(self) -> Tensor:
        """(B,) the rewards without what the environment gave for single turns."""
        return self.rewards if self.turn_rewards is None else self.rewards - self.turn_rewards.sum(1)

    def with_turn_rewards(self, rewards: Tensor) -> Tensor:
        """(B, T) token rewards, and what the environment gave on the last token of each turn that counts."""
        return rewards if self.turn_rewards is None else rewards + torch.where(self.loss_mask, self.turn_rewards, 0.0)

    def kl(self, mask: Tensor | None = None) -> Tensor:
        """k1 of each token against the reference, (B, T); 0 outside of `mask` (None: loss_mask), and without one."""
        if self.ref_logprobs is None:
            return torch.zeros_like(self.sampling_logprobs)
        policy = next(x for x in (self.old_logprobs, self.rescored_logprobs, self.sampling_logprobs) if x is not None)
        return torch.where(self.loss_mask if mask is None else mask, k1(policy, self.ref_logprobs), 0.0)

    def kl_per_response(self) -> float:
        """Mean over the episodes that count of their summed KL, in nats; 0 where none counts."""
        counted = self.by_episode(self.kl().sum(1))[self.by_episode(self.kept.long()) > 0]
        return float(counted.mean()) if len(counted) else 0.0

    def with_groups(self, other: Rollout, groups: list[int], *, places: list[int], group_size: int) -> Rollout:
        """A copy whose groups at `places` are `groups` of `other`, in the fields that sampling and scoring fill."""
        order = [*range(len(self.prompt_tokens))]
        for place, group in zip(places, groups, strict=True):
            order[place] = len(order) + group
        both = joined(self, other)
        return replace(
            both.select([group * group_size + i for group in order for i in range(group_size)]),
            prompt_tokens=[both.prompt_tokens[group] for group in order],
            prompt_rows=both.prompt_rows[order],
            prompt_index=torch.arange(len(order)).repeat_interleave(group_size),
        )

    def with_others(self, *, mask_truncated: bool = False) -> Rollout:
        """Add a row for each further conversation of an episode, which has the episode's reward. mask_truncated: one
        that was cut off is left out of the loss.
        """
        if not self.others:
            return self
        parents = torch.tensor([other.episode for other in self.others])
        further = self.select(parents.tolist())
        further = replace(
            further,
            prompt_tokens=[other.prompt for other in self.others],
            prompt_rows=self.prompt_rows[self.prompt_index[parents]],
            prompt_index=torch.arange(len(parents)),
            others=[],
            **sampled_fields([other.completion for other in self.others]),
        )
        further.kept = ~further.rewards.isnan() & ~(further.truncated & mask_truncated)
        if further.turn_rewards is not None:
            further.turn_rewards = torch.zeros_like(further.sampling_logprobs)
        parent = torch.cat([torch.arange(len(self)), parents])
        return replace(joined(self, further), parent=parent, others=[])

    def select(self, rows: Sequence[int]) -> Rollout:
        """Some of the samples, in the fields that sampling and scoring fill."""
        names = ("prompt_index", *_SAMPLED_PER_TOKEN, *_PER_SAMPLE)
        picked = {name: x[list(rows)] for name in names if (x := getattr(self, name)) is not None}
        texts = {name: [x[row] for row in rows] for name in _TEXTS if (x := getattr(self, name)) is not None}
        others = [replace(other, episode=rows.index(other.episode)) for other in self.others if other.episode in rows]
        return replace(self, failures=[], parent=None, others=others, **picked, **texts)

    def to_tensors(self) -> dict[str, Tensor]:
        """Everything as tensors, for safetensors (`prompt_tokens` as one flat list and its lengths)."""
        names = ("prompt_rows", "prompt_index", *_SAVED)
        # Copies, since safetensors refuses what shares memory (old_logprobs are often sampling_logprobs) and what is
        # transposed (scores of several rewards).
        there = {name: x for name in names if (x := getattr(self, name)) is not None}
        present = {name: x.clone(memory_format=torch.contiguous_format) for name, x in there.items()}
        if self.transcripts is not None:
            text = json.dumps(self.transcripts).encode("ascii")
            present["transcripts"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        flat = torch.tensor([token for prompt in self.prompt_tokens for token in prompt])
        return {**present, "prompt_tokens": flat, "prompt_lengths": torch.tensor([len(p) for p in self.prompt_tokens])}


def sampled_fields(completions: list[Completion]) -> dict[str, Any]:
    """The tensors of a rollout that completions fill."""

    def padded(rows: Iterable[list[Any]], dtype: torch.dtype) -> Tensor:
        return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)

    return {
        "response_tokens": padded((c.tokens for c in completions), torch.long),
        "response_lengths": torch.tensor([len(c.tokens) for c in completions]),
        "response_mask": padded((c.action_mask or [True] * len(c.tokens) for c in completions), torch.bool),
        "sampling_logprobs": padded((c.logprobs for c in completions), torch.float32),
        "finish_reasons": torch.tensor([FINISH_REASONS.index(c.finish_reason) for c in completions]),
    }


def new_rollout(
    prompts: list[list[int]],
    rows: list[int],
    *,
    group_size: int = 1,
    reward: float = 0.0,
    num_rewards: int = 0,
    **sampled: Any,
) -> Rollout:
    """Responses by their `sampled_fields`, a group of them for each prompt. All of them count, and have this reward.

    rows: each prompt's row in the data.
    """
    count = len(prompts) * group_size
    return Rollout(
        prompt_tokens=prompts,
        prompt_rows=torch.tensor(rows),
        prompt_index=torch.arange(len(prompts)).repeat_interleave(group_size),
        scores=torch.full((count, num_rewards), reward),
        rewards=torch.full((count,), reward),
        kept=torch.ones(count, dtype=torch.bool),
        **sampled,
    )


def given_rollout(
    prompts: list[list[int]], responses: list[list[int]], *, rows: list[int], num_rewards: int
) -> Rollout:
    """Responses that nobody sampled, one a prompt, without rewards; num_rewards: how many a sampled one would have."""
    given = [Completion(tokens, [0.0] * len(tokens), FINISH_REASONS[0]) for tokens in responses]
    return new_rollout(prompts, rows, reward=torch.nan, num_rewards=num_rewards, **sampled_fields(given))


def joined(first: Rollout, second: Rollout) -> Rollout:
    """The samples of two rollouts, in the fields that sampling and scoring fill."""
    width = max(first.response_tokens.shape[1], second.response_tokens.shape[1])
    fields, texts = dict[str, Tensor](), dict[str, list[Any]]()
    for name in ("prompt_rows", *_SAMPLED_PER_TOKEN, *_PER_SAMPLE):
        parts = [getattr(first, name), getattr(second, name)]
        if parts[0] is not None:
            if name in _SAMPLED_PER_TOKEN:
                parts = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in parts]
            fields[name] = torch.cat(parts)
    for name in _TEXTS:
        ours, theirs = getattr(first, name), getattr(second, name)
        if ours is not None or theirs is not None:
            texts[name] = [*(ours or [""] * len(first)), *(theirs or [""] * len(second))]
    index = torch.cat([first.prompt_index, second.prompt_index + len(first.prompt_tokens)])
    prompts = [*first.prompt_tokens, *second.prompt_tokens]
    return replace(first, prompt_tokens=prompts, prompt_index=index, **fields, **texts)
