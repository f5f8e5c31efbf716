"""Random generator states, restored exactly."""

import json
import random

import numpy as np
import torch

from tinyrl.models.device import python_rng, restore_rng, rng_tensors, seed_generators


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))


def test_round_trip_through_json() -> None:
    draw()  # leaves a cached Gaussian in both of Python's and NumPy's generators
    tensors, python = rng_tensors(), json.loads(json.dumps(python_rng()))
    expected = [draw() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert [draw() for _ in range(3)] != expected
    restore_rng(tensors, python)
    assert [draw() for _ in range(3)] == expected


def test_every_generator_that_is_saved_is_seeded() -> None:
    drawn = []
    for seed in (0, 0, 1, 10**17, 10**17):
        seed_generators(seed)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert drawn[3] == drawn[4]
    assert all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))
