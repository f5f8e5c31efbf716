"""GAE, returns, group advantages and rewards of tokens against literals and naive loops over plain Python lists."""

import math
import statistics

import pytest
import torch

from tinyrl.algorithms.advantages import (
    AdvantageScale,
    decoupled_advantages,
    discounted_returns,
    gae,
    group_advantages,
    rloo_advantages,
    token_rewards,
    turn_advantages,
    turn_returns,
)

NAN = math.nan


def test_gae_by_hand_with_a_tool_span() -> None:
    rewards = torch.tensor([[0.0, NAN, 1.0, 2.0, 7.0], [NAN, 1.0, NAN, NAN, NAN]])
    values = torch.tensor([[1.0, NAN, 2.0, 4.0, math.inf], [NAN, 0.25, NAN, math.inf, NAN]])
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 0]]).bool()
    advantages, returns = gae(rewards, values, mask, gamma=0.5, gae_lambda=0.25)
    # deltas 0 + 1 - 1 = 0, 1 + 2 - 2 = 1, 2 + 0 - 4 = -2; weights 1, 1/8, 1/64
    assert advantages.tolist() == [[0.09375, 0.0, 0.75, -2.0, 0.0], [0.0, 0.75, 0.0, 0.0, 0.0]]
    assert returns.tolist() == [[1.09375, 0.0, 2.75, 2.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]]
    assert advantages.dtype == returns.dtype == torch.float32
    assert not gae(rewards, values.requires_grad_(), mask, gamma=0.5, gae_lambda=0.5)[1].requires_grad
    empty = gae(torch.ones(3, 0), torch.ones(3, 0), torch.ones(3, 0).bool(), gamma=1.0, gae_lambda=1.0)
    assert [x.shape for x in empty] == [(3, 0), (3, 0)]


def test_discounted_returns_by_hand() -> None:
    rewards, mask = torch.tensor([[1.0, NAN, 4.0, 8.0, 100.0]]), torch.tensor([[1, 0, 1, 1, 0]]).bool()
    # 8; 4 + 8/2; 1 + 8/2, over the False token
    assert discounted_returns(rewards, mask, gamma=0.5)[0].tolist() == [5.0, 0.0, 8.0, 8.0, 0.0]
    assert discounted_returns(rewards, mask, gamma=1.0)[0].tolist() == [13.0, 0.0, 12.0, 8.0, 0.0]


def test_group_advantages_by_hand() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0, 6.0, NAN, 3.0])
    # First group: mean 2, squares 1 + 1 + 0 + 0, variance 2/3. Second: 0, 6, 3 are valid: mean 3, variance 9.
    first, second = math.sqrt(2 / 3) + 1e-4, 3.0 + 1e-4
    want = [-1 / first, 1 / first, 0.0, 0.0, -3 / second, 3 / second, 0.0, 0.0]
    got = group_advantages(scores, group_size=4, scale="std")
    assert got.tolist() == pytest.approx(want, rel=1e-6)
    assert got.dtype == torch.float32
    assert group_advantages(scores, group_size=4, scale="none").tolist() == [-1.0, 1.0, 0.0, 0.0, -3.0, 3.0, 0.0, 0.0]


def test_the_deviation_of_a_batch_keeps_how_far_groups_spread() -> None:
    """Lite PPO: a group that spreads three times as far has three times the advantages; TRL's scale_rewards="batch"."""
    scores = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0, 6.0, NAN, 5.0])
    deviation = statistics.stdev([1.0, 3.0, 2.0, 2.0, 0.0, 6.0, 5.0]) + 1e-4
    want = [-1 / deviation, 1 / deviation, 0.0, 0.0, -3 / deviation, 3 / deviation, 0.0, 0.0]
    assert group_advantages(scores, group_size=2, scale="batch").tolist() == pytest.approx(want, rel=1e-6)
    alone = torch.tensor([NAN, 2.0])
    assert group_advantages(alone, group_size=2, scale="batch").tolist() == [0.0, 0.0]


def test_gdpo_by_hand() -> None:
    """Pairs: both rewards differ; flat in one, and the other does not apply; no reward at all; flat in both."""
    scores = torch.tensor(
        [[0.0, 10.0], [4.0, 70.0], [NAN, 5.0], [NAN, 5.0], [NAN, NAN], [NAN, NAN], [1.0, 2.0], [1.0, 2.0]]
    )
    # of a pair d apart each is d / 2 off the mean, and the deviation is d / sqrt(2)
    total = 2.0 / (math.sqrt(8.0) + 1e-4) - 0.5 * 30.0 / (math.sqrt(1800.0) + 1e-4)
    deviation = math.sqrt(2 * total**2 / 5) + 1e-4  # six rows have a reward
    got = decoupled_advantages(scores, weights=torch.tensor([1.0, -0.5]), group_size=2).tolist()
    assert got == pytest.approx([-total / deviation, total / deviation, 0, 0, 0, 0, 0, 0], rel=1e-5)


@pytest.mark.parametrize("group", [[0.1, 0.1, 0.1], [0.7, NAN, 0.7], [NAN, NAN, 5.0], [NAN, NAN, NAN], [1e30] * 3])
def test_groups_without_spread_give_exactly_zero(group: list[float]) -> None:
    # 0.1 * 3 / 3 is not 0.1 in float32: only an explicit zero is exact
    scores = torch.tensor(group)
    for scale in ("std", "batch", "none"):
        assert group_advantages(scores, group_size=3, scale=scale).tolist() == [0.0, 0.0, 0.0]
    assert rloo_advantages(scores, group_size=3).tolist() == [0.0, 0.0, 0.0]


def test_rloo_by_hand_and_by_its_definition() -> None:
    scores = [1.0, 2.0, 6.0, NAN, 0.5, 4.0, 4.0, -1.0]
    got = rloo_advantages(torch.tensor(scores), group_size=4).tolist()
    assert got[:4] == pytest.approx([-3.0, -1.5, 4.5, 0.0])
    for i in range(4, 8):
        others = [scores[j] for j in range(4, 8) if j != i]
        assert got[i] == pytest.approx(scores[i] - sum(others) / 3, rel=1e-6)


# Six episodes of two prompts: rewards of turns; one that has no reward at all; turn 3 is reached by one of each group.
TURNS: list[list[float]] = [[1.0, 2.0, 4.0], [3.0], [0.5, 2.5], [0.0, 0.0, 1.0], [], [0.25, 4.0]]
REWARDS = torch.tensor([[*turns, *[NAN] * (3 - len(turns))] for turns in TURNS], dtype=torch.float64)


def test_the_return_of_a_turn_is_what_comes_from_it_on() -> None:
    returns = turn_returns(REWARDS, gamma=0.5)
    want = [3.0, 4.0, 4.0, 3.0, NAN, NAN, 1.75, 2.5, NAN, 0.25, 0.5, 1.0, NAN, NAN, NAN, 2.25, 4.0, NAN]
    assert returns.flatten().tolist() == pytest.approx(want, nan_ok=True)
    assert returns.dtype == torch.float32
    assert turn_returns(REWARDS, gamma=0.0).nan_to_num().equal(REWARDS.float().nan_to_num())


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_a_turn_is_compared_with_those_of_the_group_that_reached_it(*, gamma: float, scale: AdvantageScale) -> None:
    got = turn_advantages(turn_returns(REWARDS, gamma=gamma), group_size=3, scale=scale)
    for i, turns in enumerate(TURNS):
        group = [j for j in range(6) if j // 3 == i // 3]
        for k in range(3):
            there = [sum(r * gamma**n for n, r in enumerate(TURNS[j][k:])) for j in group if len(TURNS[j]) > k]
            own = sum(r * gamma**n for n, r in enumerate(turns[k:]))
            apart = own - statistics.mean(there)
            deviation = statistics.stdev(there) + 1e-4 if len(there) > 1 and scale == "std" else 1.0
            want = apart / deviation if len(turns) > k and len(there) > 1 else 0.0
            assert float(got[i, k]) == pytest.approx(want, rel=1e-5), (i, k)


def test_a_turn_that_one_episode_alone_reached_has_no_advantage() -> None:
    got = turn_advantages(turn_returns(REWARDS, gamma=1.0), group_size=3, scale="batch")
    assert got[:, 2].tolist() == [0.0] * 6
    assert got[:2, 1].tolist() != [0.0, 0.0]


def test_returns_that_add_up_in_another_order_are_equal() -> None:
    """In float32 0.1 + (0.3 + 1.1) is not 0.3 + (1.1 + 0.1), and the difference would be an advantage."""
    rewards = torch.tensor([[0.1, 0.3, 1.1], [0.3, 1.1, 0.1]], dtype=torch.float64)
    assert turn_advantages(turn_returns(rewards, gamma=1.0), group_size=2, scale="std")[:, 0].tolist() == [0.0, 0.0]


def test_one_turn_is_the_advantage_of_the_group() -> None:
    scores = torch.tensor([1.0, 3.0, NAN, 2.0, 0.0, 6.0])
    for scale in ("std", "batch", "none"):
        by_turn = turn_advantages(turn_returns(scores.double().unsqueeze(1), gamma=0.5), group_size=3, scale=scale)
        assert by_turn.squeeze(1).equal(group_advantages(scores, group_size=3, scale=scale))


def test_token_rewards_by_hand() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]]).bool()  # tool spans, padding, nothing
    kl = torch.tensor([[1.0, 2.0, -4.0, NAN], [1.0, NAN, 2.0, math.inf], [NAN, 0.5, 9.0, 0.0], [NAN, 1.0, 1.0, 1.0]])
    scores = torch.tensor([10.0, -1.0, 3.0, NAN], dtype=torch.bfloat16, requires_grad=True)
    rewards = token_rewards(scores, kl, mask, kl_coef=0.5)
    assert rewards.tolist() == [
        [-0.5, -1.0, 12.0, 0.0],
        [-0.5, 0.0, -2.0, 0.0],
        [0.0, -0.25, 0.0, 3.0],
        [0.0, 0.0, 0.0, 0.0],
    ]
    assert rewards.dtype == torch.float32
    assert not rewards.requires_grad


def test_a_score_that_is_not_finite_is_refused() -> None:
    for score in (NAN, math.inf):
        with pytest.raises(AssertionError, match="not finite"):
            token_rewards(torch.tensor([score]), torch.zeros(1, 2), torch.tensor([[True, False]]), kl_coef=0.0)
