"""Roles: which one acts, which parameters it trains, and that no others change."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from tests.models.building import (
    CPU,
    CRITIC_IDS,
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
from tinyrl.models.batches import make_batch
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import load_start_adapter, save_adapter, wrap_in_lora
from tinyrl.models.roles import CriticKind, Roles


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_adapters_off_is_the_base(tiny: TinyModels, kind: str):
    base = load_causal_lm(str(tiny(kind)), dtype=torch.float32)
    roles = lora_roles(tiny(kind))
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
def test_reference_is_the_policy_at_the_start_and_stays(tmp_path: Path, make, dtype: torch.dtype):
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
    targets = ["q_proj", "embed_tokens"]
    roles = Roles(wrap_in_lora(load_causal_lm(str(tiny("llama")), dtype=torch.float32), lora(targets)), device=CPU)
    stir(roles.parameters["policy"])
    start, base = logprobs(roles, "policy"), logprobs(roles, "base")
    roles.freeze_reference_adapter()
    assert torch.equal(logprobs(roles, "reference"), start)
    assert not torch.allclose(start, base, atol=1e-3)
    stir(roles.parameters["policy"], seed=1)
    assert torch.equal(logprobs(roles, "reference"), start)
    assert torch.equal(logprobs(roles, "base"), base)
    assert not any(p.requires_grad for p in roles.adapter_parameters("reference").values())
    assert all(p.requires_grad for p in roles.parameters["policy"].values())


def changed_by_a_step(roles: Roles, role: str) -> set[int]:
    """Ids of the tensors that move when everything with a gradient takes a step, after a pass of `role`."""
    before = {name: tensor.detach().clone() for name, tensor in every_tensor(roles).items()}
    own = roles.critic_kind in ("adapter", "separate")
    with roles.acting("critic" if role == "critic" and own else "policy"):
        if role == "policy":
            roles.logprobs("policy", a_batch(), temperature=1.0)[0].square().sum().backward()
        else:
            states = None if own else roles.policy_states(a_batch())
            if states is not None and roles.critic_kind == "shared-detached":
                states = states.detach()
            roles.values(a_batch(), states=states).square().sum().backward()
    with torch.no_grad():
        for tensor in every_tensor(roles).values():
            if tensor.grad is not None:
                tensor -= 0.1 * tensor.grad
                tensor.grad = None
    return {id(tensor) for name, tensor in every_tensor(roles).items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize(("with_lora", "kind"), CRITICS, ids=CRITIC_IDS)
@pytest.mark.wide
def test_every_parameter_of_a_role_moves_and_no_other(tiny: TinyModels, with_lora: bool, kind: CriticKind):
    roles = roles_with_critic(tiny("llama"), with_lora=with_lora, kind=kind)
    for parameters in roles.parameters.values():
        stir(parameters)
    policy, critic = ({id(p) for p in roles.parameters[role].values()} for role in ("policy", "critic"))
    head = {id(p) for p in roles.value_head.parameters()} if roles.value_head is not None else set()
    assert not policy & critic
    assert head < critic if kind in ("adapter", "separate") else head == critic
    assert changed_by_a_step(roles, "policy") == policy
    # a shared critic's value loss also moves the backbone it reads, but not the language-model head
    moved = changed_by_a_step(roles, "critic")
    backbone = {id(p) for p in roles.backbone("policy").parameters()} & policy
    assert moved == (critic | backbone if kind == "shared" else critic)
    assert changed_by_a_step(roles, "policy") == policy  # and the other way round again


def test_adapters_of_other_roles_are_off_in_layers_the_policy_has_none_in(tiny: TinyModels):
    roles = Roles(wrap_in_lora(load_causal_lm(str(tiny("llama")), dtype=torch.float32), lora(["q_proj"])), device=CPU)
    start = logprobs(roles, "policy")
    roles.add_critic("adapter", lora=lora())
    stir(roles.parameters["critic"])
    assert torch.equal(logprobs(roles, "policy"), start)
    assert torch.equal(logprobs(roles, "reference"), start)
    with torch.no_grad(), roles.acting("critic"):
        assert not torch.allclose(roles.logprobs("policy", a_batch(), temperature=1.0)[0], start, atol=1e-3)
    with torch.no_grad():  # and outside every block the policy acts
        assert torch.equal(roles.logprobs("policy", a_batch(), temperature=1.0)[0], start)


@pytest.mark.parametrize(("kind", "module"), [("llama", "lm_head"), ("qwen2", "embed_tokens")])
def test_lora_on_the_head_is_refused(tiny: TinyModels, kind: str, module: str):
    """Qwen-2's head is its embedding: merged into it, an adapter of the embedding would change the head, too."""
    model = wrap_in_lora(load_causal_lm(str(tiny(kind)), dtype=torch.float32), lora(["q_proj", module]))
    with pytest.raises(ValueError, match=r"lora\.target_modules names .*language-model head"):
        Roles(model, device=CPU)


@pytest.mark.parametrize(("with_lora", "kind"), CRITICS, ids=CRITIC_IDS)
@pytest.mark.wide
def test_what_trains_is_float32_on_a_bfloat16_base(tiny: TinyModels, with_lora: bool, kind: CriticKind):
    roles = roles_with_critic(tiny("llama"), with_lora=with_lora, kind=kind, dtype=torch.bfloat16)
    trainable = {n: t for n, t in every_tensor(roles).items() if t.requires_grad}
    expected = {id(p) for parameters in roles.parameters.values() for p in parameters.values()}
    assert {id(p) for p in trainable.values()} == expected
    assert {t.dtype for t in trainable.values()} == {torch.float32}
    frozen = {t.dtype for n, t in every_tensor(roles).items() if n.startswith("base/") and not t.requires_grad}
    assert frozen == ({torch.bfloat16} if with_lora else set())
    changed_by_a_step(roles, "policy")
    changed_by_a_step(roles, "critic")
    assert logprobs(roles, "policy").dtype == values(roles).dtype == torch.float32
    assert values(roles).isfinite().all()


def two_passes(roles: Roles, role: str = "policy") -> tuple[Tensor, Tensor]:
    with roles.acting(role):  # pyright: ignore[reportArgumentType]
        who = "reference" if role == "reference" else "policy"
        first, second = (roles.logprobs(who, a_batch(), temperature=1.0)[0].detach() for _ in range(2))
        return first, second


def test_dropout_is_off_in_every_role(tiny: TinyModels, tmp_path: Path):
    """GPT-2's own 0.1, a fresh LoRA's, a loaded one's, a frozen copy's, a critic's."""
    kind = "gpt2"
    fresh = lora_roles(tiny(kind), dropout=0.5)
    stir(fresh.parameters["policy"])
    assert isinstance(fresh.peft, PeftModel)
    save_adapter(fresh.peft, "default", tmp_path)
    loaded = Roles(load_start_adapter(load_causal_lm(str(tiny(kind)), dtype=torch.float32), str(tmp_path)), device=CPU)
    loaded.freeze_reference_adapter()
    loaded.add_critic("adapter", lora=lora(dropout=0.5))
    stir(loaded.parameters["critic"])
    for roles, role in ((fresh, "policy"), (loaded, "policy"), (loaded, "reference"), (loaded, "critic")):
        first, second = two_passes(roles, role)
        assert torch.equal(first, second), role
    torch.testing.assert_close(two_passes(loaded)[0], two_passes(fresh)[0])


def test_lora_dropout_is_on_in_training_passes_when_asked_for(tiny: TinyModels):
    roles = lora_roles(tiny("gpt2"), dropout=0.5)
    off = logprobs(roles, "policy")
    roles.lora_dropout = True
    first, second = two_passes(roles)
    assert torch.equal(first, off)  # B is zero: no dropout but LoRA's is on
    stir(roles.parameters["policy"])
    first, second = two_passes(roles)
    assert not torch.allclose(first, second)
    assert torch.equal(logprobs(roles, "policy"), logprobs(roles, "policy"))  # evaluation: no gradient, no dropout
    assert not any(m.training for m in roles.causal.modules() if isinstance(m, nn.Dropout))


def test_the_row_of_the_pad_token_learns_as_every_other(tiny: TinyModels, tmp_path: Path):
    """Where pad == eos the library would give the embedding of the end token no gradient. Gemma-4 has one a layer."""
    kind = "gemma4"
    shutil.copytree(tiny(kind, pad_is_eos=True), without := tmp_path / "model")
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
        grads = {n: p.grad for role in roles.parameters.values() for n, p in role.items()}
        return {n: grad for n, grad in grads.items() if grad is not None}

    ours, expected = gradients(tiny(kind, pad_is_eos=True)), gradients(without)
    assert ours.keys() == expected.keys()
    assert [n for n in ours if not torch.equal(ours[n], expected[n])] == []
    embeddings = [n for n in ours if "embed_tokens" in n]
    assert all(ours[n][eos].abs().max() > 1e-4 for n in embeddings), embeddings


def test_a_critic_with_a_smaller_embedding_reads_ids_it_has_no_row_for_as_its_last(tiny: TinyModels, tmp_path: Path):
    """Models of one family have embeddings of several sizes, and a policy samples from the rows that no token has."""
    roles = lora_roles(sharp_model(tmp_path, vocab_size=300))
    roles.add_critic("separate", model=load_causal_lm(str(tiny("llama")), dtype=torch.float32))
    stir(roles.parameters["critic"])
    found, expected = (roles.batch([[2, 3]], [[5, beyond, 6]], last_tokens=True) for beyond in (299, 257))
    with torch.no_grad(), roles.acting("critic"):
        assert torch.equal(roles.values(found), roles.values(expected))
    assert found.input_ids.max() == 299  # the policy reads what it sampled
