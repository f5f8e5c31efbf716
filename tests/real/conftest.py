"""The folder of a real model, named by TINYRL_REAL_MODEL; without it these tests are skipped."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

VARIABLE = "TINYRL_REAL_MODEL"


@pytest.fixture(scope="session")
def real() -> Path:
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} names no folder; python examples/smollm2.py makes one")
    folder = Path(named).resolve()
    if not (folder / "config.json").is_file():
        pytest.skip(f"{VARIABLE}={named}: no model is there")
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Another process of the test run computes beside this one, and threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
