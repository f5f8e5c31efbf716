"""Policy: which one acts, which parameters it trains and that no others change, dropout, memory, recomputed layers."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from tests.models.building import (
    CPU,
    CRITICS,
    a_batch,
    every_tensor,
    full_roles,
    logprobs,
    lora,
    lora_roles,
    roles_with_critic,
    stir,
    values,
)
from tests.tiny_models import HIDDEN, TinyModels, sharp_model
from tinyrl.models.batch import make_batch
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import load_start_adapter, lora_matrices, merged_weight, save_adapter
from tinyrl.models.policy import CriticKind, Policy, recomputable_layers


def test_adapters_off_is_the_base(tiny: TinyModels):
    base = load_causal_lm(str(tiny("gpt2")), dtype=torch.float32)
    roles = lora_roles(tiny("gpt2"))
    stir(roles.parameters["policy"])
    ids = a_batch().input_ids
    with torch.no_grad():
        expected = base(input_ids=ids).logits
        for role in ("reference", "base"):
            with roles.acting(role) as model:
                assert torch.equal(model(input_ids=ids).logits, expected)
        with roles.acting("policy") as model:
            assert not torch.allclose(model(input_ids=ids).logits, expected, atol=1e-2)


@pytest.mark.parametrize(("make", "dtype"), [(lora_roles, torch.float32), (full_roles, torch.bfloat16)])
def test_reference_is_the_policy_at_the_start_and_stays(tmp_path: Path, make: Any, dtype: torch.dtype):
    roles = make(sharp_model(tmp_path, num_hidden_layers=12), dtype=dtype)

    def computed(role: str) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            return logprobs(roles, role)

    start, reference = computed("policy"), computed("reference")
    assert torch.equal(reference, start)
    stir(roles.parameters["policy"])
    assert torch.equal(computed("reference"), reference)
    assert not torch.allclose(computed("policy"), start, atol=1e-3)
    if make is full_roles:
        assert roles.reference_model is not None
        assert {p.dtype for p in roles.reference_model.parameters()} == {dtype}
        assert {p.dtype for p in roles.parameters["policy"].values()} == {torch.float32}


def test_frozen_reference_adapter_keeps_where_the_policy_started(tiny: TinyModels):
    roles = lora_roles(tiny("llama"), targets=["q_proj", "embed_tokens"])
    stir(roles.parameters["policy"])
    start, base = logprobs(roles, "policy"), logprobs(roles, "base")
    assert not torch.allclose(start, base, atol=1e-3)
    roles.freeze_reference_adapter()
    stir(roles.parameters["policy"], seed=1)
    assert torch.equal(logprobs(roles, "reference"), start)
    assert torch.equal(logprobs(roles, "base"), base)
    assert not any(p.requires_grad for p in roles.adapter_parameters("reference").values())
    assert all(p.requires_grad for p in roles.parameters["policy"].values())


def changed_by_a_step(roles: Policy, role: str) -> set[int]:
    """Ids of the tensors that move when everything with a gradient takes a step, after a pass of `role`."""
    before = {name: tensor.detach().clone() for name, tensor in every_tensor(roles).items()}
    with roles.acting("policy" if role == "policy" else roles.value_role):
        if role == "policy":
            found = roles.logprobs("policy", a_batch(), temperature=1.0)[0]
        else:
            found = values(roles, detach=roles.critic_kind == "shared-detached")
        found.square().sum().backward()
    with torch.no_grad():
        for tensor in every_tensor(roles).values():
            if tensor.grad is not None:
                tensor -= 0.1 * tensor.grad
                tensor.grad = None
    return {id(tensor) for name, tensor in every_tensor(roles).items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize(("with_lora", "kind"), CRITICS)
@pytest.mark.wide
def test_every_parameter_of_a_role_moves_and_no_other(tiny: TinyModels, with_lora: bool, kind: CriticKind):
    """On a bfloat16 base; what trains is float32."""
    roles = roles_with_critic(tiny("llama"), with_lora=with_lora, kind=kind, dtype=torch.bfloat16)
    for parameters in roles.parameters.values():
        stir(parameters)
    policy, critic = ({id(p) for p in roles.parameters[role].values()} for role in ("policy", "critic"))
    assert roles.value_head is not None
    head = {id(p) for p in roles.value_head.parameters()}
    assert not policy & critic
    assert head < critic if kind in ("adapter", "separate") else head == critic
    assert changed_by_a_step(roles, "policy") == policy
    # a shared critic's value loss also moves the backbone it reads, but not the language-model head
    moved = changed_by_a_step(roles, "critic")
    backbone = {id(p) for p in roles.backbone("policy").parameters()} & policy
    assert moved == (critic | backbone if kind == "shared" else critic)
    assert changed_by_a_step(roles, "policy") == policy  # and the other way round again
    trainable = [t for t in every_tensor(roles).values() if t.requires_grad]
    assert ({id(t) for t in trainable}, {t.dtype for t in trainable}) == (policy | critic, {torch.float32})
    frozen = {p.dtype for p in roles.causal.parameters() if not p.requires_grad}
    assert frozen == ({torch.bfloat16} if with_lora else set())
    with torch.no_grad(), roles.acting(roles.value_role):
        assert logprobs(roles, "policy").dtype == values(roles).dtype == torch.float32


def test_merged_weights_are_those_of_the_branches(tiny: TinyModels):
    """2106.09685, Eq. 3; the copies that a sampler makes leave the base as it is."""
    roles = lora_roles(tiny("llama"), targets=["q_proj"])
    stir(roles.parameters["policy"])
    expected = logprobs(roles, "policy")
    layer: Any = roles.adapted_layers("default")[0]
    before = {name: tensor.clone() for name, tensor in roles.causal.state_dict().items()}
    a, b = lora_matrices(layer, "default") or (torch.empty(0), torch.empty(0))
    base, merged = (merged_weight(layer, adapter)[0] for adapter in (None, "default"))
    torch.testing.assert_close(merged, base + b @ a)
    torch.testing.assert_close(b @ a, 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight)  # alpha / r
    with torch.no_grad(), roles.acting_merged("policy"):
        found = roles.logprobs("policy", a_batch(), temperature=1.0)[0]
    torch.testing.assert_close(found, expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in roles.causal.state_dict().items())


def test_adapters_of_other_roles_are_off_in_layers_the_policy_has_none_in(tiny: TinyModels):
    roles = lora_roles(tiny("llama"), targets=["q_proj"])
    start = logprobs(roles, "policy")
    roles.add_critic("adapter", lora=lora())
    stir(roles.parameters["critic"])
    assert torch.equal(logprobs(roles, "policy"), start)
    assert torch.equal(logprobs(roles, "reference"), start)
    assert not torch.allclose(logprobs(roles, "critic"), start, atol=1e-3)
    with torch.no_grad():  # and outside every block the policy acts
        assert torch.equal(roles.logprobs("policy", a_batch(), temperature=1.0)[0], start)


@pytest.mark.parametrize(("kind", "module"), [("llama", "lm_head"), ("qwen2", "embed_tokens")])
def test_lora_on_the_head_is_refused(tiny: TinyModels, kind: str, module: str):
    """Qwen-2's head is its embedding: merged into it, an adapter of the embedding would change the head, too."""
    with pytest.raises(ValueError, match=r"lora\.target_modules names .*language-model head"):
        lora_roles(tiny(kind), targets=["q_proj", module])


# ---- dropout ----


def two_passes(roles: Policy, role: Any = "policy") -> list[Tensor]:
    """Log-probabilities of two passes with gradients."""
    with roles.acting(role):
        who = "reference" if role == "reference" else "policy"
        return [roles.logprobs(who, a_batch(), temperature=1.0)[0].detach() for _ in range(2)]


def test_dropout_is_off_in_every_role(tiny: TinyModels, tmp_path: Path):
    """GPT-2's own 0.1, a fresh LoRA's, a loaded one's, a frozen copy's, a critic's."""
    fresh = lora_roles(tiny("gpt2"), dropout=0.5)
    stir(fresh.parameters["policy"])
    assert isinstance(fresh.peft, PeftModel)
    save_adapter(fresh.peft, "default", tmp_path)
    base = load_causal_lm(str(tiny("gpt2")), dtype=torch.float32)
    loaded = Policy(load_start_adapter(base, str(tmp_path), dropout=0.5), device=CPU)
    loaded.freeze_reference_adapter()
    loaded.add_critic("adapter", lora=lora(dropout=0.5))
    stir(loaded.parameters["critic"])
    for roles, role in ((fresh, "policy"), (loaded, "policy"), (loaded, "reference"), (loaded, "critic")):
        assert torch.equal(*two_passes(roles, role)), role


def test_lora_dropout_is_on_in_passes_with_gradients_only(tiny: TinyModels):
    roles = lora_roles(tiny("gpt2"), dropout=0.5)
    off = logprobs(roles, "policy")
    roles.lora_dropout = True
    assert torch.equal(two_passes(roles)[0], off)  # B is zero: no dropout but LoRA's is on
    stir(roles.parameters["policy"])
    first, second = two_passes(roles)
    assert not torch.allclose(first, second)
    assert torch.equal(logprobs(roles, "policy"), logprobs(roles, "policy"))
    assert not any(m.training for m in roles.causal.modules() if isinstance(m, nn.Dropout))


# ---- tokens at the edge of an embedding ----


def test_the_row_of_the_pad_token_learns_as_every_other(tiny: TinyModels, tmp_path: Path):
    """Where pad == eos the library would give the embedding of the end token no gradient. Gemma-4 has one a layer."""
    shutil.copytree(folder := tiny("gemma4", pad_is_eos=True), without := tmp_path / "model")
    config = json.loads((without / "config.json").read_text())
    eos = config["pad_token_id"]
    (without / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))

    def gradients(folder: Path) -> dict[str, Tensor]:
        roles = full_roles(folder, reference=False)
        roles.add_critic("separate", model=load_causal_lm(str(folder), dtype=torch.float32))
        stir(roles.parameters["critic"])
        batch = make_batch([[2, 3, 4, eos, 6]], [[5, eos, 7]])
        with roles.acting("policy"):
            roles.logprobs("policy", batch, temperature=1.0)[0].sum().backward()
        with roles.acting("critic"):
            roles.values(batch).sum().backward()
        return {n: p.grad for role in roles.parameters.values() for n, p in role.items() if p.grad is not None}

    ours, expected = gradients(folder), gradients(without)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert all(grad[eos].abs().max() > 1e-4 for n, grad in ours.items() if "embed_tokens" in n)


def test_a_critic_with_a_smaller_embedding_reads_ids_it_has_no_row_for_as_its_last(tiny: TinyModels, tmp_path: Path):
    """Models of one family have embeddings of several sizes, and a policy samples from the rows that no token has."""
    roles = lora_roles(sharp_model(tmp_path, vocab_size=300))
    roles.add_critic("separate", model=load_causal_lm(str(tiny("llama")), dtype=torch.float32))
    stir(roles.parameters["critic"])
    found, expected = (roles.batch([[2, 3]], [[5, beyond, 6]], last_tokens=True) for beyond in (299, 257))
    with torch.no_grad(), roles.acting("critic"):
        assert torch.equal(roles.values(found), roles.values(expected))
    assert found.input_ids.max() == 299  # the policy reads what it sampled


# ---- memory ----


def test_bytes_by_role(tiny: TinyModels):
    roles = roles_with_critic(tiny("llama"), with_lora=True, kind="adapter")
    # per layer: q, o 32 -> 32; k, v 32 -> 16; gate, up 32 -> 64; down 64 -> 32; rank 4, two layers
    adapter = 4 * 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 2 * (32 + 64) + (64 + 32))
    base = 4 * sum(p.numel() for n, p in roles.causal.named_parameters() if "lora_" not in n)
    assert roles.bytes_by_role() == {"base": base, "policy": adapter, "critic": adapter + 4 * (HIDDEN + 1)}
    roles.freeze_reference_adapter()
    assert roles.bytes_by_role()["reference"] == adapter
    own = roles_with_critic(tiny("llama"), with_lora=False, kind="separate").bytes_by_role()
    assert own["critic"] > own["reference"] == own["base"] == base
    assert "policy" not in own  # full fine-tuning: the policy is the base


# ---- gradient checkpointing ----


def gradients(roles: Policy, role: Any, *, recompute: bool) -> tuple[dict[str, Tensor | None], int]:
    """Gradients by name, and how often the model's first MLP ran."""
    runs = []
    trained = roles.critic_model if role == "critic" and roles.critic_model is not None else roles.causal
    mlp = next(m for n, m in trained.named_modules() if n.endswith((".mlp", ".fc1")))
    handle = mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    with roles.acting(role), roles.gradient_checkpointing() if recompute else contextlib.nullcontext():
        of_policy = role == "policy"
        found = roles.logprobs("policy", a_batch(), temperature=1.0)[0] if of_policy else roles.values(a_batch())
        found.square().sum().backward()
    handle.remove()
    taken = {name: p.grad for name, p in roles.parameters[role].items()}
    for parameter in roles.parameters[role].values():
        parameter.grad = None
    return taken, len(runs)


@pytest.mark.parametrize(
    ("with_lora", "kind", "role", "model"),
    [
        (True, "shared", "policy", "gpt2"),  # has a dropout of 0.1: one that is on would show
        (False, "shared", "policy", "llama"),
        (False, "separate", "critic", "gpt2"),
    ],
)
def test_recomputed_layers_have_the_same_gradient(tiny: TinyModels, with_lora: bool, kind: Any, role: str, model: str):
    roles = roles_with_critic(tiny(model), with_lora=with_lora, kind=kind)
    roles.check_gradient_checkpointing()
    stir(roles.parameters[role])
    passes = [gradients(roles, role, recompute=recompute) for recompute in (False, True, False)]
    assert [runs for _, runs in passes] == [1, 2, 1]  # nothing stays switched on
    for found, _ in passes[1:]:
        torch.testing.assert_close(found, passes[0][0], rtol=0, atol=0)
    assert not any(m.training for m in recomputable_layers(roles.causal))


def test_lora_dropout_drops_the_same_when_recomputed(tiny: TinyModels):
    roles = lora_roles(tiny("llama"), dropout=0.5)
    stir(roles.parameters["policy"])
    roles.lora_dropout, found = True, []
    for recompute in (False, True):
        torch.manual_seed(0)
        found.append(gradients(roles, "policy", recompute=recompute)[0])
    torch.testing.assert_close(*found)
