"""The guard that stops a run whose rewards keep failing."""

import pytest

from tinyrl.errors import GuardStop
from tinyrl.rewards.functions import count_bad_batches, describe_failure


def counted(*batches: tuple[int, int, int], before: int = 0) -> int:
    """After batches of (rows, failed, rewarded)."""
    for rows, failed, rewarded in batches:
        why = f"{failed} of them"
        before = count_bad_batches(before, rows=rows, failed=failed, rewarded=rewarded, first_failure=why)
    return before


def test_three_bad_batches_in_a_row_trip():
    assert counted((10, 3, 7), (10, 10, 0)) == 2
    with pytest.raises(GuardStop) as caught:
        counted((10, 4, 6), before=2)
    for said in ("more than 20%", "3 batches in a row", "last: 4 of 10", "4 of them"):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("batches", "count"),
    [
        ([(10, 2, 8)] * 10, 0),  # a fifth is not more than a fifth
        ([(10, failed, 10 - failed) for failed in (10, 10, 0, 10, 10, 2, 10, 10)], 2),  # a good one starts it again
        ([(0, 0, 0)] * 5, 0),  # an empty one is not bad
        ([(10, 0, 1)] * 5, 0),  # one reward is enough
    ],
)
def test_batches_that_do_not_trip(batches: list[tuple[int, int, int]], count: int):
    assert counted(*batches) == count


def test_batches_without_any_reward_trip_though_nothing_failed():
    assert counted((10, 0, 0), (10, 1, 0)) == 2
    with pytest.raises(GuardStop, match=r"No completion got a reward, 3 batches in a row \(last: 16 rows\)"):
        counted((16, 0, 0), before=2)


def test_a_failure_is_described_on_one_short_line():
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello\n\x1b[2J"}]
    assert describe_failure(chat, "why") == "Prompt 'hello [ESC][2J': why"
    assert len(describe_failure("x" * 10_000, "why")) < 100
