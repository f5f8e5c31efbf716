"""The path a GPU takes, as far as a CPU can follow it.

Steps in buckets of rows are replayed from a recording whose warm-up is undone, and finished rows are looked for only
now and then.
"""

from typing import Any

import pytest
import torch

from tests.generation.recording import pretend_cuda, record_steps, recordable
from tests.generation.sampling import assert_same, make_engine, sample
from tests.tiny_models import TinyModels
from tinyrl.generation import fused
from tinyrl.generation.fused import FusedEngine
from tinyrl.generation.scheduler import StepGraphs


@pytest.fixture(autouse=True)
def _pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)


def test_a_graph_is_captured_once_for_a_shape_and_its_warm_up_is_undone():
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


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """From here on engines decode by graphs; the rows that graphs were asked for."""
    seen: set[int] = set()
    call = StepGraphs.__call__

    def noted(self: StepGraphs, rows: int, *mode: bool) -> None:
        seen.add(rows)
        call(self, rows, *mode)

    begin = FusedEngine.__init__

    def with_graphs(self: FusedEngine, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        self.by_graphs = True

    record_steps(monkeypatch)
    monkeypatch.setattr(FusedEngine, "__init__", with_graphs)
    monkeypatch.setattr(StepGraphs, "__call__", noted)
    monkeypatch.setattr(fused, "WIDTH_BUCKET", 8)
    return seen


@pytest.mark.parametrize("max_rows", [3, None])
def test_samples_from_graphs_are_the_same_samples(tiny: TinyModels, shapes: set[int], max_rows: int | None):
    """Rows are rounded up, so empty slots are computed as well."""
    slow, engine = (make_engine(tiny("qwen3"), name, max_new_tokens=40) for name in ("hf", "fused"))
    slow.eos = engine.eos = set(range(1, 16))
    engine.max_rows, engine.look_every = max_rows, 5
    assert_same(sample(engine, 4), sample(slow, 4))
    assert shapes <= {1, 2, 3, 4, 6, 8, 16}
    assert len(shapes) > 1
