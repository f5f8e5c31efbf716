"""The folder of a real model, named by TINYRL_REAL_MODEL; without it these tests are skipped."""

import os
from pathlib import Path

import pytest

VARIABLE = "TINYRL_REAL_MODEL"


@pytest.fixture(scope="session")
def real() -> Path:
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} names no folder; tests/real/make_model.py makes one")
    folder = Path(named).resolve()
    if not (folder / "config.json").is_file():
        pytest.skip(f"{VARIABLE}={named}: no model is there")
    return folder
