"""Which models and numbers are accepted: heads, packed rows, our layers; half precision is judged by float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GemmaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from tests.models.building import lora, lora_roles, stir
from tests.policies import policy_of
from tests.tiny_models import TinyModels, sharp_model
from tinyrl.generation.decoder import Decoder
from tinyrl.models import layers, packing
from tinyrl.models.batch import examples
from tinyrl.models.checks import check_head, in_float32, packs_exactly, supports_fused_layers
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.logprobs import Head, head_of
from tinyrl.models.lora import wrap_in_lora
from tinyrl.models.states import all_states, backbone_of

IDS = torch.tensor([[30, 31, 90, 7, 120, 55]])
SHAPE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


def tiny_causal(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


# ---- float32 passes of half-precision weights ----


def test_a_bfloat16_model_computes_in_float32_and_is_itself_again(tiny: TinyModels) -> None:
    halved, whole = (load_causal_lm(str(tiny("llama")), dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    before = {name: p.data_ptr() for name, p in halved.named_parameters()}
    with torch.no_grad():
        whole.load_state_dict(halved.state_dict())  # the same weights, widened
        with in_float32(halved):
            widened = halved(input_ids=IDS).logits
        torch.testing.assert_close(widened, whole(input_ids=IDS).logits, rtol=0, atol=1e-5)
        assert float((halved(input_ids=IDS).logits.float() - widened).abs().mean()) > 1e-3
    assert {name: p.data_ptr() for name, p in halved.named_parameters()} == before
    assert {p.dtype for p in halved.parameters()} == {torch.bfloat16}


def test_experts_and_router_with_adapters_compute_in_float32(tiny: TinyModels) -> None:
    """PEFT wraps their bare parameters, and adds its branches in the dtype of these before their layer runs."""
    loaded = [load_causal_lm(str(tiny("qwen3-moe")), dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    halved, whole = (wrap_in_lora(model, lora()) for model in loaded)
    stir({name: p for name, p in halved.named_parameters() if "lora_" in name})
    whole.load_state_dict(halved.state_dict())
    dtypes = {name: p.dtype for name, p in halved.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if ".mlp." in name and "lora_" not in name} == {torch.bfloat16}
    with torch.no_grad():
        with in_float32(halved):
            widened = halved(input_ids=IDS).logits
        torch.testing.assert_close(widened, whole(input_ids=IDS).logits, rtol=0, atol=1e-5)
    assert {name: p.dtype for name, p in halved.named_parameters()} == dtypes


# ---- heads ----


@pytest.mark.parametrize(
    ("kind", "dtype", "factor"), [("granite", torch.float32, 1.001), ("gemma2", torch.bfloat16, 1.05)]
)
def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused(
    tiny: TinyModels, kind: str, dtype: torch.dtype, factor: float, monkeypatch: pytest.MonkeyPatch
):
    model = load_causal_lm(str(tiny(kind)), dtype=dtype)
    head, forward = head_of(model), model.forward
    check_head(model, head, backbone_of(model))
    with pytest.raises(ValueError, match="changes its logits in a way tinyrl does not know"):
        check_head(model, Head(head.weight, head.bias), backbone_of(model))  # without scale or soft-cap

    def stretched(*args: Any, **kwargs: Any):
        output = forward(*args, **kwargs)
        output.logits = output.logits * factor
        return output

    monkeypatch.setattr(model, "forward", stretched)
    with pytest.raises(ValueError, match="ForCausalLM changes its logits"):
        check_head(model, head, backbone_of(model))


# ---- packed rows ----


def test_models_with_windows_or_soft_caps_are_padded(tiny: TinyModels):
    """The window of 32 is wider than any compared sequence."""
    qwen2 = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}
    assert not packs_exactly(tiny_causal(Qwen2Config(**SHAPE, **qwen2)).model)
    assert packs_exactly(tiny_causal(Qwen2Config(**SHAPE)).model)
    assert not packs_exactly(tiny_causal(MistralConfig(**SHAPE, sliding_window=32)).model)
    assert packs_exactly(tiny_causal(MistralConfig(**SHAPE, sliding_window=None)).model)
    assert lora_roles(tiny("gemma2")).batch_of(examples([[5, 6]], [[7]])).packing is None


def test_bfloat16_rows_are_packed_on_sharp_logits_and_wrong_packing_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    backbone = backbone_of(load_causal_lm(str(sharp_model(tmp_path, num_hidden_layers=12)), dtype=torch.bfloat16))
    assert packs_exactly(backbone)
    attend = packing.attend

    def off(*given: Any) -> Tensor:
        return attend(*given) + 0.1 * attend(*given).roll(1, 0)

    monkeypatch.setattr(packing, "attend", off)
    assert not packs_exactly(backbone)


# ---- our layers ----


@pytest.mark.parametrize(
    ("wrong", "low"), [("states", None), ("gradient of x", torch.bfloat16), ("gradient of B", torch.bfloat16)]
)
def test_wrong_numbers_and_wrong_derivatives_are_found(
    tiny: TinyModels, wrong: str, low: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
):
    forward: Callable[..., Any] = layers.linears
    backward: Callable[..., Any] = layers.linears_backward

    def states(*given: Any, **options: Any) -> Any:
        outputs, low = forward(*given, **options)
        return [out * 1.1 if wrong == "states" else out for out in outputs], low

    def derivatives(*given: Any, **options: Any) -> Any:
        dh, found = backward(*given, **options)
        if wrong == "gradient of B":
            found = [g if g is None or i % 4 != 3 else g * 1.3 for i, g in enumerate(found)]
        return dh * 1.2 if wrong == "gradient of x" and dh is not None else dh, found

    sound, broken = (
        lora_roles(tiny("llama"), dtype=low or torch.float32, reference=False).backbone("policy") for _ in range(2)
    )
    with torch.autocast("cpu", dtype=low or torch.bfloat16, enabled=low is not None):
        assert supports_fused_layers(sound)
        monkeypatch.setattr(layers, "linears", states)
        monkeypatch.setattr(layers, "linears_backward", derivatives)
        assert not supports_fused_layers(broken)


def test_parts_of_the_same_names_that_compute_something_else_are_found_by_their_numbers():
    """Gemma's norm multiplies by 1 + w, and its embedding is scaled."""
    backbone = backbone_of(tiny_causal(GemmaConfig(**SHAPE, hidden_act="silu")))
    assert packs_exactly(backbone)
    assert layers.has_known_parts(backbone)
    assert not supports_fused_layers(backbone)


def test_adapters_of_more_than_two_matrices_and_dropout_are_left_to_the_library(tiny: TinyModels):
    config, model = lora(["q_proj"]), tiny_causal(Qwen3Config(**SHAPE))
    assert supports_fused_layers(backbone_of(model))
    config.use_dora = True
    wrapped = wrap_in_lora(model, config)
    assert not supports_fused_layers(policy_of(wrapped).backbone("policy"))
    roles = lora_roles(tiny("llama"), dropout=0.5)
    roles.lora_dropout = True
    with roles.acting("policy"):
        assert not supports_fused_layers(roles.backbone("policy"))
    with torch.no_grad(), roles.acting("policy"):
        assert supports_fused_layers(roles.backbone("policy"))


def test_half_precision_is_ours_under_its_own_autocast_and_a_comparison_leaves_no_trace(tiny: TinyModels):
    """A float32 pass of such weights, by which numbers are judged, is the library's."""
    roles = lora_roles(tiny("llama"), dtype=torch.bfloat16)
    backbone: Any = roles.backbone("policy")
    assert not supports_fused_layers(backbone)
    with torch.autocast("cpu", torch.float16):
        assert not supports_fused_layers(backbone)
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16), roles.gradient_checkpointing():
        assert supports_fused_layers(backbone)
        assert all(layer.gradient_checkpointing for layer in backbone.layers)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in roles.causal.parameters())
    assert {p.dtype for n, p in roles.causal.named_parameters() if "lora_" not in n} == {torch.bfloat16}
    with torch.no_grad(), in_float32(backbone):
        assert all_states(backbone, roles.batch_of(examples([[5, 6]], [[7]]))).dtype == torch.float32


def test_layers_that_are_first_asked_for_in_inference_mode_are_ours(tiny: TinyModels):
    """As a reward model asks, whose adapter is on the policy's base."""
    backbone = lora_roles(tiny("llama")).backbone("policy")
    with torch.inference_mode():
        assert supports_fused_layers(backbone)


def test_weights_that_the_sampler_joins_in_inference_mode_still_train(tiny: TinyModels):
    roles = lora_roles(tiny("llama"), dtype=torch.bfloat16)
    with torch.inference_mode():
        Decoder(roles.causal, dtype=torch.bfloat16, layout="separate_lora")
    assert not any(parameter.is_inference() for parameter in roles.causal.parameters())


def test_wrong_derivatives_of_recomputed_layers_are_found_where_layers_are_recomputed(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
):
    backward: Callable[..., Any] = layers.LeanLayer.backward

    def wrong(ctx: Any, grad: Tensor) -> Any:
        dx, *others = backward(ctx, grad)
        return (dx * 1.2, *others)

    monkeypatch.setattr(layers.LeanLayer, "backward", staticmethod(wrong))
    roles = lora_roles(tiny("llama"))
    backbone = roles.backbone("policy")
    with roles.acting("policy"):
        assert supports_fused_layers(backbone)
        with roles.gradient_checkpointing():
            assert not supports_fused_layers(backbone)


@pytest.mark.parametrize("ours", [True, False])
def test_a_run_says_at_its_start_which_layers_train(tiny: TinyModels, *, ours: bool):
    config = lora(["q_proj"])
    config.use_dora = not ours
    roles = policy_of(wrap_in_lora(load_causal_lm(str(tiny("llama")), dtype=torch.float32), config))
    assert ("LlamaForCausalLM" in roles.describe_passes()) is not ours
