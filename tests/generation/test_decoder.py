"""The decoder's copy of the weights, whose memory never moves; branches and attention in bfloat16."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from tests.policies import policy_of
from tests.tiny_models import TinyModels
from tinyrl.generation import decoder as decoder_file
from tinyrl.generation.decoder import Decoder, attended, join_linear, tensors
from tinyrl.generation.scheduler import Scheduler
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import lora_config, wrap_in_lora
from tinyrl.models.policy import Policy

RATE = 5e-5


def in_lora(model: Any) -> Policy:
    config = lora_config(r=16, alpha=32, dropout=0.0, target_modules="all-linear")
    return policy_of(wrap_in_lora(model, config))


def adam_step(parameters: dict[str, nn.Parameter], *, seed: int) -> None:
    """The first: every entry of B moves by the learning rate, up or down; B was 0, so A hardly matters."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATE, weight_decay=0.0)
    for name, parameter in parameters.items():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * ("lora_B" in name)
    optimizer.step()


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

    ours: Any = join_linear([layer], "default", dtype=torch.bfloat16)
    assert error(ours.matrix.float() + ours.lora_b.float() @ ours.lora_a.float()) < 0.005
    assert error((base + update).bfloat16()) > 0.9
    h, x = torch.randn(4, 1536).bfloat16(), torch.randn(4, 1536).bfloat16()
    expected = h.float() @ (base + update).t()
    torch.testing.assert_close(ours(h).float(), expected, rtol=2**-7, atol=1e-3)
    # rounded twice: the product, and its sum with x
    torch.testing.assert_close(ours(h, x).float(), x.float() + expected, rtol=2**-7, atol=2**-7)


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


# ---- prompts behind a start that all have in common ----

START = [5 + i % 90 for i in range(20)]
PROMPTS = [[*START, *(30 + (7 * p + i) % 60 for i in range(200 - 9 * p))] for p in range(4)]


def prefilled(tiny: TinyModels, *, knows_causal: bool) -> tuple[Tensor, Tensor]:
    """Prefill PROMPTS; return their last states, and all of the cache."""
    policy = in_lora(load_causal_lm(str(tiny("llama")), dtype=torch.float32))
    decoder = Decoder(policy.causal, dtype=torch.float32, layout="separate_lora")
    decoder.sync("default")
    decoder.knows_causal = knows_causal  # True: as on a GPU
    scheduler = Scheduler(decoder, policy.tokenizer, set(), capacity=4, width=256)
    with torch.inference_mode():
        states = scheduler._prefill(PROMPTS, [range(p, p + 1) for p in range(4)])
    cache: Any = scheduler.cache
    return states, cache.entries


@pytest.mark.parametrize(("knows_causal", "masks"), [(True, 0), (False, 1)])
def test_prompts_behind_a_common_start_get_no_mask_for_each_of_them(
    tiny: TinyModels, knows_causal: bool, masks: int, monkeypatch: pytest.MonkeyPatch
):
    """On a CPU they share one, of a number for each query of a key head, token and key; a GPU's kernel needs none."""
    own = decoder_file.scaled_dot_product_attention
    sizes = list[int]()

    def attend(*args: Any, **options: Any) -> Tensor:
        mask = options.get("attn_mask")
        if type(mask) is Tensor:
            sizes.append(mask.untyped_storage().nbytes() // mask.itemsize)
        return own(*args, **options)

    monkeypatch.setattr(decoder_file, "scaled_dot_product_attention", attend)
    prefilled(tiny, knows_causal=knows_causal)
    config = load_causal_lm(str(tiny("llama")), dtype=torch.float32).config
    queries = config.num_attention_heads // config.num_key_value_heads
    assert sizes == [queries * 200 * 220] * (masks * config.num_hidden_layers)


def test_a_causal_kernel_behind_a_common_start_gives_the_states_of_the_mask(tiny: TinyModels):
    by_kernel, kernels_cache = prefilled(tiny, knows_causal=True)
    by_mask, masks_cache = prefilled(tiny, knows_causal=False)
    torch.testing.assert_close(by_kernel, by_mask, rtol=0, atol=1e-5)
    torch.testing.assert_close(kernels_cache, masks_cache, rtol=0, atol=1e-5)
