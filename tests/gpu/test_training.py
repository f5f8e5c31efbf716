"""Our layers in half precision on a device: errors beside the library's, recomputed layers, and memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.gpu.devices import ON_A_GPU
from tests.models.building import stir
from tests.models.test_layers import HALVES, MAKE, errors, gradients, widened
from tests.models.test_varlen import HEADS, LAYOUTS, drawn, results
from tests.tiny_models import sharp_model, tiny_model
from tests.training.test_kernel_trial import passes, trial_of
from tinyrl.models.checks import TIMES_THE_LIBRARY, supports_fused_layers
from tinyrl.models.kernels import missing
from tinyrl.models.packing import attend, pack
from tinyrl.models.states import all_states, library_states
from tinyrl.models.varlen import attend_varlen


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_model(tmp_path_factory.mktemp("sharp"), num_hidden_layers=6)


def trained(sharp: Path, make: str, low: torch.dtype, device: torch.device) -> Any:
    roles = MAKE[make](sharp, dtype=low, reference=False, device=device)
    if make == "lora":
        stir(roles.parameters["policy"])
    return roles


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("make", MAKE)
@pytest.mark.wide
def test_errors_are_those_of_the_library(sharp: Path, device: torch.device, make: str, dtype: str):
    """Products of a device's own kernels, summed in float32 for the parameters' gradients."""
    torch.manual_seed(0)
    low = HALVES[dtype]
    roles = trained(sharp, make, low, device)
    with torch.autocast(device.type, dtype=low):
        assert supports_fused_layers(roles.backbone("policy"))
    exact = gradients(widened(roles, make, sharp), library_states)
    ours, library = (gradients(roles, states, low=low) for states in (all_states, library_states))
    for mine, theirs in zip(errors(ours, exact), errors(library, exact), strict=True):
        assert mine <= TIMES_THE_LIBRARY * theirs
    recomputed = gradients(roles, all_states, low=low, recompute=True)
    assert max(errors(recomputed, ours)) < 1e-2  # kernels of attention may add up in another order


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
def test_a_pass_takes_less_memory_than_the_librarys(sharp: Path, device: str, make: str):
    """Only a GPU's allocator says what a pass takes."""
    roles, most = trained(sharp, make, torch.bfloat16, torch.device(device)), []
    for states in (all_states, library_states):
        peak = 0
        for _ in range(2):  # the first makes what kernels keep
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            gradients(roles, states, low=torch.bfloat16)
            peak = torch.cuda.max_memory_allocated() - before
        most.append(peak)
    assert most[0] < most[1]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
def test_shared_key_heads_take_no_square_of_a_row_where_flash_attention_cannot_run(device: str):
    """In float16 as on a T4: one causal row, and two behind the keys of their prompt."""

    def most(length: int) -> int:
        layout = pack([(length, []), (8, [length, length])], device=device)
        shape = (3 * length + 8, 64)
        query = torch.randn(shape[0], 4, shape[1], dtype=torch.float16, device=device, requires_grad=True)
        key, value = (torch.randn_like(query[:, :2]).requires_grad_() for _ in range(2))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(query, key, value, layout, None).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        most(16)
        assert most(4096) < 2.2 * most(2048)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
def test_one_call_of_attention_is_as_near_to_float32_as_the_path_by_blocks(
    device: str, heads: tuple[int, int], dtype: str
):
    """Outputs and gradients of each layout, by torch's own kernel."""
    if (why := missing("varlen_attention")) is not None:
        pytest.skip(why)
    for layout in LAYOUTS.values():
        here = replace(layout, slots=layout.slots.to(device), masks={})
        exact = drawn(layout, heads)
        expected = results(attend(exact[0], exact[1], exact[2], layout, None), exact)
        given = [x.detach().to(device, HALVES[dtype]).requires_grad_() for x in exact]
        q, k, v = given
        found = results(attend_varlen(q, k, v, here.varlen_rows, None), given)
        today = results(attend(q, k, v, here, None), given)
        for ours, theirs, wanted in zip(found, today, expected, strict=True):
            gap, before = (float((x.cpu().float() - wanted).norm() / wanted.norm()) for x in (ours, theirs))
            assert gap <= max(TIMES_THE_LIBRARY * before, 1e-3)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
def test_a_trial_ends_with_a_choice_and_no_error(device: str, tmp_path: Path):
    """Which one depends on the card."""
    trial = trial_of(tiny_model(tmp_path, "llama"), torch.bfloat16, lora=True, device=torch.device(device))
    notes = trial.decide(passes(trial))
    assert trial.chosen is not None
    assert not [note for note in notes if "ended in" in note]
