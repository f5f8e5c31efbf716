"""Adapters on the matrices of experts, beside PEFT's own wrapper, which adds B A to all of them at every call."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.models.building import logprobs, lora, lora_roles, stir
from tests.policies import policy_of
from tests.tiny_models import TinyModels
from tinyrl.models.experts import expert_parameters, expert_targets, routers
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import with_experts, wrap_in_lora
from tinyrl.models.policy import Policy

KINDS = ["qwen3-moe", "gpt-oss", "qwen3.5-moe"]
IDS = torch.tensor([[5, 9, 11, 7, 3, 8, 2, 30, 31, 32, 33, 34]])


def on_experts(folder: Path, *, dtype: torch.dtype = torch.float32, experts: Any = "experts") -> Policy:
    policy = lora_roles(folder, dtype=dtype, experts=experts)
    stir(policy.parameters["policy"])
    return policy


def pefts(folder: Path, policy: Policy) -> Any:
    """The same adapters on the same weights, computed by PEFT."""
    base = load_causal_lm(str(folder), dtype=torch.float32)
    model = wrap_in_lora(base, with_experts(lora(), base, "experts"))
    model.get_base_model().load_state_dict(policy.causal.state_dict())
    return model


def gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of a weighted sum of them by parameter."""
    logits: Tensor = model(input_ids=IDS).logits
    (logits * torch.arange(logits.numel()).cos().view_as(logits)).sum().backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# ---- numbers ----


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_gradients_are_those_of_pefts_wrapper(tiny: TinyModels, kind: str):
    policy = on_experts(tiny(kind))
    theirs, by_peft = gradients(pefts(tiny(kind), policy))
    assert policy.adapters.peft is not None
    ours, found = gradients(policy.adapters.peft)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert found.keys() == by_peft.keys()
    assert sum(".experts." in name for name in found) == 2 * len(expert_parameters(policy.causal))
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, by_peft[name], rtol=0, atol=2e-5 * float(by_peft[name].norm()) + 1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_with_adapters_off_log_probabilities_have_the_bits_of_the_base(tiny: TinyModels, kind: str):
    policy = on_experts(tiny(kind))
    plain = policy_of(load_causal_lm(str(tiny(kind)), dtype=torch.float32))
    assert torch.equal(logprobs(policy, "reference"), logprobs(plain, "policy"))
    assert not torch.equal(logprobs(policy, "policy"), logprobs(policy, "reference"))


def test_in_bfloat16_a_small_update_is_not_rounded_away(tiny: TinyModels):
    """As PEFT does, by adding it to weights that are 2^-8 of their size apart."""
    states = torch.randn(1024, 32)
    index = torch.randint(0, 8, (1024, 2))
    weights = torch.rand(1024, 2)
    changes = dict[str, Tensor]()
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        policy = lora_roles(tiny("qwen3-moe"), experts="experts")
        nn.Module.to(policy.causal, dtype)  # of the same adapters, those in bfloat16 are rounded
        layer: Any = policy.causal.get_submodule("model.layers.0.mlp.experts")
        with torch.no_grad():
            before = layer(states, index, weights)
            for wrapper in (layer, layer.base_layer):
                wrapper.lora_B["default"].weight.copy_(torch.randn(wrapper.lora_B["default"].weight.shape) * 1e-4)
            changes[f"ours in {dtype}"] = layer(states, index, weights) - before
            changes[f"PEFT's in {dtype}"] = ParamWrapper.forward(layer, states, index, weights) - before
    exact = changes["ours in torch.float32"]
    shares = {name: float((change * exact).sum() / (exact * exact).sum()) for name, change in changes.items()}
    assert shares["PEFT's in torch.float32"] == pytest.approx(1.0, abs=0.01)
    assert shares["ours in torch.bfloat16"] == pytest.approx(1.0, abs=0.3)
    assert abs(shares["PEFT's in torch.bfloat16"]) < 0.3


def test_no_matrices_of_all_experts_are_made_for_a_backward_pass(tiny: TinyModels):
    """What is saved for it is the model's own, or of the size of the tokens."""
    policy = on_experts(tiny("qwen3-moe"))
    matrices = expert_parameters(policy.causal)
    own = {matrix.data_ptr() for matrix in matrices.values()}
    shapes = {tuple(sorted(matrix.shape)) for matrix in matrices.values()}
    copies = list[Tensor]()

    def look(saved: Tensor) -> Tensor:
        if saved.dim() == 3 and tuple(sorted(saved.shape)) in shapes and saved.data_ptr() not in own:
            copies.append(saved)
        return saved

    with saved_tensors_hooks(look, lambda saved: saved):
        policy.causal(input_ids=IDS)
        assert not copies
        pefts(tiny("qwen3-moe"), policy)(input_ids=IDS)
        assert copies


# ---- which weights have an adapter ----


@pytest.mark.parametrize("kind", KINDS)
def test_all_linear_leaves_experts_and_routers_out(tiny: TinyModels, kind: str):
    policy = lora_roles(tiny(kind), experts=None)
    assert not [module for module in policy.causal.modules() if isinstance(module, ParamWrapper)]
    assert any("q_proj.lora_A" in name for name in policy.parameters["policy"])


def test_all_linear_leaves_a_router_out_that_is_a_linear_layer(tiny: TinyModels):
    policy = lora_roles(tiny("phi-moe"), experts="experts")
    assert routers(policy.causal) == [f"model.layers.{i}.mlp.router" for i in range(2)]
    assert not [name for name in policy.parameters["policy"] if ".router." in name]
    assert [name for name in policy.parameters["policy"] if ".q_proj." in name]


def test_the_start_names_layers_that_peft_takes_for_experts(tiny: TinyModels):
    """Of a dense layer and a shared expert, by the names that experts once had."""
    said = lora_roles(tiny("glm-moe"), experts="experts").describe_passes()
    assert "down_proj, gate_proj, up_proj" in said
    assert "down_proj" not in lora_roles(tiny("gpt-oss"), experts="experts").describe_passes()


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_on_the_experts_of_each_layer_and_on_no_router(tiny: TinyModels, kind: str):
    policy = on_experts(tiny(kind))
    wrapped = [module for module in policy.causal.modules() if isinstance(module, ParamWrapper)]
    assert {id(module.get_param()) for module in wrapped} == {id(p) for p in expert_parameters(policy.causal).values()}
    assert len(wrapped) == 2 * policy.causal.config.num_hidden_layers


def test_a_critic_of_adapters_has_them_on_the_same_experts(tiny: TinyModels):
    policy = on_experts(tiny("gpt-oss"))
    config = with_experts(lora(), policy.causal, "experts")
    policy.add_critic("adapter", lora=config)
    on_experts_of = {
        role: [name for name in policy.parameters[role] if ".experts." in name] for role in ("policy", "critic")
    }
    assert len(on_experts_of["critic"]) == len(on_experts_of["policy"]) > 0


def test_matrices_are_chosen_by_name(tiny: TinyModels):
    policy = on_experts(tiny("gpt-oss"), experts=["1.mlp.experts.down_proj"])
    wrapped = [module for module in policy.causal.modules() if isinstance(module, ParamWrapper)]
    assert [module.parameter_name for module in wrapped] == ["down_proj"]
    assert wrapped[0] is policy.causal.get_submodule("model.layers.1.mlp.experts")


@pytest.mark.parametrize(
    ("kind", "wanted", "named"),
    [
        ("llama", "experts", "LlamaForCausalLM"),
        ("gpt-oss", ["mlp.router.weight"], "router"),
        ("qwen3.5-moe", ["gate_up"], "mlp.experts.gate_up_proj"),
        ("qwen3-moe", ["experts.down_proj", "weight"], "'weight'"),
    ],
)
def test_what_is_no_matrix_of_experts_is_refused_by_name(tiny: TinyModels, kind: str, wanted: Any, named: str):
    with pytest.raises(ValueError, match=named):
        expert_targets(load_causal_lm(str(tiny(kind)), dtype=torch.float32), wanted)


@pytest.mark.parametrize("experts", [None, "experts"])
def test_the_start_says_which_share_of_the_weights_has_an_adapter(tiny: TinyModels, experts: Any):
    """Of 2 layers: attention of 32 x (32 + 16 + 16 + 32), and 8 experts of 32 x 32 and 32 x 16."""
    policy = lora_roles(tiny("qwen3-moe"), experts=experts)
    weights = sum(p.numel() for n, p in policy.causal.named_parameters() if "lora_" not in n)
    adapted = 2 * (32 * 96 + (8 * (32 * 32 + 32 * 16) if experts else 0))
    said = policy.describe_passes()
    assert f"{adapted / weights:.1%}" in said
    assert ("lora.target_parameters=experts" in said) == (experts is None)
