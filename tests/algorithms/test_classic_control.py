"""Classic control with PPO: built from these functions alone, it learns problems that have nothing to do with language.

A "response" is a piece of an episode: one row per episode (cut at the end of the rollout), padded; a "token" an action.
Where a row was cut while its episode went on, gamma * V(next state) is added to its last reward.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from tinyrl.algorithms.advantages import gae
from tinyrl.algorithms.losses import clipped_policy_loss, clipped_value_loss, entropy_bonus
from tinyrl.algorithms.masking import masked_whiten


@dataclass
class Rows:
    """B rows of up to T actions: each (B, T), states (B, T) numbers or (B, T, 4) observations."""

    states: Tensor
    actions: Tensor
    rewards: Tensor
    values: Tensor
    logprobs: Tensor
    mask: Tensor


def improve(
    model: Callable[[Tensor], tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    rows: Rows,
    generator: torch.Generator,
    *,
    gamma: float,
    gae_lambda: float,
    num_epochs: int,
    minibatch_size: int,
    value_clip_eps: float,
    entropy_coef: float,
) -> None:
    """One PPO iteration: advantages, whitening, then epochs of minibatches of the clipped losses."""
    advantages, returns = gae(rows.rewards, rows.values, rows.mask, gamma=gamma, gae_lambda=gae_lambda)
    advantages = masked_whiten(advantages, rows.mask)
    for _ in range(num_epochs):
        for picked in torch.randperm(len(rows.mask), generator=generator).split(minibatch_size):
            mask = rows.mask[picked]
            logits, values = model(rows.states[picked])
            log_softmax = logits.log_softmax(dim=-1)
            logprobs = log_softmax.gather(-1, rows.actions[picked].unsqueeze(-1)).squeeze(-1)
            entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
            policy_loss, _ = clipped_policy_loss(
                logprobs, rows.logprobs[picked], advantages[picked], mask, clip_eps=0.2
            )
            value_loss, _ = clipped_value_loss(
                values, rows.values[picked], returns[picked], mask, value_clip_eps=value_clip_eps
            )
            bonus, _ = entropy_bonus(entropy, mask)
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss - entropy_coef * bonus).backward()
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
            optimizer.step()


# The 5-state walk: states -2 .. 2 are numbered 0 .. 4, actions are left and right. Reaching 2 pays 10 and ends a walk,
# but the way leads through 1, which costs 5; all else costs 1. A policy that looks one step ahead turns back at 0.
ARRIVAL_REWARD = torch.tensor([-1.0, -1.0, -1.0, -5.0, 10.0])
GOAL, WALK_GAMMA, WALK_STEPS = 4, 0.9, 24


def walk(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """The next state and the reward of arriving there."""
    arrived = (state + 2 * action - 1).clamp(0, GOAL)
    return arrived, ARRIVAL_REWARD[arrived]


def walk_rollout(logits: Tensor, values: Tensor, num_walks: int, generator: torch.Generator) -> Rows:
    """Walks from 0 or -1 by a tabular policy: logits (5, 2), values (5,)."""
    state = torch.randint(1, 3, (num_walks,), generator=generator)
    steps: list[tuple[Tensor, ...]] = []
    for t in range(WALK_STEPS):
        walking = state != GOAL
        log_softmax = logits[state].log_softmax(dim=-1)
        action = torch.multinomial(log_softmax.exp(), 1, generator=generator).squeeze(1)
        arrived, reward = walk(state, action)
        if t == WALK_STEPS - 1:  # cut off here
            reward = reward + WALK_GAMMA * torch.where(arrived == GOAL, 0.0, values[arrived])
        logprob = log_softmax.gather(1, action.unsqueeze(1)).squeeze(1)
        steps.append((state, action, reward, values[state], logprob, walking))
        state = torch.where(walking, arrived, state)
    return Rows(*(torch.stack(column, dim=1) for column in zip(*steps, strict=True)))


def walk_return(logits: Tensor, start: int) -> float:
    """The discounted return of always taking the likelier action, over 200 steps."""
    state, total = torch.tensor(start), 0.0
    for t in range(200):
        if int(state) == GOAL:
            break
        state, reward = walk(state, logits[state].argmax())
        total += WALK_GAMMA**t * float(reward)
    return total


def test_greedy_for_reward_never_arrives() -> None:
    state = torch.arange(4)
    one_step = torch.stack([walk(state, torch.full((4,), action))[1] for action in (0, 1)], dim=1)
    assert walk_return(one_step, start=2) == pytest.approx(-10.0, abs=1e-3)  # -1 for ever: -1 / (1 - 0.9)
    assert walk_return(one_step, start=1) == pytest.approx(-10.0, abs=1e-3)


def test_ppo_learns_to_walk_right() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, values = torch.zeros(5, 2, requires_grad=True), torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.Adam([{"params": [logits], "lr": 0.1}, {"params": [values], "lr": 0.3}])
    for _ in range(40):
        rows = walk_rollout(logits.detach(), values.detach(), 64, generator)
        improve(
            lambda states: (logits[states], values[states]),
            optimizer,
            rows,
            generator,
            gamma=WALK_GAMMA,
            gae_lambda=0.95,
            num_epochs=4,
            minibatch_size=32,
            value_clip_eps=2.0,
            entropy_coef=0.02,
        )
    right = logits.softmax(dim=-1)[:4, 1].tolist()
    assert right[0] > 0.5  # -2, where a walk that goes right never comes
    assert right[1:] == pytest.approx([1.0] * 3, abs=0.05)
    assert walk_return(logits.detach(), start=2) == pytest.approx(4.0)  # -5 + 0.9 * 10
    assert walk_return(logits.detach(), start=1) == pytest.approx(2.6)  # -1 + 0.9 * 4
    # What the value learned: those two, and 10 one step before the goal.
    assert values[1:4].tolist() == pytest.approx([2.6, 4.0, 10.0], abs=0.5)
