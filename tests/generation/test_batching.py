"""Independence of a sample from its batch, the order, the memory available, and which rows have finished."""

import pytest
import torch

from tests.generation.sampling import PROMPTS, assert_same, make_engine, requests, sample
from tests.running import LookedAt
from tests.tiny_models import TinyModels
from tinyrl.generation import engines


def test_a_sample_does_not_depend_on_its_batch(tiny: TinyModels):
    """Alone (no padding), backwards, a few rows at a time, and split groups. EOS ends some rows early."""
    engine = make_engine(tiny("gemma2"), max_new_tokens=24)
    engine.eos = set(range(1, 12))
    together = sample(engine, 4)
    assert {c.finish_reason for group in together for c in group} == {"eos", "length"}
    alone = [engine.sample([request], 4, seed=0, step=0)[0] for request in requests()]
    backwards = engine.sample(requests()[::-1], 4, seed=0, step=0)[::-1]
    assert_same(alone, together)
    assert_same(backwards, together)
    for rows, look_every in ((1, 1), (3, 4), (5, 1), (100, 5)):
        engine.max_rows, engine.look_every = rows, look_every
        assert_same(sample(engine, 4), together)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each forward pass."""
    seen: list[int] = []
    forward = engines.LibraryScheduler._forward

    def noted(self: engines.LibraryScheduler, ids: torch.Tensor) -> torch.Tensor:
        seen.append(len(ids))
        return forward(self, ids)

    monkeypatch.setattr(engines.LibraryScheduler, "_forward", noted)
    return seen


def test_dropping_finished_rows_changes_nothing(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, batches: list[int]):
    engine = make_engine(tiny("gemma2"), max_new_tokens=24)
    engine.eos = set(range(1, 12))
    widths, results = {}, []
    for share in (0.0, 0.5, 1.0):
        monkeypatch.setattr(engines, "COMPACT_BELOW", share)
        batches.clear()
        results.append(sample(engine, 4))
        widths[share] = [*batches]
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])
    assert set(widths[0.0]) == {len(PROMPTS), 4 * len(PROMPTS)}  # the prompts, then every row to the end
    going = [sum(len(c.tokens) > t for group in results[0] for c in group) for t in range(24)]
    assert widths[1.0][1:] == [n for n in going[1:] if n > 0]  # exactly the rows that still go


def test_a_signal_is_looked_for_at_every_token_and_the_policy_acts_again(tiny: TinyModels):
    looks = []

    def stop_at_the_third() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise KeyboardInterrupt

    engine = make_engine(tiny("llama"), lora=True)
    with LookedAt(stop_at_the_third), pytest.raises(KeyboardInterrupt):
        sample(engine, role="base")
    assert len(looks) == 3
    assert not any(layer._disable_adapters for layer in engine.roles._layers)
