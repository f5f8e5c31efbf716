"""Llama's layers with derivatives by hand: the library's states and gradients, in less memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.models.building import full_roles, lora, lora_roles, stir
from tests.models.live_bytes import LiveBytes
from tests.models.test_packing import PROMPTS, RESPONSES
from tests.policies import policy_of
from tests.tiny_models import TinyModels, sharp_model
from tinyrl.models import layers, linears
from tinyrl.models.batch import examples
from tinyrl.models.checks import TIMES_THE_LIBRARY, supports_fused_layers
from tinyrl.models.device import MICRO_BATCH_TOKENS
from tinyrl.models.lora import wrap_in_lora
from tinyrl.models.policy import Policy
from tinyrl.models.states import all_states, library_states

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
MAKE: dict[str, Callable[..., Policy]] = {"lora": lora_roles, "full": full_roles}


def gradients(
    roles: Policy, states: Callable[..., Tensor], *, low: torch.dtype | None = None, recompute: bool = False
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Log-probabilities of a packed batch, and by name the gradient of a sum that weighs each differently."""
    batch = roles.batch_of(examples(PROMPTS, RESPONSES))
    inside = roles.gradient_checkpointing() if recompute else torch.enable_grad()
    with roles.acting("policy"), inside:
        with torch.autocast(roles.device.type, dtype=low or torch.bfloat16, enabled=low is not None):
            found = states(roles.backbone("policy"), batch).index_select(0, batch.state_index)
            logprobs, _ = roles.logprobs("policy", batch, temperature=1.0, states=found)
        flat = logprobs[batch.row, batch.column]
        (flat * torch.linspace(-1, 2, len(flat), device=roles.device)).sum().backward()
    taken = {name: parameter.grad for name, parameter in roles.parameters["policy"].items()}
    for parameter in roles.parameters["policy"].values():
        parameter.grad = None
    return flat.detach(), taken


def widened(roles: Policy, make: str, folder: Path) -> Policy:
    """The same weights in float32, the library's pass of which is exact."""
    exact = MAKE[make](folder, reference=False, device=roles.device)
    exact.causal.load_state_dict(roles.causal.state_dict())
    return exact


def errors(found: Any, exact: Any) -> tuple[float, float]:
    """Mean error of log-probabilities, and of gradients, relative to the norm of each."""
    apart = [
        float((found[1][n] - g).norm() / g.norm()) for n, g in exact[1].items() if g is not None and float(g.norm()) > 0
    ]
    return float((found[0] - exact[0]).abs().mean()), sum(apart) / len(apart)


@pytest.mark.parametrize(
    ("kind", "make", "options"),
    [("qwen2", "lora", {}), ("llama", "lora", {"targets": ["q_proj", "up_proj", "down_proj"]}), ("qwen3", "full", {})],
)
def test_states_and_gradients_are_the_librarys(tiny: TinyModels, kind: str, make: str, options: Any):
    roles = MAKE[make](tiny(kind), reference=False, **options)
    stir(roles.parameters["policy"])
    assert supports_fused_layers(roles.backbone("policy"))
    ours, theirs = gradients(roles, all_states), gradients(roles, library_states)
    torch.testing.assert_close(ours[0], theirs[0], atol=2e-5, rtol=2e-5)
    for name, gradient in theirs[1].items():
        assert gradient is not None
        assert float(gradient.norm()) > 0, name
        assert (ours[1][name] - gradient).norm() <= 2e-5 * gradient.norm(), name  # pyright: ignore


def test_every_role_acts_by_its_own_weights(tiny: TinyModels):
    roles = lora_roles(tiny("llama"))
    stir(roles.parameters["policy"])
    roles.add_critic("adapter", lora=lora(["q_proj", "down_proj"]))
    stir(roles.parameters["critic"], seed=1)
    batch, backbone = roles.batch_of(examples(PROMPTS, RESPONSES)), roles.backbone("policy")
    for role in ("policy", "reference", "critic"):
        with torch.no_grad(), roles.acting(role):
            assert supports_fused_layers(backbone)
            torch.testing.assert_close(
                all_states(backbone, batch), library_states(backbone, batch), atol=1e-5, rtol=1e-5
            )


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "make", "low"), [("qwen3", "lora", torch.bfloat16), ("qwen2", "full", torch.float16)])
def test_errors_in_half_precision_are_those_of_the_library(tmp_path: Path, kind: str, make: str, low: torch.dtype):
    """Against a float32 pass of the same weights, on logits as sharp as a real model's; gradients are float32 sums."""
    folder = sharp_model(tmp_path, kind, num_hidden_layers=6, layer_types=["full_attention"] * 6)
    roles = MAKE[make](folder, dtype=low, reference=False)
    if make == "lora":
        stir(roles.parameters["policy"])
    exact = gradients(widened(roles, make, folder), library_states)
    with torch.autocast("cpu", dtype=low):
        assert supports_fused_layers(roles.backbone("policy"))
    ours, library = (gradients(roles, states, low=low) for states in (all_states, library_states))
    for mine, theirs in zip(errors(ours, exact), errors(library, exact), strict=True):
        assert 0 < mine <= TIMES_THE_LIBRARY * theirs
    given = [g for g in ours[1].values() if g is not None]
    assert {g.dtype for g in given} == {torch.float32}
    assert sum(not torch.equal(g, g.to(low).float()) for g in given) > 0.5 * len(given)


@pytest.mark.parametrize(("make", "low"), [("lora", torch.bfloat16), ("full", None)])
def test_recomputed_layers_have_the_same_gradient(
    tiny: TinyModels, make: str, low: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
):
    roles = MAKE[make](tiny("qwen3"), dtype=low or torch.float32, reference=False)
    stir(roles.parameters["policy"])
    for recompute in (False, True):  # compares our layers with the library's
        gradients(roles, all_states, low=low, recompute=recompute)
    ran, once = [], layers._attended
    monkeypatch.setattr(layers, "_attended", lambda *given, **more: ran.append(1) or once(*given, **more))
    stored, recomputed = (gradients(roles, all_states, low=low, recompute=recompute) for recompute in (False, True))
    assert len(ran) == 2 + 4
    torch.testing.assert_close(recomputed, stored, rtol=0, atol=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_that_change_before_backward_are_an_error(tiny: TinyModels, *, recompute: bool):
    roles = lora_roles(tiny("qwen3"), reference=False)
    batch = roles.batch_of(examples(PROMPTS, RESPONSES))
    gradients(roles, all_states)  # compares our layers with the library's
    inside = roles.gradient_checkpointing() if recompute else torch.enable_grad()
    with roles.acting("policy"), inside:
        loss = all_states(roles.backbone("policy"), batch).square().sum()
        with torch.no_grad():
            for parameter in roles.parameters["policy"].values():
                parameter.add_(0.01)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_micro_batch_keeps_less_than_the_librarys_and_recomputed_only_inputs_of_layers():
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    roles = policy_of(wrap_in_lora(model, lora()))
    batch, backbone = roles.batch_of(examples([[1] * 8] * 4, [[2] * 16] * 4)), roles.backbone("policy")
    assert supports_fused_layers(backbone)

    def most(states: Callable[..., Tensor]) -> int:
        with LiveBytes() as live, roles.acting("policy"):
            states(backbone, batch).sum()
            return live.most

    ours = most(all_states)
    assert ours < 0.7 * most(library_states)
    with roles.gradient_checkpointing():
        assert most(all_states) < 0.4 * ours


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_gradients_of_weights_norms_and_biases_are_summed_over_tiles(
    tiny: TinyModels, low: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
):
    roles = full_roles(tiny("qwen2"), reference=False)
    stir(roles.parameters["policy"])
    stored = gradients(roles, all_states, low=low)
    monkeypatch.setitem(MICRO_BATCH_TOKENS, "cpu", 16)
    tiled = gradients(roles, all_states, low=low, recompute=True)
    torch.testing.assert_close(tiled[0], stored[0], rtol=0, atol=1e-5)
    for name, gradient in stored[1].items():
        assert gradient is not None
        apart = (tiled[1][name] - gradient).norm() / gradient.norm()  # pyright: ignore
        assert apart <= (1e-6 if low is None else 1e-3), name


@pytest.mark.wide
@pytest.mark.parametrize("learns", [True, False])
def test_a_wide_feed_forward_block_takes_no_memory_by_the_length_of_a_text(
    learns: bool, monkeypatch: pytest.MonkeyPatch
):
    """Tiles of 32 tokens: 512 tokens more take less than one tensor that is 512 tokens long and as wide as the block,
    with recomputed layers and without a gradient.
    """
    config = Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=1024,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    roles = policy_of(wrap_in_lora(model, lora()), reference=False)
    monkeypatch.setitem(MICRO_BATCH_TOKENS, "cpu", 32)

    def most(length: int) -> int:
        batch = roles.batch_of(examples([[1] * 8], [[2] * (length - 8)]))
        with (
            LiveBytes() as live,
            roles.acting("policy"),
            roles.gradient_checkpointing(),
            torch.set_grad_enabled(learns),
        ):
            found = roles.logprobs("policy", batch, temperature=1.0)[0].sum()
            if learns:
                found.backward()
        return live.most

    most(16)  # compares our layers with the library's
    assert most(1024) - most(512) < 512 * 1024 * 4


@pytest.mark.parametrize("native", [False, True])
def test_a_product_is_rounded_once(native: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linears, "multiplies_in", lambda _: native)
    generator = torch.Generator().manual_seed(0)
    for low, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        a, b, onto = (torch.randn(16, 16, generator=generator).to(low) for _ in range(3))
        wide, out = a.double() @ b.double(), onto.clone()
        assert torch.allclose(linears.product(a, b, dtype=torch.float32).double(), wide, rtol=1e-5, atol=1e-5)
        assert linears.product(a, b, onto=out, out=out) is out
        for found, exact in (
            (linears.product(a, b), wide),
            (linears.product(a, b, onto=onto, scale=0.5), onto.double() + 0.5 * wide),
            (out, onto.double() + wide),
        ):
            assert found.dtype == low
            assert ((found.double() - exact).abs() <= 1.01 * unit * exact.abs() + 1e-6).all()
