"""Micro-batches of rows that share prompts: which go through the model together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinyrl.errors import OutOfRoom
from tinyrl.models.batches import MicroBatches, RowSizes, Work

# Two groups of four after prompts of 10 and 6, and a row by itself.
PROMPTS = [[1] * 10] * 4 + [[2] * 6] * 4 + [[3] * 2]
RESPONSES = [5, 1, 3, 9, 2, 2, 2, 2, 8]
SIZES = RowSizes.of(PROMPTS, RESPONSES, packed=True)


def test_what_rows_cost():
    assert SIZES.cost(range(4)) == 10 + 18
    assert SIZES.cost([0, 4, 5]) == 10 + 5 + 6 + 4
    assert SIZES.lengths == [15, 11, 13, 19, 8, 8, 8, 8, 10]
    padded = RowSizes.of(PROMPTS, RESPONSES, packed=False)
    assert padded.cost([0, 4, 5]) == 3 * 15
    assert RowSizes.alone([4, 2], packed=True).cost([0, 1]) == 6


def test_a_start_that_all_prompts_share_costs_once():
    """10 tokens, behind which the prompts of two groups have 2 and 3, and a row 1."""
    start = [0] * 10
    sizes = RowSizes.of([[*start, 1, 1]] * 2 + [[*start, 2, 2, 2]] * 2 + [[*start, 3]], [4, 4, 5, 5, 6], packed=True)
    assert [sizes.cost(rows) for rows in ([0], [0, 1], [0, 2], range(5))] == [16, 20, 10 + 6 + 8, 10 + 10 + 13 + 7]
    assert sizes.plan(range(5), max_tokens=33) == [[2, 3, 0, 1], [4]]
    assert RowSizes.of([[*start, 1], [*start, 2]], [1, 1], packed=False).cost([0, 1]) == 24


@pytest.mark.parametrize(
    ("max_tokens", "plan"),
    [
        (100, [[0, 1, 2, 3, 4, 5, 6, 7, 8]]),
        (51, [[0, 1, 2, 3, 4, 5, 6, 7], [8]]),  # 28 + 14 = 42, and 10 more are too many
        (28, [[0, 1, 2, 3], [4, 5, 6, 7, 8]]),  # 14 + 10
        (27, [[4, 5, 6, 7, 8], [0, 1, 2], [3]]),  # 28 is over: 10 + 5 + 1 + 3 and 10 + 9; 14 + 10
        (14, [[3], [0], [1, 2], [4, 5, 6, 7], [8]]),  # 19 and 15 are over the budget and go alone; 10 + 1 + 3
        (9, [[3], [0], [2], [1], [8], [4], [5], [6], [7]]),
    ],
)
def test_groups_share_their_prompt_while_they_fit_and_are_split_after_that(max_tokens: int, plan: list[list[int]]):
    assert SIZES.plan(range(9), max_tokens=max_tokens) == plan


def test_less_room_breaks_the_widest_until_every_row_is_alone():
    """The row of 90 is alone from the start and does not hide that the others can still be split."""
    sizes = RowSizes.of([[1], [1], [1], [2]], [5, 5, 5, 89], packed=True)
    plan, seen = sizes.plan(range(4), max_tokens=1000), []
    while (budget := sizes.smaller(plan)) is not None:
        plan = sizes.plan(range(4), max_tokens=budget)
        seen.append((budget, plan))
    assert seen == [(53, [[3], [0, 1, 2]]), (8, [[3], [0], [1], [2]])]
    padded = RowSizes.alone([20, 20, 100], packed=False)
    assert padded.smaller([[2], [0, 1]]) == 20
    assert padded.smaller([[2], [0], [1]]) is None


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=20),
    st.integers(1, 80),
    st.booleans(),
)
def test_plans_hold_every_row_once_within_the_budget(rows: list[tuple[int, int]], max_tokens: int, packed: bool):
    sizes = RowSizes.of([[g] * (3 * g + 1) for g, _ in rows], [n for _, n in rows], packed=packed)
    plan = sizes.plan(range(len(rows)), max_tokens=max_tokens)
    assert sorted(row for micro in plan for row in micro) == list(range(len(rows)))
    assert all(len(micro) == 1 or sizes.cost(micro) <= max_tokens for micro in plan)


def test_out_of_memory_starts_over_with_smaller_micro_batches():
    """Real allocations: more than two rows together ask for more memory than any machine has."""
    sizes, seen = RowSizes.alone([10, 10, 10, 10, 10], packed=True), []

    def run(rows: list[int]) -> None:
        seen.append(rows)
        if len(rows) > 2:
            torch.empty(1 << 50)

    micro_batches = MicroBatches(torch.device("cpu"), 100)
    micro_batches.run(Work(sizes, run), restart=seen.clear)
    assert micro_batches.tokens < 100  # what comes later begins with what was found
    assert seen == [[0, 1], [2, 3], [4]]

    def never(rows: list[int]) -> None:
        torch.empty(1 << 50)

    with pytest.raises(OutOfRoom, match="one sequence of 10 tokens"):
        micro_batches.run(Work(sizes, never))


def test_the_first_micro_batch_on_a_gpu_sets_the_budget() -> None:
    """1,000 tokens took 2 MB, and 0.8 of 40 MB are for a micro-batch: 16,000 tokens."""
    gpu = MicroBatches(torch.device("cuda"))
    assert gpu.unmeasured
    gpu.fit(cost=1000, taken=2_000_000, free=40_000_000)
    assert gpu.tokens == 16_000
    assert not gpu.unmeasured
    gpu.fit(cost=1000, taken=2_000_000, free=1_000_000)
    assert gpu.tokens == 1000  # it fitted; where it no longer does, memory running out halves it
    assert not MicroBatches(torch.device("cuda"), 4096).unmeasured
    assert not MicroBatches(torch.device("cpu")).unmeasured
