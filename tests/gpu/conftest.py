"""The devices of these tests: the CPU, and a GPU under the mark `gpu`; and graphs that a CPU can record."""

import pytest
import torch

from tests.generation.recording import pretend_cuda, record_steps
from tests.gpu.devices import DEVICES


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The same test on a CPU with tiny shapes, and on a GPU."""
    return torch.device(request.param)


@pytest.fixture
def graphs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs, or on a CPU recordings in their place."""
    if device.type == "cpu":
        pretend_cuda(monkeypatch)
        record_steps(monkeypatch)
