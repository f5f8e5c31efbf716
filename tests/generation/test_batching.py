"""Independence of a sample from its batch, the order, the memory available, and which rows have finished."""

from typing import Any

import pytest
import torch

from tests.generation.sampling import PROMPTS, assert_same, make_engine, requests, sample, watch
from tests.running import LookedAt
from tests.tiny_models import TinyModels
from tinyrl.generation import hf
from tinyrl.generation.engine import Request
from tinyrl.generation.hf import split


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
@pytest.mark.wide
def test_a_sample_does_not_depend_on_its_batch(tiny: TinyModels, kind: str):
    """Alone (no padding), backwards, a few rows at a time, and split groups. EOS ends some rows early."""
    engine = make_engine(tiny(kind), max_new_tokens=24)
    engine.eos = torch.arange(1, 12)
    together = sample(engine, 4)
    assert {c.finish_reason for group in together for c in group} == {"eos", "length"}
    alone = [engine.sample([request], 4, seed=0, step=0)[0] for request in requests()]
    backwards = engine.sample(requests()[::-1], 4, seed=0, step=0)[::-1]
    assert_same(alone, together)
    assert_same(backwards, together)
    for rows in (1, 2, 3, 4, 5, 8, 100):
        engine.max_rows = rows
        assert_same(sample(engine, 4), together)


def test_dropping_finished_rows_changes_nothing(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    engine = make_engine(tiny("gemma2"), max_new_tokens=24)
    engine.eos = torch.arange(1, 12)
    widths: dict[float, list[int]] = {}
    results = []
    for share in (0.0, 0.5, 1.0):
        monkeypatch.setattr(hf, "COMPACT_BELOW", share)
        forward = hf.Decoding._forward
        seen = widths[share] = []

        def counted(self: Any, ids: torch.Tensor, *rest: Any, forward: Any = forward, seen: list[int] = seen):
            seen.append(len(ids))
            return forward(self, ids, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(hf.Decoding, "_forward", counted)
            results.append(sample(engine, 4))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])
    assert set(widths[0.0]) == {len(PROMPTS), 4 * len(PROMPTS)}  # the prompts, then every row to the end
    going = [sum(len(c.tokens) > t for group in results[0] for c in group) for t in range(24)]
    assert widths[1.0][1:] == [n for n in going[1:] if n > 0]  # exactly the rows that still go


@pytest.mark.parametrize(
    ("group", "max_rows", "expected"),
    [
        (2, 100, [([0, 1, 2], 2)]),
        (2, 4, [([0, 1], 2), ([2], 2)]),
        (2, 5, [([0, 1], 2), ([2], 2)]),
        (2, 2, [([0], 2), ([1], 2), ([2], 2)]),
        (3, 2, [([0], 2), ([0], 1), ([1], 2), ([1], 1), ([2], 2), ([2], 1)]),
        (2, 1, [([0], 1), ([0], 1), ([1], 1), ([1], 1), ([2], 1), ([2], 1)]),
    ],
)
def test_split_keeps_within_the_rows_and_groups_together_where_they_fit(
    group: int, max_rows: int, expected: list[tuple[list[int], int]]
):
    three = [Request([9], prompt_row=i, first_sample=10) for i in range(3)]
    batches = list(split(three, group, max_rows=max_rows))
    assert [([r.prompt_row for r in batch], count) for batch, count in batches] == expected
    numbers = [(r.prompt_row, r.first_sample + i) for batch, count in batches for r in batch for i in range(count)]
    assert numbers == [(prompt, 10 + i) for prompt in range(3) for i in range(group)]


@pytest.mark.parametrize(("fits", "left"), [(11, 8), (1, 1)])
def test_out_of_memory_halves_the_rows_and_gives_the_same_samples(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, fits: int, left: int
):
    engine = make_engine(tiny("llama"))
    expected = sample(engine, 4)
    sizes = []

    def no_more_than_fits(decoding: Any) -> None:
        sizes.append(decoding.num_rows)
        if decoding.num_rows > fits:
            raise torch.OutOfMemoryError("no room")

    watch(monkeypatch, no_more_than_fits)
    assert_same(sample(engine, 4), expected)
    assert engine.max_rows == left
    assert sizes[0] == 16
    assert sizes[-1] == left


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
