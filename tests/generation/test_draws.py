"""Keyed uniforms; a token by inverse CDF against a naive cumulative sum; truncation."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.generation.sampling import CPU, make_engine, sample, scored
from tests.tiny_models import TinyModels
from tinyrl.generation.drawing import draw, row_params, sample_keys, truncate_probs, uniforms
from tinyrl.generation.request import Request

LARGEST = 1.0 - 2.0**-53  # below one
WORDS = ("a", "b", "c", "d", "e")


def keys(seed: int = 0, step: int = 0, prompts: tuple[int, ...] = (0,), samples: tuple[int, ...] = (0,)) -> list[int]:
    return sample_keys(seed, step, prompts=np.array(prompts), samples=np.array(samples)).tolist()


def test_uniforms_are_those_of_splitmix64():
    """The published outputs for seed 1234567, shifted to 53 bits, whichever rows and counts are beside them."""
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    out = uniforms(np.array([3, 1234567], dtype=np.uint64), num_tokens=50)
    assert out.dtype == torch.float64
    assert out[1, :5].tolist() == [(word >> 11) / 2**53 for word in words]
    assert torch.equal(out[1:, :7], uniforms(np.array([1234567], dtype=np.uint64), num_tokens=7))


def test_every_part_of_a_key_matters():
    parts = ((0, 1, 2**63), (0, 1, 2, 1 << 40), range(5), range(5))
    grid = [keys(a, b, (c,), (d,))[0] for a in parts[0] for b in parts[1] for c in parts[2] for d in parts[3]]
    assert len(set(grid)) == len(grid)
    assert keys(1, 2, (3, 4), (5, 6)) == [*keys(1, 2, (3,), (5,)), *keys(1, 2, (4,), (6,))]


@pytest.mark.parametrize(
    ("probs", "u", "index"),
    [
        ([0.5, 0.5], 0.49, 0),
        ([0.5, 0.5], 0.5, 1),
        ([0.0, 0.5, 0.0, 0.0, 0.5, 0.0, 0.0], 0.0, 1),
        ([0.0, 0.5, 0.0, 0.0, 0.5, 0.0, 0.0], LARGEST, 4),
        ([0.0, 0.0, 3.0, 0.0, 1.0, 0.0, 0.0], 0.74, 2),  # need not add up to one
        ([0.0, 0.0, 3.0, 0.0, 1.0, 0.0, 0.0], 0.76, 4),
        ([0.0] * 9 + [1e-30] + [0.0] * 9, 0.3, 9),
    ],
)
def test_inverse_cdf_by_hand(probs: list[float], u: float, index: int):
    assert draw(torch.tensor([probs]), torch.tensor([u], dtype=torch.float64))[0].tolist() == [index]


def test_large_vocabularies_are_exact_where_a_float32_sum_is_not():
    generator = torch.Generator().manual_seed(0)
    probs = (torch.randn(151_936, generator=generator) * 2).softmax(-1)
    u = torch.rand(2000, generator=generator, dtype=torch.float64)
    exact, rounded = np.cumsum(probs.double().numpy()), np.cumsum(probs.numpy(), dtype=np.float32)
    expected = np.searchsorted(exact, u.numpy() * exact[-1], side="right")
    found = np.concatenate([draw(probs.expand(500, -1), part)[0].numpy() for part in u.split(500)])
    assert (found == expected).all()
    assert (np.searchsorted(rounded, u.numpy(), side="right") != expected).sum() > 20  # so this test would have seen it


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 1.0, [0.0, 0.5, 0.0, 0.3]),
        (0, 0.5, [0.0, 0.5, 0.0, 0.0]),
        (0, 0.51, [0.0, 0.5, 0.0, 0.3]),
        (0, 0.9, [0.15, 0.5, 0.0, 0.3]),
        (0, 1e-9, [0.0, 0.5, 0.0, 0.0]),
    ],
)
def test_truncation_by_hand(top_k: int, top_p: float, kept: list[float]):
    """Beside a row that is not truncated."""
    probs = torch.tensor([[0.15, 0.5, 0.05, 0.3]] * 2)
    request = Request([3], np.uint64(0), limit=1)
    params = row_params([replace(request, top_p=top_p, top_k=top_k), request], CPU)
    found = truncate_probs(probs, top_k=params["top_k"], top_p=params["top_p"])
    torch.testing.assert_close(found, torch.stack([torch.tensor(kept), probs[0]]))


@pytest.mark.parametrize(("options", "allowed"), [({"top_k": 3}, 3), ({"top_p": 1e-6}, 1)])
def test_truncated_samples_are_scored_by_the_whole_distribution(tiny: TinyModels, options: dict, allowed: int):
    folder, prompts = tiny("llama", vocabulary=WORDS), [[3, 4, 5]]
    logprobs = [p for [p] in scored(make_engine(folder), prompts * 8, [[t] for t in range(8)])]
    completions = sample(make_engine(folder, "fused", max_new_tokens=1, **options), 300, prompts=prompts)[0]
    assert {c.response[0] for c in completions} == set(sorted(range(8), key=lambda t: -logprobs[t])[:allowed])
    assert all(c.logprobs == pytest.approx([logprobs[c.response[0]]], abs=1e-5) for c in completions)
