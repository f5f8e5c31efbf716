"""Checkpoints of roles: everything comes back, plain libraries can read them, and damage is noticed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.models.building import (
    CRITIC_IDS,
    CRITICS,
    every_tensor,
    full_roles,
    logprobs,
    lora_roles,
    roles_with_critic,
    stir,
    values,
)
from tests.tiny_models import TinyModels
from tinyrl.models.loading import load_causal_lm, load_tokenizer
from tinyrl.models.roles import CriticKind, Roles, load_policy, load_roles, save_roles

KINDS = ["qwen2", "gpt2"]


def save(roles: Roles, folder: Path, base: Path) -> None:
    folder.mkdir()
    save_roles(roles, folder, tokenizer=load_tokenizer(str(base)))


@pytest.mark.parametrize(("with_lora", "kind"), CRITICS, ids=CRITIC_IDS)
@pytest.mark.wide
def test_every_role_comes_back(tiny: TinyModels, tmp_path: Path, with_lora: bool, kind: CriticKind):
    base = tiny("qwen2")
    trained = roles_with_critic(base, with_lora=with_lora, kind=kind)
    again = roles_with_critic(base, with_lora=with_lora, kind=kind)
    if kind == "adapter":
        trained.freeze_reference_adapter()
        again.freeze_reference_adapter()
        stir(trained.adapter_parameters("reference"), seed=5)
    for seed, parameters in enumerate(trained.parameters.values()):
        stir(parameters, seed=seed)
    save(trained, tmp_path / "checkpoint", base)
    identities = {role: {n: id(p) for n, p in ps.items()} for role, ps in again.parameters.items()}
    assert not torch.allclose(logprobs(again, "policy"), logprobs(trained, "policy"), atol=1e-3)
    load_roles(again, tmp_path / "checkpoint")
    theirs = every_tensor(trained)
    for name, tensor in every_tensor(again).items():
        if ".score." not in name and not name.startswith("critic/lm_head"):
            assert torch.equal(tensor, theirs[name]), name
            assert tensor.requires_grad == theirs[name].requires_grad, name
    assert torch.equal(logprobs(again, "policy"), logprobs(trained, "policy"))
    assert torch.equal(logprobs(again, "reference"), logprobs(trained, "reference"))
    assert torch.equal(values(again), values(trained))
    assert values(again)[0].abs().min() > 0
    # an optimizer made before the load still holds the same parameters
    assert identities == {role: {n: id(p) for n, p in ps.items()} for role, ps in again.parameters.items()}


def greedy(model: Any) -> list[int]:
    prompt = torch.tensor([[20, 30, 40, 50]])
    out = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16, pad_token_id=0
    )
    return out[0].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.wide
def test_the_adapter_is_plain_peft(tiny: TinyModels, tmp_path: Path, kind: str):
    roles = lora_roles(tiny(kind))
    stir(roles.parameters["policy"])
    save(roles, tmp_path / "checkpoint", tiny(kind))
    base = AutoModelForCausalLM.from_pretrained(tiny(kind), dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, str(tmp_path / "checkpoint"))
    with roles.acting("policy") as model:
        tokens = greedy(model)
    assert greedy(plain) == tokens
    with plain.disable_adapter():
        assert greedy(plain) != tokens
    assert not any(
        "critic" in key or "default" in key for key in load_file(tmp_path / "checkpoint/adapter_model.safetensors")
    )
    assert json.loads((tmp_path / "checkpoint/adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.wide
def test_a_full_checkpoint_is_a_plain_model_with_its_tokenizer(tiny: TinyModels, tmp_path: Path, kind: str):
    roles = full_roles(tiny(kind), reference=False)
    stir(roles.parameters["policy"])
    save(roles, tmp_path / "checkpoint", tiny(kind))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert greedy(plain) == greedy(roles.causal)
    assert greedy(plain) != greedy(load_causal_lm(str(tiny(kind)), dtype=torch.float32))
    assert (
        load_tokenizer(str(tmp_path / "checkpoint"))("ab").input_ids == load_tokenizer(str(tiny(kind)))("ab").input_ids
    )
    again = full_roles(tiny(kind), reference=False)
    load_policy(again, tmp_path / "checkpoint")
    assert torch.equal(logprobs(again, "policy"), logprobs(roles, "policy"))


def test_files_of_a_checkpoint(tiny: TinyModels, tmp_path: Path):
    def tensors(folder: Path) -> set[str]:
        return {str(p.relative_to(folder)) for p in folder.rglob("*.safetensors")}

    lora = roles_with_critic(tiny("llama"), with_lora=True, kind="adapter")
    lora.freeze_reference_adapter()
    save(lora, tmp_path / "lora", tiny("llama"))
    adapter = "adapter_model.safetensors"
    assert tensors(tmp_path / "lora") == {
        adapter,
        f"critic/{adapter}",
        f"reference/{adapter}",
        "value_head.safetensors",
    }
    full = roles_with_critic(tiny("llama"), with_lora=False, kind="separate")
    save(full, tmp_path / "full", tiny("llama"))
    assert tensors(tmp_path / "full") == {"model.safetensors", "critic/model.safetensors", "value_head.safetensors"}
    pickled = [p.name for p in tmp_path.rglob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl")]
    assert pickled == []


@pytest.mark.parametrize(("damage", "message"), [("more", "no place|unexpected"), ("shape", "size mismatch")])
def test_weights_that_do_not_fit_are_refused(tiny: TinyModels, tmp_path: Path, damage: str, message: str):
    """Of an adapter: test_damaged_folders.py."""
    roles = full_roles(tiny("llama"))
    save(roles, tmp_path / "checkpoint", tiny("llama"))
    tensors = load_file(file := tmp_path / "checkpoint" / "model.safetensors")
    name = next(n for n in tensors if "down_proj" in n)
    if damage == "more":
        tensors[name.replace("layers.0", "layers.9")] = tensors[name].clone()
    else:
        tensors[name] = torch.zeros(3, 5)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=message):
        load_policy(roles, tmp_path / "checkpoint")
