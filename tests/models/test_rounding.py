"""Half precision judged by a float32 pass of the same weights, on logits as sharp as a real language model's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.generation.sampling import make_engine
from tests.tiny_models import sharp_model
from tinyrl.generation.select import select_engine
from tinyrl.models import batches
from tinyrl.models.device import in_float32
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.logprobs import Head, token_logprobs

IDS = torch.tensor([[30, 31, 90, 7, 120, 55]])


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_model(tmp_path_factory.mktemp("sharp"), num_hidden_layers=12)


def test_a_bfloat16_model_computes_in_float32_and_is_itself_again(sharp: Path) -> None:
    halved, whole = (load_causal_lm(str(sharp), dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    before = {name: p.data_ptr() for name, p in halved.named_parameters()}
    with torch.no_grad():
        whole.load_state_dict(halved.state_dict())  # the same weights, widened
        with in_float32(halved):
            widened = halved(input_ids=IDS).logits
        torch.testing.assert_close(widened, whole(input_ids=IDS).logits, rtol=0, atol=1e-5)
        assert float((halved(input_ids=IDS).logits.float() - widened).abs().mean()) > 1e-3
    assert {name: p.data_ptr() for name, p in halved.named_parameters()} == before
    assert {p.dtype for p in halved.parameters()} == {torch.bfloat16}


def chosen(sharp: Path, wanted: Any = "auto") -> tuple[str, str]:
    made = make_engine(sharp, lora=True, dtype=torch.bfloat16, base_dtype=torch.bfloat16)
    found = select_engine(made.roles, made.tokenizer, made.settings, wanted=wanted, dtype=torch.bfloat16, longest=64)
    return found[0].name, found[1]


def test_the_fused_engine_is_chosen_in_bfloat16_on_sharp_logits(sharp: Path) -> None:
    name, why = chosen(sharp)
    assert name == "fused", why
    assert "from float32" in why


def test_bfloat16_rows_are_packed_on_sharp_logits_and_wrong_packing_is_not(
    sharp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = batches.backbone_of(load_causal_lm(str(sharp), dtype=torch.bfloat16))
    assert batches.packs_exactly(backbone)
    real = batches.library_states

    def off(backbone: Any, batch: Any) -> torch.Tensor:
        states = real(backbone, batch)
        return states if batch.packing is None else states + 0.1 * states.roll(1, 0)

    monkeypatch.setattr(batches, "library_states", off)
    assert not batches.packs_exactly(backbone)


def test_logits_of_bfloat16_operands_are_not_rounded() -> None:
    """Against the product in float64; a bfloat16 logit of that size is off by 0.03 on average."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(64, 32, generator=generator).bfloat16()
    weight = (torch.randn(500, 32, generator=generator) * 2).bfloat16()
    bias = torch.randn(500, generator=generator).bfloat16()
    exact = states.double() @ weight.double().t() + bias.double()
    assert float((Head(weight, bias).logits(states).double() - exact).abs().max()) < 1e-4
    rounded = (states @ weight.t()).double() + bias.double()
    assert float((rounded - exact).abs().mean()) > 5e-3


def test_a_trained_head_under_autocast_keeps_logits_and_has_the_gradient_of_the_plain_product() -> None:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(6, 16, generator=generator).bfloat16().float().requires_grad_()
    weight = torch.randn(40, 16, generator=generator).bfloat16().float().requires_grad_()
    targets = torch.arange(6)
    plain = (states @ weight.t()).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    expected = torch.autograd.grad(plain.sum(), [states, weight])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, _ = token_logprobs(states, Head(weight, None), targets=targets, temperature=1.0)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)
    for found, wanted in zip(torch.autograd.grad(ours.sum(), [states, weight]), expected, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=2**-6, atol=2**-6)
