"""Classic control with PPO: built from these functions alone, it learns problems that have nothing to do with language.

A "response" is a piece of an episode: one row per episode (cut at the end of the rollout), padded; a "token" an action.
Where a row was cut while its episode went on, gamma * V(next state) is added to its last reward.
"""

from collections.abc import Callable
from dataclasses import dataclass

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.wide
def test_ppo_learns_to_walk_right(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
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


CARTPOLE_GAMMA = 0.99


def network(num_outputs: int, last_gain: float) -> nn.Sequential:
    """Four numbers in, two hidden layers, orthogonal weights."""
    layers = [nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, num_outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class ActorCritic(nn.Module):
    """Two small networks side by side: states (..., 4) -> logits (..., 2), values (...)."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = network(2, 0.01), network(1, 1.0)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(states), self.critic(states).squeeze(-1)


def cartpoles(num_envs: int) -> SyncVectorEnv:
    """CartPole-v1: four numbers, two actions, reward 1 a step, at most 500 steps."""
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


@torch.no_grad()
def segment(envs: SyncVectorEnv, observed: np.ndarray, model: ActorCritic, num_steps: int, generator: torch.Generator):
    """`num_steps` of all environments -> tensors (E, T), the last saying where episodes end; next observation."""
    steps: list[tuple[Tensor, ...]] = []
    for t in range(num_steps):
        state = torch.from_numpy(observed)
        logits, values = model(state)
        log_softmax = logits.log_softmax(dim=-1)
        action = torch.multinomial(log_softmax.exp(), 1, generator=generator)
        observed, reward, terminated, truncated, info = envs.step(action.squeeze(1).numpy())
        ended = terminated | truncated
        follows = observed.copy()  # after an ending, the next episode's first state; the last state is in `info`
        if ended.any():
            follows[ended] = np.stack(info["final_obs"][ended])
        cut = torch.from_numpy((truncated | (t == num_steps - 1)) & ~terminated)
        _, next_values = model(torch.from_numpy(follows))
        rewards = torch.from_numpy(reward).float() + CARTPOLE_GAMMA * torch.where(cut, next_values, 0.0)
        logprobs = log_softmax.gather(1, action).squeeze(1)
        steps.append((state, action.squeeze(1), rewards, values, logprobs, torch.from_numpy(ended)))
    return [torch.stack(column, dim=1) for column in zip(*steps, strict=True)], observed


def one_row_per_episode(columns: list[Tensor]) -> Rows:
    """Cut segments (E, T) after every `ended` step into padded rows."""
    *data, ended = columns
    num_envs, num_steps = ended.shape
    starts = torch.cat([torch.ones(num_envs, 1, dtype=torch.bool), ended[:, :-1]], dim=1)
    row = starts.flatten().long().cumsum(0) - 1
    time = torch.arange(num_steps).expand(num_envs, -1).flatten()
    column = time - time[starts.flatten()][row]
    shape = (int(row[-1]) + 1, int(column.max()) + 1)

    def padded(x: Tensor) -> Tensor:
        rows = x.new_zeros(*shape, *x.shape[2:])
        rows[row, column] = x.flatten(0, 1)
        return rows

    return Rows(*(padded(x) for x in data), mask=padded(torch.ones_like(ended)))


def train_cartpole(seed: int, num_rollouts: int) -> ActorCritic:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_rollouts)
    envs = cartpoles(16)
    observed, _ = envs.reset(seed=seed)
    for _ in range(num_rollouts):
        columns, observed = segment(envs, observed, model, 128, generator)
        rows = one_row_per_episode(columns)
        improve(
            model,
            optimizer,
            rows,
            generator,
            gamma=CARTPOLE_GAMMA,
            gae_lambda=0.95,
            num_epochs=8,
            minibatch_size=max(1, len(rows.mask) // 8),
            value_clip_eps=10.0,
            entropy_coef=0.0,
        )
        schedule.step()
    envs.close()
    return model


@torch.no_grad()
def mean_return(model: ActorCritic, num_episodes: int, seed: int) -> float:
    """One episode in each of `num_episodes` environments, always taking the likelier action."""
    envs = cartpoles(num_episodes)
    observed, _ = envs.reset(seed=seed)
    returns, running = np.zeros(num_episodes), np.ones(num_episodes, dtype=bool)
    while running.any():
        logits, _ = model(torch.from_numpy(observed))
        observed, reward, terminated, truncated, _ = envs.step(logits.argmax(dim=-1).numpy())
        returns += reward * running
        running &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


@pytest.mark.release
def test_ppo_balances_the_cartpole() -> None:
    torch.manual_seed(0)
    assert mean_return(ActorCritic(), 32, seed=1000) < 200
    assert mean_return(train_cartpole(seed=0, num_rollouts=50), 32, seed=1000) >= 475
