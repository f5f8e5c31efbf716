"""A sample: one conversation from its prompt to its reward. A step's samples are a list of them; nothing is padded.

Axis letters: B samples, T longest response. x[:, t] of a (B, T) tensor is of response token t, 0 where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tinyrl.algorithms.advantages import token_rewards
from tinyrl.algorithms.kl import k1
from tinyrl.models.batch import Tokens

if TYPE_CHECKING:
    from tinyrl.config.sections import RewardConfig
    from tinyrl.environments.environment import Episode
    from tinyrl.generation.request import Request


FinishReason = Literal["eos", "stop", "length", "turns"]  # turns: an episode that reached its limit of turns


@dataclass(frozen=True)
class Sample:
    """One sampled conversation and its score. The samples of a prompt, its group, follow one another.

    What is computed of its tokens for the loss stands beside it (training/policy_loss.py).
    """

    # Sampled: the engine's tokens behind the prompt of a row, or (`sampled` is false) an answer of the data.
    prompt: list[int]
    response: list[int]
    mask: list[bool]  # tokens of the response that the policy chose
    logprobs: list[float]  # as recorded while sampling; 0 for tokens that were read, and of an answer of the data
    row: int  # of the prompt in the data
    episode: int = 0  # number in the step; further conversations of an agent have that of their episode
    finish: FinishReason = "eos"
    sampled: bool = True  # by the policy
    stopped_in_thought: bool = False  # a stop string ended it inside a thought, so that it has no answer
    played: Episode | None = None  # what an environment recorded
    further: list[Sample] = field(default_factory=list)  # an agent's other conversations, until `conversations`

    # Scored by the rewards; a length rule may lower `reward` and clear `in_loss`.
    scores: list[float] = field(default_factory=list)  # of each reward function; NaN: does not apply
    score: float = math.nan  # weighted sum of the scores; NaN: none
    reward: float = math.nan  # the score less length penalties, which is what is learnt from; NaN: none
    comment: str = ""  # text that rewards gave beside their scores
    failures: list[str] = field(default_factory=list)  # why rewards failed
    in_loss: bool = True  # it has a reward and is not left out as truncated

    @property
    def responses(self) -> list[list[int]]:
        return [self.response]

    def listed(self, tokens: Tokens = "loss") -> list[list[bool]]:
        """Return its mask if the sample is among `tokens`, else a mask of zeros."""
        counts = {"loss": self.in_loss, "rewarded": self.rewarded, "all": True}[tokens]
        return [self.mask if counts else [False] * len(self.mask)]

    @property
    def rewarded(self) -> bool:
        return not math.isnan(self.reward)

    @property
    def play_failure(self) -> str | None:
        """Return why the environment or the agent failed in its episode; None if neither did."""
        return None if self.played is None else self.played.failure

    @property
    def truncated(self) -> bool:
        return self.finish == "length"

    @property
    def num_actions(self) -> int:
        return sum(self.mask)

    def plain(self) -> dict[str, Any]:
        """Convert to JSON, for the record of a batch that is not finite."""
        apart: dict[str, Any] = {"further": [sample.plain() for sample in self.further]}
        if self.played is not None:  # an agent's messages are in samples.jsonl
            apart["played"] = asdict(replace(self.played, dialogues=None))
        return vars(self) | apart


class SampleBuilder:
    """The sample of a request while its parts come in, each of which it `read` or `chose`."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.response: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []

    def read(self, tokens: list[int]) -> None:
        """Append tokens that the policy only reads, such as a tool's answer."""
        self.response += tokens
        self.mask += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def chose(self, tokens: list[int], logprobs: list[float]) -> None:
        """Append tokens that the policy sampled."""
        self.response += tokens
        self.mask += [True] * len(tokens)
        self.logprobs += logprobs

    def sample(self, *, finish: FinishReason, played: Episode | None = None) -> Sample:
        """Return the sample as it is now."""
        return Sample(
            prompt=self.request.prompt,
            response=[*self.response],
            mask=[*self.mask],
            logprobs=[*self.logprobs],
            row=self.request.row,
            finish=finish,
            played=played,
        )


def conversations(episodes: list[Sample], *, mask_truncated: bool = False) -> list[Sample]:
    """List the first conversation of each episode, then the further ones, with the episode's reward; those that were
    cut off are left out of the loss with `mask_truncated`.
    """
    firsts = list[Sample]()
    others = list[Sample]()
    for number, first in enumerate(episodes):
        firsts.append(first if first.episode == number else replace(first, episode=number))
        for sample in first.further:
            in_loss = first.rewarded and not (mask_truncated and sample.truncated)
            others.append(
                replace(
                    sample,
                    episode=number,
                    scores=first.scores,
                    score=first.score,
                    reward=first.reward,
                    in_loss=in_loss,
                )
            )
    return firsts + others


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities (B, T) of the tokens of a step, in nats; None: this run does not need them.

    sampled: as recorded while sampling; reference: under the reference; old: under the policy before the update;
    rescored: under the policy, by passes like the reference's, for a KL in the reward.
    """

    sampled: Tensor
    reference: Tensor | None = None
    old: Tensor | None = None
    rescored: Tensor | None = None

    @property
    def policy(self) -> Tensor:
        """Return those of the policy that are compared with the reference's."""
        if self.rescored is not None:
            return self.rescored
        return self.sampled if self.old is None else self.old

    def kl(self, mask: Tensor) -> Tensor:
        """Compute k1 of each token against the reference, (b, t), of the first b samples as `mask` (b, t) has them; 0
        outside of it, and without a reference.
        """
        if self.reference is None:
            return torch.zeros(mask.shape)
        count, width = mask.shape
        return torch.where(mask, k1(self.policy[:count, :width], self.reference[:count, :width]), 0.0)


def loss_mask(samples: Sequence[Sample], tokens: Tokens = "loss") -> Tensor:
    """Return (B, T) bool: the chosen tokens that count."""
    rows = [torch.tensor(sample.listed(tokens)[0], dtype=torch.bool) for sample in samples]
    return pad_sequence(rows, batch_first=True)


def sampled_logprobs(samples: Sequence[Sample]) -> Tensor:
    """Return (B, T) log-probabilities as recorded while sampling."""
    return pad_sequence([torch.tensor(sample.logprobs) for sample in samples], batch_first=True)


def sampled_rows(samples: Sequence[Sample]) -> Tensor:
    """Return (B, 1) bool: the samples that the policy wrote; the others are answers of the data."""
    return torch.tensor([sample.sampled for sample in samples]).unsqueeze(1)


def rewards_of(samples: Sequence[Sample]) -> Tensor:
    """Return (B,) rewards; NaN: none."""
    return torch.tensor([sample.reward for sample in samples])


def scores_of(samples: Sequence[Sample]) -> Tensor:
    """Return (B,) rewards before length penalties: whether answers are right, or differ; NaN: none."""
    return torch.tensor([sample.score for sample in samples])


def by_episode(samples: Sequence[Sample], x: Tensor) -> Tensor:
    """Return (E,) sums over the conversations of each episode of a (B,) tensor."""
    numbers = torch.tensor([sample.episode for sample in samples])
    return x.new_zeros(num_episodes(samples)).index_add(0, numbers, x)


def num_episodes(samples: Sequence[Sample]) -> int:
    """Count the first conversations; they come first."""
    return 1 + max(sample.episode for sample in samples)


def turn_rewards(samples: Sequence[Sample]) -> Tensor | None:
    """Return (B, T) rewards of turns, on the last token of each (0 where a turn has none); `reward` has them too. None
    without an environment.
    """
    if not any(sample.played for sample in samples):
        return None
    out = torch.zeros(len(samples), max(len(sample.response) for sample in samples))
    for row, sample in enumerate(samples):
        if sample.played:
            out[row, sample.played.turn_ends] = torch.tensor([reward or 0.0 for reward in sample.played.turn_rewards])
    return out


def rewards_by_turn(samples: Sequence[Sample], rewards: Tensor) -> Tensor:
    """Return (B, K) float64 rewards of the turns of episodes whose rewards are (B,): what the environment gave (0 where
    it gave none), and the rest on the last turn. NaN: turns that an episode did not reach, and all without a reward.
    """
    played = [sample.played for sample in samples if sample.played is not None]
    assert len(played) == len(samples), "turns are of episodes"
    own = [[reward or 0.0 for reward in episode.turn_rewards] for episode in played]
    outcome = rewards - torch.tensor([sum(turns) for turns in own])  # both in float32: exactly 0 where there is no rest
    out = torch.full((len(samples), max(len(turns) for turns in own)), torch.nan, dtype=torch.float64)
    for row, turns in enumerate(own):
        out[row, : len(turns)] = torch.tensor(turns, dtype=torch.float64)
        out[row, len(turns) - 1] += outcome[row]
    out[rewards.isnan()] = torch.nan
    return out


def spread_over_turns(samples: Sequence[Sample], x: Tensor) -> Tensor:
    """Return (B, T): for each token the x (B, K) of the turn that it belongs to, which tokens read before it share."""
    out = torch.zeros(len(samples), max(len(sample.response) for sample in samples))
    for row, sample in enumerate(samples):
        assert sample.played is not None, "turns are of episodes"
        start = 0
        for turn, end in enumerate(sample.played.turn_ends):
            out[row, start : end + 1] = x[row, turn]
            start = end + 1
    return out


def kl_per_response(samples: Sequence[Sample], logprobs: Logprobs) -> tuple[float, int]:
    """Average over the episodes in the loss their summed KL, in nats (0 for none); return it and their number."""
    counted = by_episode(samples, torch.tensor([int(sample.in_loss) for sample in samples])) > 0
    found = by_episode(samples, logprobs.kl(loss_mask(samples)).sum(1))[counted]
    return float(found.mean()) if len(found) else 0.0, len(found)


def token_rewards_of(samples: Sequence[Sample], kl: Tensor, *, kl_coef: float, scores: Tensor | None = None) -> Tensor:
    """Compute (B, T): the score (None: the reward) on the last token, less kl_coef * kl. An environment's rewards of
    turns are on the last token of each, and the reward's rest on the last of all.
    """
    mask = loss_mask(samples)
    turns = turn_rewards(samples)
    if scores is not None:
        return token_rewards(torch.nan_to_num(scores), kl, mask, kl_coef=kl_coef)
    rewards = rewards_of(samples)
    outcome = torch.nan_to_num(rewards if turns is None else rewards - turns.sum(1))
    shaped = token_rewards(outcome, kl, mask, kl_coef=kl_coef)
    return shaped if turns is None else shaped + torch.where(mask, turns, 0.0)


def apply_length_rules(samples: list[Sample], reward: RewardConfig, *, max_new_tokens: int) -> list[Sample]:
    """Return the samples, truncated ones penalised or left out of the loss; they still count in their group's mean and
    std. An episode is penalised once, if any of its conversations was cut off, and by the tokens of all of them. The
    penalty changes `reward`; `score` stays, since length makes no answer right and no group worth keeping.

    Soft overlong punishment (DAPO, 2503.14476, Eq. 13): its reward is 0 up to max - buffer tokens, then falls to -1 at
    max.
    """
    episodes = [[sample, *sample.further] for sample in samples]
    truncated = torch.tensor([any(sample.truncated for sample in episode) for episode in episodes])
    penalty = torch.where(truncated, float(reward.truncated == "penalize"), 0.0)
    if buffer := reward.overlong_tokens:
        num_actions = torch.tensor([sum(sample.num_actions for sample in episode) for episode in episodes])
        penalty = penalty + ((num_actions - (max_new_tokens - buffer)) / buffer).clamp(0.0, 1.0)
    ruled = list[Sample]()
    for sample, rewarded in zip(samples, (scores_of(samples) - penalty).tolist(), strict=True):
        in_loss = sample.in_loss and not (reward.truncated == "mask" and sample.truncated)
        is_same = (sample.reward, sample.in_loss) == (rewarded, in_loss)
        ruled.append(sample if is_same else replace(sample, reward=rewarded, in_loss=in_loss))
    return ruled


# ---- metrics ----

STOPPED_IN_THOUGHT = "completion/stopped_in_thought"


def _mean(values: Iterable[float] | Tensor) -> float:
    return float(torch.as_tensor(values if isinstance(values, Tensor) else list(values)).float().mean())


def environment_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Average over episodes: turns, invalid calls and errors of tools, observed tokens, share out of turns; {} without
    an environment.
    """
    firsts = samples[: num_episodes(samples)]
    played = [sample.played for sample in firsts if sample.played is not None]
    if not played:
        return {}
    read = torch.tensor([len(sample.response) - sample.num_actions for sample in samples])
    out_of_turns = torch.tensor([int(sample.finish == "turns") for sample in samples])
    return {
        "environment/turns": _mean(len(episode.turn_ends) for episode in played),
        "environment/invalid_calls": _mean(episode.invalid for episode in played),
        "environment/tool_errors": _mean(episode.tool_errors for episode in played),
        "environment/cut_observations": _mean(episode.cut for episode in played),
        "environment/observation_tokens": _mean(by_episode(samples, read)),
        "environment/out_of_turns": _mean(by_episode(samples, out_of_turns) > 0),
    }


def length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Average over episodes: chosen tokens, the share with a response that was cut off and, where stop strings end
    responses, with one that ended inside a thought.
    """
    chosen = torch.tensor([sample.num_actions for sample in samples])
    cut = torch.tensor([int(sample.truncated) for sample in samples])
    metrics = {
        "completion/mean_length": _mean(by_episode(samples, chosen)),
        "completion/truncated": _mean(by_episode(samples, cut) > 0),
        "completion/tokens": float(chosen.sum()),
    }
    if any(sample.finish == "stop" for sample in samples):
        in_thought = torch.tensor([int(sample.stopped_in_thought) for sample in samples])
        metrics[STOPPED_IN_THOUGHT] = _mean(by_episode(samples, in_thought) > 0)
    return metrics
