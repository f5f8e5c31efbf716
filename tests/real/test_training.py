"""Half precision through our layers on a real model: errors beside the library's. `-s` shows the figures."""

from pathlib import Path

import pytest
import torch

from tests.models.test_layers import MAKE, errors, gradients, widened
from tinyrl.models.checks import TIMES_THE_LIBRARY, supports_fused_layers
from tinyrl.models.states import all_states, library_states

pytestmark = [pytest.mark.real, pytest.mark.release]


@pytest.mark.parametrize("make", MAKE)
def test_errors_in_bfloat16_are_at_most_the_librarys(real: Path, make: str):
    """Of log-probabilities (nats) and of gradients (share of each one's norm), from a float32 pass. Those of one
    adapter vary by a factor of two, so several are averaged.
    """
    found = []
    for seed in range(4 if make == "lora" else 1):
        torch.manual_seed(seed)  # LoRA's A
        roles = MAKE[make](real, dtype=torch.bfloat16, reference=False)
        for name, parameter in roles.parameters["policy"].items():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert supports_fused_layers(roles.backbone("policy"))
        exact = gradients(widened(roles, make, real), library_states)
        found.append([errors(gradients(roles, s, low=torch.bfloat16), exact) for s in (all_states, library_states)])
    ours, library = torch.tensor(found).mean(0)
    print(f"\n{make}: log-probabilities and gradients {ours.tolist()}; the library's {library.tolist()}")
    assert (ours > 0).all()
    assert (ours <= TIMES_THE_LIBRARY * library).all()
