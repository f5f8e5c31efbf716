"""The guard that stops a run whose rewards keep failing."""

import pytest

from tinyrl.errors import GuardStop
from tinyrl.rewards.functions import FailureGuard, describe_failure


def test_three_bad_batches_in_a_row_trip():
    guard = FailureGuard()
    guard.add(10, 3, "first", num_rewarded=7)
    guard.add(10, 10, "second", num_rewarded=0)
    with pytest.raises(GuardStop) as caught:
        guard.add(10, 4, "Prompt '2 + 2 =': `score` returned NaN", num_rewarded=6)
    assert str(caught.value) == (
        "Rewards failed for more than 20% of the rows, 3 batches in a row (last: 4 of 10). "
        "Prompt '2 + 2 =': `score` returned NaN"
    )


def test_a_fifth_is_not_more_than_a_fifth():
    guard = FailureGuard()
    for _ in range(10):
        guard.add(10, 2, "a fifth", num_rewarded=8)
    assert guard.bad_batches == 0


def test_a_good_batch_starts_the_count_again():
    guard = FailureGuard()
    for failed in [10, 10, 0, 10, 10, 2, 10, 10]:
        guard.add(10, failed, "now and then", num_rewarded=10 - failed)
    assert guard.bad_batches == 2


def test_an_empty_batch_is_no_bad_batch():
    guard = FailureGuard()
    for _ in range(5):
        guard.add(0, 0, num_rewarded=0)
    assert guard.bad_batches == 0


def test_batches_without_any_reward_trip_though_nothing_failed():
    guard = FailureGuard()
    guard.add(10, 0, num_rewarded=0)
    guard.add(10, 1, "one row", num_rewarded=0)
    with pytest.raises(GuardStop) as caught:
        guard.add(16, 0, num_rewarded=0)
    assert str(caught.value).startswith(
        "No completion got a reward, 3 batches in a row (last: 16 rows): every score was"
    )


def test_one_reward_is_enough():
    guard = FailureGuard()
    for _ in range(5):
        guard.add(10, 0, num_rewarded=1)
    assert guard.bad_batches == 0


def test_the_count_survives_a_checkpoint():
    guard = FailureGuard()
    guard.add(10, 10, "first", num_rewarded=0)
    guard.add(10, 10, "second", num_rewarded=0)
    restored = FailureGuard(guard.bad_batches)
    with pytest.raises(GuardStop, match=r"3 batches in a row .*third"):
        restored.add(10, 10, "third", num_rewarded=0)


def test_a_failure_is_described_on_one_short_line():
    assert describe_failure("2 + 2\n= ", "`score` returned NaN") == "Prompt '2 + 2 =': `score` returned NaN"
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello \x1b[2J"}]
    assert describe_failure(chat, "why") == "Prompt 'hello [ESC][2J': why"
    assert describe_failure("x" * 10_000, "why") == f"Prompt '{'x' * 79}…': why"
