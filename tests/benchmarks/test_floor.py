"""The arithmetic floor: operations counted by hand on a toy, seconds at given rates, and a floor that is none."""

import pytest

from benchmarks.floor import fastest, operations, seconds_of, sentence
from benchmarks.work import Grpo, Shape

TOY = Shape("toy", hidden=2, layers=1, intermediate=3, heads=1, kv_heads=1, head_size=2, vocabulary=5)
RATES = {"decode": {"layers": 2e9, "head": 1e9}, "packed": {"layers": 4e9, "head": 1e9}}


def test_operations_of_a_toy_by_hand():
    """One prompt of 4 tokens, two completions of 3: 6 completion tokens, 10 with the prompt, which counts once.

    Matrices: four of 2 x 2 and three of 2 x 3, 34 weights: 2 * 34 * 10 = 680. Head: 2 * 5 * 2 * 6 = 120. Pairs of a
    query and a key: 6 * (4 + 1.5) of completions and 4 * 4 / 2 of the prompt, 41, each 4 * 2: 328. LoRA of rank 1 has
    4 * (2 + 2) + 3 * (2 + 3) = 31 weights: 2 * 31 * 10 = 620, and twice that backward.
    """
    found = operations(TOY, 3, work=Grpo(num_prompts=1, group_size=2), prompt=4, lora_rank=1)
    frozen = {"layers": 680, "head": 120, "attention": 328}
    assert found == {
        "sampling": frozen,
        "reference": frozen,
        "forward": {**frozen, "lora": 620},
        "backward": {"layers": 680, "head": 120, "attention": 656, "lora": 1240},
    }


def test_each_kind_of_product_counts_at_its_own_rate():
    """Sampling 8 / 2 + 1 / 1 = 5 seconds; the three others (4 / 4 + 2 / 1) + 8 / 4 + 4 / 4 = 6."""
    count = {
        "sampling": {"layers": 8e9, "head": 1e9},
        "reference": {"layers": 4e9, "head": 2e9},
        "forward": {"layers": 8e9},
        "backward": {"layers": 4e9},
    }
    assert seconds_of(count, RATES) == {"sampling": 5.0, "update": 6.0, "seconds": 11.0}


def test_a_floor_above_the_fastest_step_is_refused():
    floor = {"seconds": 2.0, "sampling": 0.5, "update": 1.5, "rates": RATES}
    assert "3.00 times" in sentence(floor, [5.0, 6.0, 7.0])
    assert "1.50 times" in sentence(floor, [2.0, 3.0, 9.0])
    refused = sentence(floor, [1.9, 6.0, 7.0])
    assert refused.startswith("no arithmetic floor")
    assert "times" not in refused


def test_the_fastest_call_counts(monkeypatch: pytest.MonkeyPatch):
    """Of three calls of 5, 1 and 3 seconds by a clock that is read before and after all of them, too."""
    ticks = iter([0, 0, 5, 5, 6, 6, 9, 9])
    monkeypatch.setattr("benchmarks.floor.time.perf_counter", lambda: next(ticks))
    monkeypatch.setattr("benchmarks.floor.SECONDS_A_PRODUCT", 0)
    assert fastest(lambda: None) == 1
