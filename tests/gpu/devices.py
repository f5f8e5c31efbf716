"""The devices of a test: the CPU, and a GPU under the mark `gpu`, skipped where there is none."""

import pytest
import torch

ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_A_GPU)]
