"""Models without numbers have the parameters of those with numbers, and draw nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.running import config
from tests.tiny_models import TinyModels
from tinyrl.models.build import build_reward_model, build_roles
from tinyrl.models.lora import POLICY_ADAPTER, save_adapter
from tinyrl.models.meta import bytes_by_role, checkpoint_bytes, four_bit_bytes, meta_reward_model, meta_roles
from tinyrl.models.reward_model import SCORE_HEAD

CPU = torch.device("cpu")
CASES: dict[str, dict[str, Any]] = {
    "lora": {"method": "grpo"},
    "full": {"method": "grpo", "lora": {"enabled": False}},
    "adapter": {"method": "ppo"},
    "shared": {"method": "ppo", "critic": {"kind": "shared"}},
    "separate": {"method": "ppo", "critic": {"kind": "separate"}},
    "full-separate": {"method": "ppo", "lora": {"enabled": False}},
}
# Every case in both dtypes; every kind of model with and without LoRA (gpt2's linear layers are transposed, gemma2 does
# not pack), a model of its own and a cast to float32 among them.
COMBINATIONS = [
    *((case, "llama", dtype) for case in CASES for dtype in (torch.float32, torch.bfloat16)),
    *((case, kind, torch.bfloat16) for case in ("adapter", "full-separate") for kind in ("gpt2", "gemma2")),
]


@pytest.mark.parametrize(("case", "kind", "dtype"), COMBINATIONS)
@pytest.mark.wide
def test_parameters_are_those_of_the_models_with_numbers(tiny: TinyModels, case: str, kind: str, dtype: torch.dtype):
    settings = config(path=tiny(kind), **CASES[case])
    real = build_roles(settings, device=CPU, dtype=dtype)
    before = torch.get_rng_state()
    meta = meta_roles(settings, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), before)
    for role, parameters in real.parameters.items():
        shapes = {name: (p.shape, p.dtype) for name, p in parameters.items()}
        assert {name: (p.shape, p.dtype) for name, p in meta.parameters[role].items()} == shapes
    assert bytes_by_role(meta) == bytes_by_role(real)
    assert checkpoint_bytes(meta) == checkpoint_bytes(real)
    assert meta.packs == real.packs
    assert all(p.device.type == "meta" for p in meta.causal.parameters())


def test_adapters_that_exist_are_described_without_their_weights(tiny: TinyModels, tmp_path: Path):
    start = build_roles(config("grpo", tiny("llama"), lora={"r": 3}), device=CPU, dtype=torch.float32)
    assert start.peft is not None
    save_adapter(start.peft, POLICY_ADAPTER, tmp_path)
    save_file({"weight": torch.ones(1, 32), "bias": torch.zeros(1)}, tmp_path / SCORE_HEAD)
    given = {"model": {"path": str(tiny("llama")), "adapter": str(tmp_path)}, "reward": {"model": str(tmp_path)}}
    settings = config("grpo", tiny("llama"), **given)
    real = build_roles(settings, device=CPU, dtype=torch.float32)
    build_reward_model(settings, real, dtype=torch.float32)
    meta = meta_roles(settings, dtype=torch.float32)
    assert bytes_by_role(meta) == bytes_by_role(real)
    assert {"policy", "reference", "reward"} <= bytes_by_role(meta).keys()
    assert all(p.device.type == "meta" for p in meta.causal.parameters())


def test_a_reward_model_of_its_own_is_described_without_its_weights(tiny: TinyModels, tmp_path: Path):
    settings = config("grpo", tiny("llama"), reward={"model": str(tiny.reward("llama")), "functions": []})
    roles = build_roles(settings, device=CPU, dtype=torch.float32)
    real = build_reward_model(settings, roles, dtype=torch.float32)
    meta = meta_reward_model(settings, dtype=torch.float32)
    assert real is not None
    assert meta is not None
    assert bytes_by_role(roles, reward_model=meta) == bytes_by_role(roles, reward_model=real.model)
    assert meta_reward_model(config("grpo", tiny("llama")), dtype=torch.float32) is None


def test_a_four_bit_base_is_half_a_byte_a_weight_of_its_linear_layers(tiny: TinyModels):
    roles = meta_roles(config("grpo", tiny("llama")), dtype=torch.bfloat16)
    # per layer: q, o 32 x 32; k, v 32 x 16; gate, up, down 32 x 64; two layers
    linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    everything = bytes_by_role(roles)["base"]
    assert four_bit_bytes(roles) == pytest.approx(everything - 2 * linear + 0.516 * linear, rel=1e-3)
