"""Policy: which one acts, which parameters it trains and that no others change, dropout, recomputed layers."""

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.building import (
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
from tests.tiny_models import TinyModels, sharp_model
from tinyrl.models.batch import batch_of, examples
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import lora_matrices, merged_weight
from tinyrl.models.policy import CriticKind, Policy
from tinyrl.models.recomputation import recomputable_layers


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
        assert {p.dtype for p in roles.reference_model.parameters() if p.dim() > 1} == {dtype}
        assert {p.dtype for p in roles.parameters["policy"].values()} == {torch.float32}


@pytest.mark.parametrize(("logprob", "agrees"), [(-1.0, True), (-1.5, False), (torch.nan, False), (-torch.inf, False)])
def test_a_policy_with_other_numbers_or_none_is_not_its_reference(logprob: float, agrees: bool):
    """Whose log-probability is -1."""
    policy: Any = SimpleNamespace(
        has_reference=True,
        dtype=torch.float32,
        batch_of=lambda items: items,
        acting=lambda role: contextlib.nullcontext(),
        run_device=SimpleNamespace(autocast=contextlib.nullcontext),
        logprobs=lambda role, batch, temperature: [torch.tensor([logprob if role == "policy" else -1.0])],
        _describe_reference=lambda: "a copy",
    )
    with contextlib.nullcontext() if agrees else pytest.raises(ValueError, match="policy and reference differ"):
        Policy.check_reference(policy, [[5, 6, 7]], temperature=1.0)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3-moe", "gemma4", "qwen3.5", "gemma2"])
@pytest.mark.wide
def test_a_frozen_copy_in_half_precision_computes_what_float32_weights_do(kind: str, tiny: TinyModels):
    """Also norms with biases, experts, scaled embeddings and those of a layer, which autocast does not cast."""
    roles = full_roles(tiny(kind), dtype=torch.bfloat16)
    before = {name: tensor.data_ptr() for name, tensor in every_tensor(roles).items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logprobs(roles, "reference"), logprobs(roles, "policy"))
    assert {name: tensor.data_ptr() for name, tensor in every_tensor(roles).items()} == before
    assert roles.reference_model is not None
    assert {p.dtype for p in roles.reference_model.parameters() if p.dim() > 1} == {torch.bfloat16}


def test_every_adapter_acts_alone(tiny: TinyModels):
    """A frozen copy of the start, a critic's in layers the policy has none in, none at all, and again the policy's."""
    with torch.no_grad():
        expected = load_causal_lm(str(tiny("llama")), dtype=torch.float32)(input_ids=a_batch().input_ids).logits
    roles = lora_roles(tiny("llama"), targets=["q_proj", "embed_tokens"])
    stir(roles.parameters["policy"])
    start = logprobs(roles, "policy")
    roles.freeze_reference_adapter()
    roles.add_critic("adapter", lora=lora())
    stir(roles.parameters["critic"], seed=2)
    assert torch.equal(logprobs(roles, "policy"), start)
    stir(roles.parameters["policy"], seed=1)
    assert torch.equal(logprobs(roles, "reference"), start)
    with torch.no_grad(), roles.acting("base") as model:
        assert torch.equal(model(input_ids=a_batch().input_ids).logits, expected)
    moved, critic, base = (logprobs(roles, role) for role in ("policy", "critic", "base"))
    for one, other in ((start, base), (start, critic), (start, moved), (critic, base)):
        assert not torch.allclose(one, other, atol=1e-3)
    with torch.no_grad():  # outside every block the policy acts
        assert torch.equal(roles.logprobs("policy", a_batch(), temperature=1.0)[0], moved)
    assert not any(p.requires_grad for p in roles.adapters.parameters("reference").values())
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
    """2106.09685, Eq. 3."""
    roles = lora_roles(tiny("llama"), targets=["q_proj"])
    stir(roles.parameters["policy"])
    layer: Any = roles.adapters.layers("default")[0]
    a, b = lora_matrices(layer, "default") or (torch.empty(0), torch.empty(0))
    base, merged = (merged_weight(layer, adapter)[0] for adapter in (None, "default"))
    torch.testing.assert_close(merged, base + b @ a)
    torch.testing.assert_close(b @ a, 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight)  # alpha / r


@pytest.mark.parametrize(("kind", "module"), [("llama", "lm_head"), ("qwen2", "embed_tokens")])
def test_lora_on_the_head_is_refused(tiny: TinyModels, kind: str, module: str):
    """Qwen-2's head is its embedding: merged into it, an adapter of the embedding would change the head, too."""
    with pytest.raises(ValueError, match=r"lora\.target_modules names .*language-model head"):
        lora_roles(tiny(kind), targets=["q_proj", module])


# ---- dropout ----


def test_dropout_is_loras_alone_in_passes_with_gradients_that_ask_for_it(tiny: TinyModels):
    """Off: GPT-2's own 0.1, and LoRA's in every role, a frozen copy's and a critic's too."""
    roles = lora_roles(tiny("gpt2"), dropout=0.5)
    stir(roles.parameters["policy"])
    roles.freeze_reference_adapter()
    roles.add_critic("adapter", lora=lora(dropout=0.5))
    stir(roles.parameters["critic"])

    def two_passes(role: Any) -> list[Tensor]:
        with roles.acting(role):
            return [roles.logprobs("policy", a_batch(), temperature=1.0)[0].detach() for _ in range(2)]

    for role in ("policy", "reference", "critic"):
        assert torch.equal(*two_passes(role)), role
    roles.lora_dropout = True
    first, second = two_passes("policy")
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
        batch = batch_of(examples([[2, 3, 4, eos, 6]], [[5, eos, 7]]))
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
    found, expected = (roles.batch_of(examples([[2, 3]], [[5, beyond, 6]]), last_tokens=True) for beyond in (299, 257))
    with torch.no_grad(), roles.acting("critic"):
        assert torch.equal(roles.values(found), roles.values(expected))
    assert found.input_ids.max() == 299  # the policy reads what it sampled


# ---- gradient checkpointing ----


def gradients(roles: Policy, role: Any, *, recompute: bool) -> tuple[dict[str, Tensor | None], int]:
    """Gradients by name, and how often the model's first MLP ran."""
    runs: list[int] = []
    mlp = next(m for n, m in (roles.critic_model or roles.causal).named_modules() if n.endswith(".mlp"))
    handle = mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    torch.manual_seed(0)
    with roles.acting(role), roles.gradient_checkpointing() if recompute else contextlib.nullcontext():
        found = roles.values(a_batch()) if role == "critic" else roles.logprobs(role, a_batch(), temperature=1.0)[0]
        found.square().sum().backward()
    handle.remove()
    taken = {name: p.grad for name, p in roles.parameters[role].items()}
    for parameter in roles.parameters[role].values():
        parameter.grad = None
    return taken, len(runs)


def test_recomputed_layers_have_the_same_gradient_and_drop_the_same(tiny: TinyModels):
    """A critic of its own, whose dropout of 0.1 would show if it were on, and a policy with LoRA's dropout."""
    critic = roles_with_critic(tiny("gpt2"), with_lora=False, kind="separate")
    policy = lora_roles(tiny("llama"), dropout=0.5)
    policy.lora_dropout = True
    for roles, role in ((critic, "critic"), (policy, "policy")):
        roles.check_gradient_checkpointing()
        stir(roles.parameters[role])
        passes = [gradients(roles, role, recompute=recompute) for recompute in (False, True, False)]
        assert [runs for _, runs in passes] == [1, 2, 1]  # nothing stays switched on
        for found, _ in passes[1:]:
            torch.testing.assert_close(found, passes[0][0], rtol=0, atol=0)
        assert not any(m.training for m in recomputable_layers(roles.causal))


# ---- layers that PEFT refuses ----


def test_all_linear_leaves_out_what_peft_cannot_adapt_and_says_so(tiny: TinyModels):
    """Falcon-H1's `out_proj` of Mamba; for a critic's adapter as well."""
    policy = roles_with_critic(tiny("falcon-h1"), with_lora=True, kind="adapter")
    for role in ("policy", "critic"):
        adapted = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in policy.parameters[role] if ".lora_" in name}
        assert {"q_proj", "in_proj", "gate_proj"} < adapted
        assert "out_proj" not in adapted
    assert "out_proj" in policy.describe_passes()
    with pytest.raises(ValueError, match="out_proj"):
        lora_roles(tiny("falcon-h1"), targets=["out_proj"])
