"""Llama's layers with derivatives by hand: the library's states and gradients, and who is computed that way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GemmaConfig, Qwen3Config

from tests.models.building import CPU, full_roles, lora_roles, stir
from tests.models.live_bytes import LiveBytes
from tests.models.test_packing import PROMPTS, RESPONSES
from tests.tiny_models import TinyModels
from tinyrl.models import batches, fused_backbone
from tinyrl.models.batches import all_states, fuses, library_states
from tinyrl.models.lora import lora_config, wrap_in_lora
from tinyrl.models.roles import Roles

FUSED = ("qwen2", "qwen3")


def small(config: Any, *, targets: Any = None, **options: Any) -> Roles:
    """A random model, all of whose parameters (biases and norms too) move the outcome."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    if targets is not None:
        lora = lora_config(r=3, alpha=12, dropout=options.pop("dropout", 0.0), target_modules=targets)
        for name, value in options.items():
            setattr(lora, name, value)
        model = wrap_in_lora(model, lora)
    roles = Roles(model, device=CPU, reference=False)
    stir(roles.parameters["policy"])
    return roles


def qwen3(**changed: Any) -> Qwen3Config:
    """Four query heads, two key heads, biases in attention."""
    shape: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "attention_bias": True,
    }  # fmt: skip
    return Qwen3Config(**{**shape, **changed})


def gradients_by(states: Callable[..., Tensor], roles: Roles) -> tuple[Tensor, dict[str, Tensor]]:
    """States of a packed batch, and the gradient of a number that weighs each of them differently."""
    batch = roles.batch(PROMPTS, RESPONSES)
    with roles.acting("policy"):
        found = states(roles.backbone("policy"), batch)
        weights = torch.linspace(-1, 2, found.numel()).view_as(found)
        (found * weights + 0.1 * found.square()).sum().backward()
    taken = {}
    for name, parameter in roles.parameters["policy"].items():
        taken[name], parameter.grad = parameter.grad, None
    return found.detach(), taken


def assert_as_the_library(roles: Roles) -> None:
    assert fuses(roles.backbone("policy"))
    ours, our_gradients = gradients_by(all_states, roles)
    theirs, their_gradients = gradients_by(library_states, roles)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    for name, gradient in their_gradients.items():
        if gradient is None:  # the head, which is not part of the decoder
            assert our_gradients[name] is None, name
        else:
            assert float(gradient.norm()) > 0, name
            assert (our_gradients[name] - gradient).norm() <= 2e-5 * gradient.norm(), name


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("qwen2", "all-linear"), ("qwen3", ["k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])],
)
def test_states_and_gradients_of_lora(tiny: TinyModels, kind: str, targets: Any):
    model = AutoModelForCausalLM.from_pretrained(tiny(kind), dtype=torch.float32)
    roles = Roles(
        wrap_in_lora(model, lora_config(r=4, alpha=8, dropout=0.0, target_modules=targets)),
        device=CPU,
        reference=False,
    )
    stir(roles.parameters["policy"])
    assert_as_the_library(roles)


@pytest.mark.parametrize("kind", FUSED)
def test_states_and_gradients_of_full_fine_tuning(tiny: TinyModels, kind: str):
    roles = full_roles(tiny(kind), reference=False)
    stir(roles.parameters["policy"])
    assert_as_the_library(roles)


def test_other_adapters_and_none_act_by_their_own_weights(tiny: TinyModels):
    roles = lora_roles(tiny("llama"))
    stir(roles.parameters["policy"])
    roles.add_critic("adapter", lora=lora_config(r=2, alpha=2, dropout=0.0, target_modules=["q_proj", "down_proj"]))
    stir(roles.parameters["critic"], seed=1)
    batch, backbone, seen = roles.batch(PROMPTS, RESPONSES), roles.backbone("policy"), []
    for role in ("policy", "reference", "critic"):
        with torch.no_grad(), roles.acting(role):
            assert fuses(backbone)
            seen.append(all_states(backbone, batch))
            torch.testing.assert_close(seen[-1], library_states(backbone, batch), atol=1e-5, rtol=1e-5)
    assert min(float((a - b).abs().max()) for a, b in zip(seen, (*seen[1:], seen[0]), strict=True)) > 1e-3


def test_a_micro_batch_keeps_less_than_the_librarys(tiny: TinyModels):
    model = AutoModelForCausalLM.from_config(qwen3(hidden_size=64, intermediate_size=256), dtype=torch.float32)
    roles = Roles(wrap_in_lora(model, lora_config(r=4, alpha=8, dropout=0.0, target_modules="all-linear")),
                  device=torch.device("cpu"), reference=False)  # fmt: skip
    most = []
    for states in (all_states, library_states):
        batch = roles.batch([[1] * 8] * 4, [[2] * 16] * 4)
        with LiveBytes() as live, roles.acting("policy"):
            states(roles.backbone("policy"), batch).sum()
            most.append(live.most)
    assert most[0] < 0.7 * most[1]


# ---- each piece, against numbers in float64 ----


def differences(run: Callable[..., Any], *inputs: Tensor | None) -> bool:
    check: Any = torch.autograd.gradcheck
    return check(run, inputs)


def leaf(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def linear(inputs: int, outputs: int, *, seed: int, bias: bool, rank: int) -> list[Tensor | None]:
    return [
        leaf(outputs, inputs, seed=seed),
        leaf(outputs, seed=seed + 1) if bias else None,
        leaf(rank, inputs, seed=seed + 2) if rank else None,
        leaf(outputs, rank, seed=seed + 3) if rank else None,
    ]


def test_normed_products_by_differences():
    layers = [*linear(4, 3, seed=1, bias=True, rank=2), *linear(4, 2, seed=5, bias=False, rank=0),
              *linear(4, 3, seed=9, bias=False, rank=1)]  # fmt: skip
    apply: Any = fused_backbone.NormedProducts.apply
    scales = [0.5, 0.0, 3.0]
    assert differences(
        lambda x, w, *rest: apply(x, w, 1e-3, x.dtype, scales, *rest),
        leaf(5, 4, seed=0),
        leaf(4, seed=20),
        *layers,
    )


def test_the_rest_of_a_layer_by_differences():
    layers = [*linear(6, 4, seed=1, bias=False, rank=2), *linear(4, 5, seed=5, bias=False, rank=1),
              *linear(4, 5, seed=9, bias=True, rank=2), *linear(5, 4, seed=13, bias=True, rank=2)]  # fmt: skip
    apply: Any = fused_backbone.AfterAttention.apply
    scales = [0.5, 2.0, 1.0, 3.0]
    inputs = (leaf(3, 4, seed=30), leaf(3, 6, seed=31), leaf(4, seed=32))
    assert differences(lambda x, a, w, *rest: apply(x, a, w, 1e-3, scales, *rest), *inputs, *layers)


def test_norm_and_rotation_by_differences():
    norm: Any = fused_backbone.Normed.apply
    rotate: Any = fused_backbone.Rotated.apply
    assert differences(lambda x, w: norm(x, w, 1e-3), leaf(3, 2, 4, seed=0), leaf(4, seed=1))
    cos, sin = leaf(3, 1, 4, seed=2).detach(), leaf(3, 1, 4, seed=3).detach()
    assert differences(lambda x: rotate(x, cos, sin), leaf(3, 2, 4, seed=4))


def test_a_quarter_turn():
    """By 90 degrees (1, 2) becomes (-2, 1): halves of a head are the two coordinates."""
    rotate: Any = fused_backbone.Rotated.apply
    x, zero = torch.tensor([[[1.0, 2.0]]]), torch.zeros(1, 1, 2)
    assert rotate(x, zero, torch.tensor([[[-1.0, 1.0]]])).tolist() == [[[-2.0, 1.0]]]


# ---- who is computed that way ----


def test_parts_of_the_same_names_that_compute_something_else_are_found_by_their_numbers():
    """Gemma's norm multiplies by 1 + w, and its embedding is scaled."""
    shape = qwen3().to_dict()
    sizes = {k: shape[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads", "head_dim")}  # fmt: skip
    roles = small(GemmaConfig(**sizes, hidden_act="silu"), targets="all-linear")
    backbone = roles.backbone("policy")
    assert roles.packs
    assert batches.could_fuse(backbone)
    assert not fuses(backbone)


def test_what_only_the_library_does_is_left_to_it_for_as_long(tiny: TinyModels):
    roles = lora_roles(tiny("llama"), dropout=0.5)
    backbone = roles.backbone("policy")
    assert fuses(backbone)
    roles.use_lora_dropout()
    with roles.acting("policy"):
        assert not fuses(backbone)
    with roles.acting("policy"), torch.no_grad():
        assert not fuses(backbone)  # dropout is on for a block that was entered with gradients on
    with torch.no_grad(), roles.acting("policy"):
        assert fuses(backbone)


@pytest.mark.parametrize("option", [{"use_dora": True}, {"lora_bias": True}])
def test_adapters_that_are_more_than_two_matrices_are_left_to_the_library(option: dict[str, Any]):
    roles = small(qwen3(attention_bias=option == {"lora_bias": True}), targets=["q_proj"], **option)
    assert not fuses(roles.backbone("policy"))
