"""What a worker measures of a call: its slowest row."""

import pytest

from tinyrl.workers import worker
from tinyrl.workers.worker import RowTimer


@pytest.mark.parametrize(("end", "slowest"), [(5.0, (2.0, 0)), (6.0, None)])
def test_the_slowest_row_is_known_where_most_of_a_call_went_into_loops_over_rows(
    end: float, slowest: tuple[float, int] | None, monkeypatch: pytest.MonkeyPatch
):
    """Two rows take 2 s and 1 s of a call that begins at 0."""
    clock = iter((0.0, 1.0, 3.0, 3.0, 4.0, end))
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(clock))
    timer = RowTimer(2)
    assert [*timer.timed(["a", "b"])] == ["a", "b"]
    assert timer.slowest() == slowest
