"""Keyed uniforms, and sampling by inverse CDF against a naive cumulative sum."""

import math

import numpy as np
import pytest
import torch

from tinyrl.generation.engine import draw, sample_keys, uniforms

LARGEST = 1.0 - 2.0**-53  # below one


def keys(seed: int = 0, step: int = 0, prompts: tuple[int, ...] = (0,), samples: tuple[int, ...] = (0,)) -> list[int]:
    return sample_keys(seed, step, prompts=np.array(prompts), samples=np.array(samples)).tolist()


def test_uniforms_are_those_of_splitmix64():
    """The published outputs of the generator for seed 1234567, shifted to 53 bits."""
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    out = uniforms(np.array([1234567], dtype=np.uint64), num_tokens=5)
    assert out.dtype == torch.float64
    assert out.tolist() == [[(word >> 11) / 2**53 for word in words]]


def test_a_uniform_does_not_depend_on_how_many_are_drawn_or_with_whom():
    two = np.array([3, 2**64 - 1], dtype=np.uint64)
    many = uniforms(two, num_tokens=50)
    assert torch.equal(uniforms(two, num_tokens=7), many[:, :7])
    assert torch.equal(uniforms(two[1:], num_tokens=50), many[1:])


def test_every_part_of_a_key_matters():
    grid = {
        (seed, step, prompt, sample): keys(seed, step, (prompt,), (sample,))[0]
        for seed in (0, 1, 2**63)
        for step in (0, 1, 2, 1 << 40)
        for prompt in range(5)
        for sample in range(5)
    }
    assert len(set(grid.values())) == len(grid)
    together = keys(1, 2, (3, 4), (5, 6))
    assert together == [*keys(1, 2, (3,), (5,)), *keys(1, 2, (4,), (6,))]


@pytest.mark.parametrize("along", ["tokens", "samples", "prompts", "steps", "seeds"])
def test_uniforms_are_uniform_and_uncorrelated(along: str):
    n = 20_000
    if along == "tokens":
        u = uniforms(np.array(keys(), dtype=np.uint64), num_tokens=n)[0]
    elif along in ("samples", "prompts"):
        numbers, zeros = np.arange(n), np.zeros(n, dtype=np.int64)
        prompts, samples = (numbers, zeros) if along == "prompts" else (zeros, numbers)
        u = uniforms(sample_keys(0, 0, prompts=prompts, samples=samples), num_tokens=1)[:, 0]
    else:
        several = [keys(i, 0) if along == "seeds" else keys(0, i) for i in range(n // 10)]
        u = uniforms(np.array(several, dtype=np.uint64)[:, 0], num_tokens=1)[:, 0]
    ordered, count = u.sort().values, len(u)
    # Kolmogorov-Smirnov at 0.1 %: 1.95 / sqrt(n)
    ranks = torch.arange(1, count + 1, dtype=torch.float64) / count
    assert float((ordered - ranks).abs().max()) < 1.95 / math.sqrt(count)
    for lag in (1, 2, 7):
        correlation = float(torch.corrcoef(torch.stack([u[:-lag], u[lag:]]))[0, 1])
        assert abs(correlation) < 3.3 / math.sqrt(count)
    assert float(u.min()) >= 0.0
    assert float(u.max()) < 1.0


@pytest.mark.parametrize(
    ("probs", "u", "index"),
    [
        ([0.5, 0.5], 0.0, 0),
        ([0.5, 0.5], 0.49, 0),
        ([0.5, 0.5], 0.5, 1),
        ([0.0, 0.5, 0.0, 0.0, 0.5, 0.0, 0.0], 0.0, 1),
        ([0.0, 0.5, 0.0, 0.0, 0.5, 0.0, 0.0], 0.5, 4),
        ([0.0, 0.5, 0.0, 0.0, 0.5, 0.0, 0.0], LARGEST, 4),
        ([0.0, 0.0, 3.0, 0.0, 1.0, 0.0, 0.0], 0.74, 2),  # need not add up to one
        ([0.0, 0.0, 3.0, 0.0, 1.0, 0.0, 0.0], 0.76, 4),
        ([0.0] * 9 + [1e-30] + [0.0] * 9, 0.3, 9),
    ],
)
def test_inverse_cdf_by_hand(probs: list[float], u: float, index: int):
    assert draw(torch.tensor([probs]), torch.tensor([u], dtype=torch.float64))[0].tolist() == [index]


def test_entries_of_probability_zero_are_never_drawn():
    """Above all at the edges of their neighbours: exact sums in quarters, and uniforms on every boundary."""
    generator = torch.Generator().manual_seed(0)
    quarters = torch.randint(0, 3, (400, 50), generator=generator) * 0.25
    quarters[:, 25] += 0.25
    cdf = quarters.double().cumsum(-1)
    for column in range(0, 50, 7):
        for nudge in (-1e-16, 0.0, 1e-16):
            u = (cdf[:, column] / cdf[:, -1] + nudge).clamp(0.0, LARGEST)
            drawn = draw(quarters, u)[0]
            assert (quarters.gather(1, drawn.unsqueeze(1)) > 0).all()


def test_large_vocabularies_are_exact_where_a_float32_sum_is_not():
    generator = torch.Generator().manual_seed(0)
    probs = (torch.randn(4, 151_936, generator=generator) * 2).softmax(-1)
    u = torch.rand(4, 500, generator=generator, dtype=torch.float64)
    wrong_in_float32 = 0
    for row in range(4):
        exact = np.cumsum(probs[row].double().numpy())
        expected = np.searchsorted(exact, u[row].numpy() * exact[-1], side="right")
        drawn = draw(probs[row].expand(500, -1), u[row])[0].numpy()
        assert (drawn == expected).all()
        rounded = np.cumsum(probs[row].numpy(), dtype=np.float32)
        wrong_in_float32 += int((np.searchsorted(rounded, u[row].numpy(), side="right") != expected).sum())
    assert wrong_in_float32 > 20  # so this test would have seen it
