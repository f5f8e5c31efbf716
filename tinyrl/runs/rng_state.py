"""Random generator states of Python, NumPy and torch, as JSON and tensors: for dropout and users' code, since sampling,
minibatches and prompts are keyed.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # which takes 32 bits
    torch.manual_seed(seed)


def torch_rng() -> dict[str, Tensor]:
    """Return the states of torch's generators, which dropout draws from."""
    on_gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"torch": torch.get_rng_state(), **on_gpu}


def restore_torch_rng(tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def python_rng() -> list[Any]:
    """Return the state of `random`, as JSON."""
    kind, numbers, gauss = random.getstate()
    return [kind, list(numbers), gauss]


def rng_tensors() -> dict[str, Tensor]:
    """Return the states of torch's and NumPy's generators. MT19937's is 624 words, a position and a cached Gaussian."""
    _, words, *rest = np.random.get_state()
    numpy_words = torch.from_numpy(np.asarray(words).astype(np.int64))
    return torch_rng() | {"numpy_words": numpy_words, "numpy_rest": torch.tensor(rest, dtype=torch.float64)}


def restore_rng(tensors: dict[str, Tensor], python_state: list[Any]) -> None:
    """Restore what `rng_tensors` and `python_rng` gave."""
    kind, numbers, gauss = python_state
    random.setstate((kind, tuple(numbers), gauss))
    restore_torch_rng(tensors)
    position, has_gauss, cached = tensors["numpy_rest"].tolist()
    words = tensors["numpy_words"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(position), int(has_gauss), cached))
