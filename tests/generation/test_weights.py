"""The sampler's copy of bfloat16 weights: early LoRA updates reach it, in every engine that `auto` chooses."""

from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from tests.generation.sampling import CPU, make_engine
from tests.tiny_models import TinyModels
from tinyrl.generation.decoder import Decoder, attended, joined, tensors
from tinyrl.generation.engine import SamplingSettings
from tinyrl.generation.engines import select_engine
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import lora_config, wrap_in_lora
from tinyrl.models.roles import Roles

RATE = 5e-5


def in_lora(model: Any, *, rank: int = 16) -> Roles:
    torch.manual_seed(0)
    config = lora_config(r=rank, alpha=2 * rank, dropout=0.0, target_modules="all-linear")
    return Roles(wrap_in_lora(model, config), device=CPU, reference=False)


def logits(decoder: Decoder, ids: Tensor, adapter: str | None = "default") -> Tensor:
    """Of the last token and of the one before, of each row: one is read with its prompt, the other decoded."""
    with torch.inference_mode():
        decoder.sync(adapter)
        rows, length = ids.shape
        cache = decoder.new_cache(rows, length)
        lengths = torch.full((rows,), length - 1)
        states = [decoder.prefill(ids[:, :-1], lengths, cache=cache, rows=[range(i, i + 1) for i in range(rows)])]
        states.append(decoder.step(ids[:, -1], lengths, cache=cache, width=length))
        return torch.stack([decoder.head.logits(s) for s in states], 1)


def adam_step(parameters: dict[str, nn.Parameter], *, seed: int) -> None:
    """The first: every entry of B moves by the learning rate, up or down; B was 0, so A hardly matters."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATE, weight_decay=0.0)
    for name, parameter in parameters.items():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * ("lora_B" in name)
    optimizer.step()


def test_a_branch_keeps_what_merging_into_bfloat16_rounds_away() -> None:
    """1536 x 1536, the first Adam step: the sampled update is off by 0.3 %, a merged one by more than 90 %."""
    torch.manual_seed(0)
    host = nn.Module()
    host.add_module("down", nn.Linear(1536, 1536, bias=False, dtype=torch.bfloat16))
    nn.init.normal_(host.down.weight, std=0.02)  # pyright: ignore
    inject_adapter_in_model(LoraConfig(r=16, lora_alpha=32, target_modules=["down"]), host)
    host.float()
    layer: Any = host.down
    layer.base_layer.to(torch.bfloat16)
    adam_step({n: p for n, p in host.named_parameters() if "lora_" in n}, seed=2)
    update = 2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    base = layer.base_layer.weight.float()

    def error(weight: Tensor) -> float:
        return float(((weight.float() - base - update).norm() / update.norm()).detach())

    ours = joined([layer], "default", dtype=torch.bfloat16)
    assert ours.lora_a is not None
    assert ours.lora_b is not None
    assert error(ours.matrix.float() + ours.lora_b.float() @ ours.lora_a.float()) < 0.005
    assert error((base + update).bfloat16()) > 0.9
    h, x = torch.randn(4, 1536).bfloat16(), torch.randn(4, 1536).bfloat16()
    expected = h.float() @ (base + update).t()
    torch.testing.assert_close(ours(h).float(), expected, rtol=2**-7, atol=1e-3)
    # rounded twice: the product, and its sum with x
    torch.testing.assert_close(ours.added(x, h).float(), x.float() + expected, rtol=2**-7, atol=2**-7)


def test_joined_branches_are_those_of_each_projection(tiny: TinyModels) -> None:
    """Against the library's modules with PEFT's branches, both in bfloat16; ranks are padded to a multiple of 8."""
    roles = in_lora(load_causal_lm(str(tiny("qwen3")), dtype=torch.bfloat16), rank=3)
    with torch.no_grad():
        for parameter in roles.parameters["policy"].values():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    decoder = Decoder(roles.causal, dtype=torch.bfloat16, held="apart")
    ids = torch.randint(2, 250, (16, 6), generator=torch.Generator().manual_seed(0))
    for adapter in ("default", None):
        with torch.no_grad(), roles.acting("base" if adapter is None else "policy") as model:
            own = model(input_ids=ids).logits[:, -2:].float()
        gap = (logits(decoder, ids, adapter).log_softmax(-1) - own.log_softmax(-1)).abs()
        assert float(gap.mean()) < 0.05
    assert float((own.log_softmax(-1) - logits(decoder, ids).log_softmax(-1)).abs().mean()) > 0.5
    assert {layer.down.lora_a.shape for layer in decoder.layers if layer.down.lora_a is not None} == {(8, 64)}
    assert {layer.qkv.lora_a.shape for layer in decoder.layers if layer.qkv.lora_a is not None} == {(16, 32)}


def test_a_branch_stays_in_its_place_whoever_is_sampled(tiny: TinyModels) -> None:
    """A CUDA graph is recorded once for policy and base: the base has the same matrices, with zeros for B."""
    roles = in_lora(load_causal_lm(str(tiny("qwen3")), dtype=torch.bfloat16))
    decoder = Decoder(roles.causal, dtype=torch.bfloat16, held="apart")
    seen = []
    for adapter in (None, "default", None):
        adam_step(roles.parameters["policy"], seed=3)
        decoder.sync(adapter)
        found = [tensor for layer in decoder.layers for tensor in tensors(layer)]
        lora_b = decoder.layers[0].qkv.lora_b
        assert lora_b is not None
        seen.append(([t.data_ptr() for t in found], [t.shape for t in found], bool(lora_b.any())))
    assert seen[0][:2] == seen[1][:2] == seen[2][:2]
    assert [branch for _, _, branch in seen] == [False, True, False]


def test_bfloat16_modules_of_the_library_are_not_merged(tiny: TinyModels) -> None:
    made = make_engine(tiny("gemma2"))
    settings = SamplingSettings(temperature=1.0, max_new_tokens=8)

    def choose(roles: Roles, wanted: Literal["auto", "hf-merged"]) -> tuple[str, str]:
        dtype = torch.bfloat16
        engine, why = select_engine(roles, made.tokenizer, settings, wanted=wanted, dtype=dtype, longest=64)
        return engine.name, why

    roles = in_lora(load_causal_lm(str(tiny("gemma2")), dtype=torch.bfloat16))
    name, why = choose(roles, "auto")
    assert name == "hf"
    assert "Gemma2ForCausalLM" in why
    assert "first updates of LoRA would be rounded away" in why
    with pytest.raises(ValueError, match=r"generation\.engine=hf-merged: merged into bfloat16"):
        choose(roles, "hf-merged")


@pytest.mark.parametrize("offset", [0.0, 120.0])
def test_scores_of_attention_are_not_rounded_to_bfloat16(offset: float, tiny: TinyModels) -> None:
    """A key's bias may add the same large number to all scores (Qwen2 has such biases), which softmax takes away."""
    decoder = Decoder(load_causal_lm(str(tiny("llama")), dtype=torch.bfloat16), dtype=torch.bfloat16, held="apart")
    torch.manual_seed(0)
    q, keys, values = torch.randn(6, 2, 8), torch.randn(6, 40, 8), torch.randn(6, 40, 8)
    q[..., -1], keys[..., -1] = 1.0, offset / decoder.scaling
    q, keys, values = (x.bfloat16() for x in (q, keys, values))
    mask = torch.zeros(6, 1, 40, dtype=torch.bfloat16)
    mask[:, :, 33:] = -torch.inf
    scores = decoder.scaling * q.double() @ keys.double().mT + mask.double()
    wanted = scores.softmax(-1) @ values.double()
    ours = attended(q, keys, values, mask=mask, scaling=decoder.scaling).double().view_as(wanted)
    assert float((ours - wanted).norm() / wanted.norm()) < 0.01
