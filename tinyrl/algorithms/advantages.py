"""Advantage estimators (GAE, group-relative, leave-one-out, decoupled by reward, by turn, returns), and rewards of
tokens.

Nothing here carries a gradient. What differs from the papers: a response may hold False tokens (tool output, padding).
They are skipped, not zeroed: the step after a True token is the next True token, however far away; gamma and lambda are
not applied to the tokens between, and a reward on a False token is ignored. The value after the last True token is 0,
also where a response was cut off at its limit: nothing is bootstrapped.
Groups may hold NaN scores ("does not apply", "dropped"): they are left out and get 0.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tinyrl.algorithms.masking import assert_shapes, keep_true, masked_mean

STD_EPS = 1e-4  # added to a group's standard deviation, and to a batch's
AdvantageScale = Literal["std", "batch", "none"]


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages (GAE) and the returns to regress the value on.

        delta[t] = r[t] + gamma V[t'] - V[t],   A[t] = delta[t] + gamma gae_lambda A[t'],   returns[t] = A[t] + V[t]

    t' is the next True token after t in the row; after the last, A[t'] = 0 and V[t'] = 0. That is, over True tokens,
    A[t] = sum_l (gamma gae_lambda)^l delta[t + l]: Schulman et al. (1506.02438) Eq. 16, PPO (1707.06347) Eq. 11, 12.
    V[b, t] is the value before token t is chosen.
    rewards, values, mask: (B, T), gae_lambda: a number or (B,) -> two (B, T); 0 on False tokens.
    """
    assert_shapes(mask, rewards=rewards, values=values)
    assert isinstance(gae_lambda, float | int) or gae_lambda.shape == mask.shape[:1], "one lambda, or one per row, (B,)"
    rewards = keep_true(rewards, mask)
    values = keep_true(values, mask)
    advantages = torch.zeros_like(values)
    next_advantage = values.new_zeros(mask.shape[0])
    next_value = values.new_zeros(mask.shape[0])
    for t in reversed(range(mask.shape[1])):
        chosen = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(chosen, delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(chosen, values[:, t], next_value)
        advantages[:, t] = torch.where(chosen, next_advantage, 0.0)
    return advantages, advantages + values


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Discounted return of each token: R[t] = r[t] + gamma R[t'], t' the next True token after t, R = 0 after the last.

    REINFORCE++ (2501.03262): whitened over the batch, with gamma 1, these are its advantages.
    rewards, mask: (B, T) -> (B, T); 0 on False tokens.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, gae_lambda=1.0)[1]


@torch.no_grad()
def group_advantages(scores: Tensor, *, group_size: int, scale: AdvantageScale) -> Tensor:
    """Compare each score with its group: A[i] = (s[i] - mean) / (std + 1e-4), or A[i] = s[i] - mean with scale "none".

        std     the mean of the group and its deviation                    GRPO (2402.03300) section 4.1.2
        batch   the mean of the group, the deviation of the whole batch    Lite PPO (2508.08221)
        none    the mean of the group                                      Dr. GRPO (2503.20783)

    Deviations are unbiased (n - 1). NaN scores are left out of mean and std and get 0. A group with fewer than two
    valid scores, or whose valid scores are all equal, gives exactly 0.
    scores: (B,), B = P * group_size; the scores of prompt p are [p * group_size, (p + 1) * group_size) -> (B,).
    """
    assert scale in ("std", "batch", "none"), f"scale is {scale!r}"
    groups = _by_group(scores, group_size)
    advantages = groups.scores - groups.mean
    if scale == "std":
        variance = advantages.square().sum(dim=1, keepdim=True) / (groups.count - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + STD_EPS)
    elif scale == "batch":
        advantages = advantages / (_deviation(groups.scores[groups.valid]) + STD_EPS)
    return torch.where(groups.varied, advantages, 0.0).flatten()


@torch.no_grad()
def rloo_advantages(scores: Tensor, *, group_size: int) -> Tensor:
    """Leave one out: A[i] = s[i] - mean_{j != i} s[j] = n / (n - 1) * (s[i] - mean(group)), n the valid scores.

    RLOO (2402.14740) section 3. Shapes, NaN scores and groups with equal rewards are as in `group_advantages`.
    """
    groups = _by_group(scores, group_size)
    advantages = (groups.scores - groups.mean) * groups.count / (groups.count - 1).clamp(min=1)
    return torch.where(groups.varied, advantages, 0.0).flatten()


@torch.no_grad()
def decoupled_advantages(scores: Tensor, *, weights: Tensor, group_size: int, scale: AdvantageScale = "std") -> Tensor:
    """Compare each reward with its group on its own, so that a large variance of one does not hide another: GDPO
    (2601.05242).

        A[i] = sum_k w[k] A_k[i],   A_k = group_advantages(s[:, k]);   the result is A[i] / (std(A) + 1e-4)

    std is the deviation over the rows of the batch that have a score. The paper subtracts the batch's mean of A before;
    it is 0, since the advantages of a group add up to 0, and so is what flat groups get here.
    scores: (B, R), NaN where reward k does not apply, grouped as in `group_advantages`; weights: (R,) -> (B,).
    """
    assert scores.dim() == 2, f"scores must be (B, R), not {tuple(scores.shape)}"
    assert weights.shape == scores.shape[1:], f"weights is {tuple(weights.shape)}, scores {tuple(scores.shape)}"
    each = [group_advantages(column, group_size=group_size, scale=scale) for column in scores.T]
    total = (torch.stack(each, dim=1) * weights).sum(dim=1)
    return total / (_deviation(total[~scores.isnan().all(dim=1)]) + STD_EPS)


@torch.no_grad()
def turn_returns(rewards: Tensor, *, gamma: float) -> Tensor:
    """Discounted return of each turn: R[i, k] = r[i, k] + gamma R[i, k + 1], R = 0 after the last turn of episode i.

    rewards: (B, K), NaN for turns that an episode did not reach, which are its last ones -> (B, K), NaN there.
    Sums are in the precision of `rewards`: in float64, equal returns are equal in float32 too, whatever they add up.
    """
    assert rewards.dim() == 2, f"rewards must be (B, K), not {tuple(rewards.shape)}"
    returns = rewards.clone()
    for turn in reversed(range(rewards.shape[1] - 1)):
        returns[:, turn] += gamma * returns[:, turn + 1].nan_to_num()
    return returns.float()


@torch.no_grad()
def turn_advantages(returns: Tensor, *, group_size: int, scale: AdvantageScale) -> Tensor:
    """Compare each turn's return with those of the group's episodes that reached this turn: GTPO (2511.14846).

        A[i, k] = (R[i, k] - mean_j R[j, k]) / (std_j R[j, k] + 1e-4),   j over the group's episodes with a turn k

    Each column is `group_advantages` with its scale, so a turn that one episode alone reached has advantage 0, and so
    have turns with equal returns. The outcome is a reward of the last turn, and thereby in the return of every turn.
    MT-GRPO (2505.11821) normalises outcome and rewards of a turn separately and adds them; GiGPO (2505.10978) adds the
    episode's advantage, which credits a turn with rewards from before it too, and compares turns that begin in equal
    states (anchors). Here turns are compared by their number; only the first has the same state in all of a group.
    returns: (B, K) of `turn_returns`, grouped as in `group_advantages` -> (B, K); 0 where a turn was not reached.
    """
    assert returns.dim() == 2, f"returns must be (B, K), not {tuple(returns.shape)}"
    columns = [group_advantages(column, group_size=group_size, scale=scale) for column in returns.T]
    return torch.stack(columns, dim=1)


def _deviation(x: Tensor) -> Tensor:
    """Unbiased standard deviation, 0-dim; 0 for fewer than two numbers."""
    return x.std() if len(x) > 1 else x.new_zeros(())


@dataclass(frozen=True)
class Groups:
    """The scores of P prompts by group, and what is known of each group."""

    scores: Tensor  # (P, G), with the group's mean for NaN
    valid: Tensor  # (P, G): not NaN
    count: Tensor  # (P, 1): valid scores
    mean: Tensor  # (P, 1)
    varied: Tensor  # (P, 1): two scores differ


def _by_group(scores: Tensor, group_size: int) -> Groups:
    """Lay scores (B,) out by group."""
    assert scores.dim() == 1, f"scores must be (B,), not {tuple(scores.shape)}"
    assert group_size >= 1, f"group_size is {group_size}"
    assert len(scores) % group_size == 0, f"{len(scores)} scores are no multiple of group_size {group_size}"
    assert not bool(torch.isinf(scores).any()), "an infinite score: drop the row (NaN) first"
    groups = scores.float().reshape(-1, group_size)
    valid = ~torch.isnan(groups)
    mean = masked_mean(groups, valid, dim=1).unsqueeze(1)
    largest = keep_true(groups, valid, -torch.inf).amax(dim=1, keepdim=True)
    smallest = keep_true(groups, valid, torch.inf).amin(dim=1, keepdim=True)
    return Groups(
        scores=torch.where(valid, groups, mean),
        valid=valid,
        count=valid.sum(dim=1, keepdim=True),
        mean=mean,
        varied=largest > smallest,
    )


@torch.no_grad()
def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """Penalise the KL of every chosen token, put the score on the last: r[b, t] = -kl_coef kl[b, t] + [last] scores[b].

    Ziegler et al. (1909.08593) Eq. 2, per token; [last]: t is the last True token of b. 0 on False tokens; a row of
    False tokens alone may have the score NaN. scores: (B,); kl, mask: (B, T) -> (B, T).
    A score of a row with a True token has to be finite: drop the row first.
    """
    assert_shapes(mask, kl=kl)
    assert scores.shape == mask.shape[:1], f"scores is {tuple(scores.shape)}, mask is {tuple(mask.shape)}"
    scores = keep_true(scores, mask.any(dim=1))
    assert bool(torch.isfinite(scores).all()), f"scores that are not finite: {scores[~torch.isfinite(scores)].tolist()}"
    true_from_here_on = mask.long().flip(1).cumsum(1).flip(1)
    last = mask & (true_from_here_on == 1)
    return -kl_coef * keep_true(kl, mask) + torch.where(last, scores.unsqueeze(1), 0.0)
