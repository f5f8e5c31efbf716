"""The decoder's passes over a ragged cache against the library; its copy of the weights, whose memory never moves."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from tests.generation.sampling import CPU
from tests.tiny_models import TinyModels
from tinyrl.generation.decoder import Decoder, attended, joined, tensors
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import lora_config, wrap_in_lora
from tinyrl.models.policy import Policy

RATE = 5e-5


def in_lora(model: Any, *, rank: int = 16) -> Policy:
    torch.manual_seed(0)
    config = lora_config(r=rank, alpha=2 * rank, dropout=0.0, target_modules="all-linear")
    return Policy(wrap_in_lora(model, config), device=CPU, reference=False)


def logits(decoder: Decoder, ids: Tensor, adapter: str | None = "default") -> Tensor:
    """Of the last token and of the one before, of each row: one is read with its prompt, the other decoded."""
    with torch.inference_mode():
        decoder.sync(adapter)
        rows, length = ids.shape
        cache, lengths = decoder.new_cache(rows, length), torch.full((rows,), length - 1)
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


def padded(sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(s) for s in sequences], batch_first=True, padding_value=3)
    return ids, torch.tensor([len(s) for s in sequences])


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_rows_that_are_continued_equal_a_full_forward_pass(tiny: TinyModels, kind: str):
    """Five rows hold prompts, three of them get two further ragged pieces; two query heads share each key. Behind the
    tokens of each is junk, as rows that ran past their end leave it.
    """
    model = load_causal_lm(str(tiny(kind)), dtype=torch.float32)
    decoder = Decoder(model, dtype=torch.float32, layout="merged")
    decoder.sync(None)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(9, 200, (n,), generator=generator).tolist() for n in (3, 11, 1, 6, 8)]
    cache = decoder.new_cache(5, 40)
    decoder.prefill(*padded(texts), cache=cache, rows=[range(i, i + 1) for i in range(5)])
    for row, text in enumerate(texts):
        cache.entries[:, row, ..., len(text) :, :].normal_(std=30.0)

    def assert_last(states: Tensor, texts: list[list[int]]) -> None:
        for state, text in zip(states, texts, strict=True):
            expected = model(input_ids=torch.tensor([text])).logits[0, -1].log_softmax(-1)
            assert (decoder.head.logits(state.unsqueeze(0))[0].log_softmax(-1) - expected).abs().max() < 1e-5

    for pieces in ([[50], [60, 61, 62, 63, 64, 65], [70, 71]], [[80, 81, 82, 83], [90], [100, 101, 102]]):
        before, start = cache.entries.clone(), [len(t) for t in texts]
        ids, counts = padded(pieces)
        texts[1:4] = [text + piece for text, piece in zip(texts[1:4], pieces, strict=True)]
        width = max(map(len, texts[1:4]))
        states = decoder.extend(ids, counts, torch.tensor(start[1:4]), cache=cache, rows=range(1, 4), width=width)
        assert_last(states, texts[1:4])
        for row, text in enumerate(texts):  # nothing else was written
            now, was = cache.entries[:, row], before[:, row]
            assert torch.equal(now[..., : start[row], :], was[..., : start[row], :])
            assert torch.equal(now[..., len(text) :, :], was[..., len(text) :, :])
    position = torch.tensor([len(t) for t in texts])
    assert_last(decoder.step(torch.full((5,), 77), position, cache=cache, width=40), [[*t, 77] for t in texts])


@pytest.mark.parametrize("layout", ["merged", "separate_lora"])
def test_weights_are_copied_into_the_same_memory(tiny: TinyModels, layout: Any):
    """A CUDA graph holds addresses, also of the base, which has the same branches, with zeros for B. Norms and
    embeddings are shared with the model.
    """
    dtype = torch.float32 if layout == "merged" else torch.bfloat16
    roles, addresses, values = in_lora(load_causal_lm(str(tiny("qwen3")), dtype=dtype)), [], list[Tensor]()
    decoder = Decoder(roles.causal, dtype=dtype, layout=layout)
    for adapter in (None, "default", None):
        adam_step(roles.parameters["policy"], seed=3)
        decoder.sync(adapter)
        found, qkv = [tensor for layer in decoder.layers for tensor in tensors(layer)], decoder.layers[0].qkv
        addresses.append([(t.data_ptr(), t.shape) for t in found])
        values.append((qkv.matrix if qkv.lora_b is None else qkv.lora_b).clone())
        assert layout != "merged" or decoder.weight_bytes == sum(t.nbytes for t in found if t.dim() > 1)
    assert addresses[0] == addresses[1] == addresses[2]
    assert torch.equal(values[0], values[2])
    assert not torch.equal(values[0], values[1])


def test_a_branch_keeps_what_merging_into_bfloat16_rounds_away():
    """1536 x 1536, the first Adam step: the sampled update is off by 0.3 %, a merged one by more than 90 %."""
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

    ours: Any = joined([layer], "default", dtype=torch.bfloat16)
    assert error(ours.matrix.float() + ours.lora_b.float() @ ours.lora_a.float()) < 0.005
    assert error((base + update).bfloat16()) > 0.9
    h, x = torch.randn(4, 1536).bfloat16(), torch.randn(4, 1536).bfloat16()
    expected = h.float() @ (base + update).t()
    torch.testing.assert_close(ours(h).float(), expected, rtol=2**-7, atol=1e-3)
    # rounded twice: the product, and its sum with x
    torch.testing.assert_close(ours(h, x).float(), x.float() + expected, rtol=2**-7, atol=2**-7)


def test_joined_branches_are_those_of_each_projection(tiny: TinyModels):
    """Against the library's modules with PEFT's branches, both in bfloat16; ranks are padded to a multiple of 8."""
    roles = in_lora(load_causal_lm(str(tiny("qwen3")), dtype=torch.bfloat16), rank=3)
    with torch.no_grad():
        for parameter in roles.parameters["policy"].values():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    decoder = Decoder(roles.causal, dtype=torch.bfloat16, layout="separate_lora")
    ids, own = torch.randint(2, 250, (16, 6), generator=torch.Generator().manual_seed(0)), torch.empty(0)
    for adapter in ("default", None):
        with torch.no_grad(), roles.acting("base" if adapter is None else "policy") as model:
            own = model(input_ids=ids).logits[:, -2:].float()
        assert float((logits(decoder, ids, adapter).log_softmax(-1) - own.log_softmax(-1)).abs().mean()) < 0.05
    assert float((own.log_softmax(-1) - logits(decoder, ids).log_softmax(-1)).abs().mean()) > 0.5
    shapes = [{tuple(t.shape) for t in (w.down.lora_a, w.qkv.lora_a) if t is not None} for w in decoder.layers]
    assert shapes == [{(8, 64), (16, 32)}] * 2


def test_scores_of_attention_are_not_rounded_to_bfloat16():
    """A key's bias may add the same large number to all scores (Qwen2 has such biases), which softmax takes away."""
    scaling = 8**-0.5
    q, keys, values = torch.randn(6, 2, 8), torch.randn(6, 40, 8), torch.randn(6, 40, 8)
    q[..., -1], keys[..., -1] = 1.0, 120.0 / scaling
    q, keys, values = (x.bfloat16() for x in (q, keys, values))
    mask = torch.zeros(6, 1, 40, dtype=torch.bfloat16)
    mask[:, :, 33:] = -torch.inf
    scores = scaling * q.double() @ keys.double().mT + mask.double()
    wanted = scores.softmax(-1) @ values.double()
    ours = attended(q, keys, values, mask=mask, scaling=scaling).double().view_as(wanted)
    assert float((ours - wanted).norm() / wanted.norm()) < 0.01
