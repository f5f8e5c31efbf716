"""Checkpoints of roles: everything comes back, plain libraries can read them, and damage is noticed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.models.building import CRITICS, every_tensor, full_roles, logprobs, lora_roles, roles_with_critic, stir
from tests.tiny_models import TinyModels
from tinyrl.models.loading import load_tokenizer
from tinyrl.models.policy import CriticKind, Policy
from tinyrl.models.policy_files import restore_policy, save_policy

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".pkl")
ADAPTER, HEAD, MODEL = "adapter_model.safetensors", "value_head.safetensors", "model.safetensors"
FILES = {
    "adapter": {ADAPTER, f"critic/{ADAPTER}", f"reference/{ADAPTER}", HEAD},
    "shared-detached": {ADAPTER, HEAD},
    "shared": {MODEL, HEAD},
    "separate": {MODEL, f"critic/{MODEL}", HEAD},
}


def save(roles: Policy, folder: Path, base: Path) -> None:
    folder.mkdir()
    roles.tokenizer = load_tokenizer(str(base))
    save_policy(roles, folder)


@pytest.mark.parametrize(("with_lora", "kind"), CRITICS)
@pytest.mark.wide
def test_every_role_comes_back(tiny: TinyModels, tmp_path: Path, with_lora: bool, kind: CriticKind):
    base = tiny("qwen2")
    trained, again = (roles_with_critic(base, with_lora=with_lora, kind=kind) for _ in range(2))
    if kind == "adapter":
        trained.freeze_reference_adapter()
        again.freeze_reference_adapter()
        stir(trained.adapters.parameters("reference"), seed=5)
    for seed, parameters in enumerate(trained.parameters.values()):
        stir(parameters, seed=seed)
    save(trained, tmp_path / "checkpoint", base)
    written = {str(p.relative_to(tmp_path / "checkpoint")) for p in tmp_path.rglob("*.*") if p.suffix in WEIGHTS}
    assert written == FILES[kind]
    held = {role: {n: id(p) for n, p in ps.items()} for role, ps in again.parameters.items()}
    restore_policy(again, tmp_path / "checkpoint")
    theirs = every_tensor(trained)
    for name, tensor in every_tensor(again).items():
        if ".score." not in name and not name.startswith("critic_model/lm_head"):
            assert torch.equal(tensor, theirs[name]), name
            assert tensor.requires_grad == theirs[name].requires_grad, name
    assert torch.equal(logprobs(again, "policy"), logprobs(trained, "policy"))
    assert torch.equal(logprobs(again, "reference"), logprobs(trained, "reference"))
    # an optimizer made before the load still holds the same parameters
    assert held == {role: {n: id(p) for n, p in ps.items()} for role, ps in again.parameters.items()}


def greedy(model: Any) -> list[int]:
    prompt = torch.tensor([[20, 30, 40, 50]])
    out = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16, pad_token_id=0
    )
    return out[0].tolist()


def test_the_adapter_is_plain_peft(tiny: TinyModels, tmp_path: Path):
    """GPT-2's weights are transposed."""
    roles = lora_roles(tiny("gpt2"))
    stir(roles.parameters["policy"])
    save(roles, tmp_path / "checkpoint", tiny("gpt2"))
    base = AutoModelForCausalLM.from_pretrained(tiny("gpt2"), dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, str(tmp_path / "checkpoint"))
    with roles.acting("policy") as model:
        assert greedy(plain) == greedy(model)
    with plain.disable_adapter():
        assert greedy(plain) != greedy(roles.causal)


def test_a_full_checkpoint_is_a_plain_model_and_another_one_does_not_fit(tiny: TinyModels, tmp_path: Path):
    """Of an adapter: test_damaged_folders.py."""
    roles = full_roles(tiny("qwen2"), reference=False)
    start = greedy(roles.causal)
    stir(roles.parameters["policy"])
    save(roles, folder := tmp_path / "checkpoint", tiny("qwen2"))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert greedy(plain) == greedy(roles.causal) != start
    assert load_tokenizer(str(folder))("ab").input_ids == load_tokenizer(str(tiny("qwen2")))("ab").input_ids
    again = full_roles(tiny("qwen2"), reference=False)
    restore_policy(again, folder, only="policy")
    assert torch.equal(logprobs(again, "policy"), logprobs(roles, "policy"))
    tensors = load_file(file := folder / "model.safetensors")
    name = next(n for n in tensors if "down_proj" in n)
    more = {name.replace("layers.0", "layers.9"): tensors[name].clone()}
    for changed, message in ((more, "no place|unexpected"), ({name: torch.zeros(3, 5)}, "of another shape")):
        save_file({**tensors, **changed}, file)
        with pytest.raises(ValueError, match=message):
            restore_policy(again, folder, only="policy")
