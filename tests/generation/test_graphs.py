"""CUDA graphs as far as a CPU can follow them: replayed from a recording (samples from graphs: tests/gpu)."""

import pytest
import torch

from tests.generation.recording import Recording, pretend_cuda, recordable
from tinyrl.generation.scheduler import StepGraphs


def test_a_graph_is_captured_once_for_a_shape_and_its_warm_up_is_undone(monkeypatch: pytest.MonkeyPatch):
    pretend_cuda(monkeypatch)
    state, calls = torch.zeros(3), []

    def step(rows: int) -> None:
        calls.append(rows)
        state[:rows] += rows

    graphs = StepGraphs(recordable(step), state=(state,))
    for rows in (2, 2, 3, 2):
        graphs(rows)
    assert state.tolist() == [9.0, 9.0, 3.0]  # each call once, whatever warming up did
    assert calls == [2, 2, 2, 3, 3, 2]  # the first of so many rows runs twice
    assert set(graphs.graphs) == {(2,), (3,)}


@pytest.mark.parametrize("error", [RuntimeError("not permitted when stream is capturing"), torch.OutOfMemoryError()])
def test_a_step_that_cannot_be_captured_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, error: RuntimeError):
    """Warned of once; a lack of memory is an error all the same."""
    pretend_cuda(monkeypatch)
    state = torch.zeros(2)

    def step(rows: int) -> None:
        if Recording.capturing is not None:
            Recording.capturing = None
            raise error
        state[:rows] += 1

    graphs = StepGraphs(step, state=(state,))
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            graphs(1)
        return
    with pytest.warns(UserWarning, match="cannot be captured"):
        graphs(1)
    graphs(2)  # without a second try
    assert state.tolist() == [2.0, 1.0]
    assert not graphs.graphs
