"""The devices of a test: the CPU, and a GPU under the mark `gpu`, skipped where there is none."""

from collections.abc import Iterable

import pytest
import torch

ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_A_GPU)]


def all_on_a_gpu(name: str, values: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize by device and `name`: all values on a GPU, on a CPU the first one, as a slow test.

    On a CPU it shows that the test itself works; what it shows of a run there, the fast tests of the rooms show.
    """
    values = list(values)
    on_a_cpu = pytest.param("cpu", values[0], marks=pytest.mark.slow)
    cases = [on_a_cpu, *(pytest.param("cuda", value, marks=ON_A_GPU) for value in values)]
    return pytest.mark.parametrize(("device", name), cases, indirect=["device"])
