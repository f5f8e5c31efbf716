"""Sampling engines: equal samples from all of them, whatever the memory and the batch; the choice of an engine."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from tests.generation.sampling import (
    PROMPTS,
    assert_same,
    in_lora,
    make_engine,
    requests,
    sample,
    scored,
    stir,
    tokens_of,
    without_cache,
)
from tests.policies import policy_of
from tests.tiny_models import POSITIONS, TinyModels
from tinyrl.config.sections import GenerationConfig
from tinyrl.generation import cached_engine, engines
from tinyrl.generation.cached_engine import CachedEngine
from tinyrl.generation.decoder import Decoder
from tinyrl.generation.engines import select_engine
from tinyrl.generation.library_decoder import LibraryDecoder, SampledLinear
from tinyrl.generation.request import Request
from tinyrl.models.batch import examples
from tinyrl.models.checks import supports_fused_layers
from tinyrl.models.layers import reads_like_llama
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.states import backbone_of

SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "eos_token_id": 1,
}  # fmt: skip


# ---- samples ----


@pytest.mark.wide
def test_recorded_log_probabilities_are_those_of_a_training_pass(tiny: TinyModels):
    """Of a model with recurrent states; rows of different lengths, some of which end early."""
    engine = make_engine(tiny("qwen3.5"), "hf", lora=True, temperature=0.9)
    stir(engine)
    engine.eos = set(range(1, 12))
    completions = [c for group in sample(engine, 4) for c in group]
    assert len({len(c.response) for c in completions}) > 2
    trained = scored(engine, [prompt for prompt in PROMPTS for _ in range(4)], [c.response for c in completions])
    for completion, row in zip(completions, trained, strict=True):
        assert completion.logprobs == pytest.approx(row, abs=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "kind"), [("fused", "qwen3"), ("hf", "gemma2"), ("plain", "gemma2")])
def test_greedy_is_what_the_library_generates(tiny: TinyModels, name: str, kind: str):
    """Against `generate` on each prompt by itself, so left padding and Gemma-2's window of 8 are tested too."""
    engine = make_engine(tiny(kind), name, max_new_tokens=24)
    options = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    for prompt, (completion,) in zip(PROMPTS, sample(engine, 1, greedy=True), strict=True):
        ids = torch.tensor([prompt])
        out = engine.policy.causal.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        assert completion.response == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("look_every", [1, 16])
def test_no_row_is_decoded_beyond_learned_positions(tiny: TinyModels, look_every: int):
    """Prompts that fill all positions but a few, one of which ends ten tokens before the others; the samples are those
    of each alone, token by token.
    """
    engine = make_engine(tiny("gpt2"), "hf")
    engine.eos = set()
    prompts = [[(7 * i) % 250 + 2 for i in range(length)] for length in (POSITIONS - 2, *[POSITIONS - 12] * 9)]
    limits = [POSITIONS - len(prompt) for prompt in prompts]
    asked = list[Request]()
    for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        asked += engine.requests_for(prompt, 1, row=row, seed=0, step=0, limit=limit)
    alone = [engine.sample([one])[0] for one in asked]
    engine.look_every = look_every
    together = engine.sample(asked)
    assert [len(one.response) for one in together] == limits
    assert [one.response for one in together] == [one.response for one in alone]


@pytest.mark.parametrize("name", ["hf", "fused", "plain"])
@pytest.mark.wide
def test_each_role_samples_from_its_current_weights(tiny: TinyModels, name: str):
    """And leaves nothing that training stumbles over: gradients flow, and the base has the same bits."""
    engine = make_engine(tiny("llama"), name, lora=True)
    before = {n: t.clone() for n, t in engine.policy.causal.state_dict().items() if "lora" not in n}
    base = tokens_of(sample(make_engine(tiny("llama"))))
    assert tokens_of(sample(engine)) == base  # a fresh adapter changes nothing
    stir(engine)
    engine.policy.has_reference = True
    assert tokens_of(sample(engine)) != base
    assert tokens_of(sample(engine, role="base")) == tokens_of(sample(engine, role="reference")) == base
    after = engine.policy.causal.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)
    with engine.policy.acting("policy"):
        batch = engine.policy.batch_of(examples(PROMPTS, [[3], [4], [5], [6]]))
        engine.policy.logprobs("policy", batch, temperature=1.0)[0].sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in engine.policy.parameters["policy"].values())


# ---- half precision ----


@pytest.mark.parametrize("name", ["hf", "plain"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.wide
def test_the_library_samples_in_the_dtype_of_training(tiny: TinyModels, lora: bool, name: str):
    """Where every weight is trained these are in float32; with LoRA its matrices are."""
    engine = make_engine(tiny("qwen3"), name, lora=lora, dtype=torch.bfloat16, max_new_tokens=3)
    seen = set[torch.dtype]()

    def note(module: Any, given: Any, out: torch.Tensor) -> None:
        if type(module) is torch.nn.Linear or type(module) is SampledLinear:
            seen.add(out.dtype)

    with register_module_forward_hook(note):
        sample(engine, 1)
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize(("free", "casts_of_each"), [(1 << 40, 1), (0, 20)])
def test_trained_weights_are_cast_once_per_call_where_memory_allows(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, free: int, casts_of_each: int
):
    """Every product's, for 20 tokens, and the head's; the next call casts them as they then are."""
    monkeypatch.setattr(engines, "free_bytes", lambda device: free)
    made = make_engine(tiny("qwen3"), dtype=torch.bfloat16)
    layout = engines.library_layout(made.policy)
    monkeypatch.setattr(engines, "free_bytes", lambda device: 1 << 40)
    engine = CachedEngine(made.policy, made.tokenizer, made.settings, name="hf", layout=layout)
    engine.eos = set()
    linear = [module for module in engine.policy.backbone("policy").modules() if type(module) is torch.nn.Linear]
    weights = {module.weight.data_ptr() for module in linear}
    casts = Counter[int]()

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            cast = func.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy) and out.dtype == torch.bfloat16
            if cast and args[0].data_ptr() in weights:
                casts[args[0].data_ptr()] += 1
            return out

    sample(engine, 1, prompts=PROMPTS[:1])
    for _ in range(2):
        casts.clear()
        with Casts():
            sample(engine, 1, prompts=PROMPTS[:1])
        assert casts == dict.fromkeys(weights, casts_of_each)


# ---- batches and memory ----


@pytest.mark.parametrize(("name", "kind"), [("hf", "qwen3.5"), pytest.param("plain", "gemma2", marks=pytest.mark.wide)])
def test_a_sample_does_not_depend_on_its_batch(tiny: TinyModels, name: str, kind: str):
    """Alone, backwards, a few rows at a time, and split groups; rows end early and run past their ends."""
    engine = make_engine(tiny(kind), name, max_new_tokens=16)
    engine.eos = set(range(1, 16))
    together = sample(engine, 4)
    asked = requests(engine, 4)
    assert_same([engine.sample(asked[i : i + 4]) for i in range(0, len(asked), 4)], together)
    assert_same([engine.sample(asked[::-1])[::-1]], [[one for group in together for one in group]])
    engine.max_rows, engine.look_every = 3, 4
    assert_same(sample(engine, 4), together)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "kind"), [("plain", "qwen3.5"), ("hf", "qwen3.5"), ("hf", "gpt-oss")])
def test_samples_are_those_of_a_loop_without_a_cache(tiny: TinyModels, name: str, kind: str):
    engine = make_engine(tiny(kind), name, lora=True, max_new_tokens=8, temperature=0.8)
    stir(engine)
    engine.eos = set(range(1, 12))
    assert_same(sample(engine, 1), without_cache(engine, 1), tolerance=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "kind", "decoder"), [("fused", "llama", Decoder), ("hf", "qwen3.5", LibraryDecoder)])
def test_few_rows_and_little_memory_give_the_same_samples(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, decoder: Any
):
    """Rows of the cache are halved when memory runs out, and stay within their share of it from the start. Qwen3.5's
    states are added up by chunks, in another order behind other padding.
    """
    tolerance = 1e-4 if kind == "qwen3.5" else 1e-5
    engine, new_cache, made, fits = make_engine(tiny(kind), name), decoder.new_cache, list[int](), 3
    expected = sample(engine, 4)

    def full(self: Any, rows: int, width: int):
        if rows > fits:
            raise torch.OutOfMemoryError("full")
        made.append(rows)
        return new_cache(self, rows, width)

    monkeypatch.setattr(decoder, "new_cache", full)
    assert_same(sample(engine, 4), expected, tolerance=tolerance)
    assert engine.max_rows == 2
    fits = 0
    with pytest.raises(torch.OutOfMemoryError):
        sample(engine, 4)
    row = 32 * 2 * 2 * 2 * 8 * 4  # in bytes: tokens, keys and values, layers, heads, size, 4
    if kind == "qwen3.5":
        row += 2 * 2 * 2 * 8 * 4 + 2 * (4 * 8 * 8 + 64 * 4) * 4  # a column for padding, states of the two other layers
    engine.max_rows, fits = None, 9
    for free in (0, 5.5 * row / cached_engine.CACHE_SHARE):
        monkeypatch.setattr(cached_engine, "free_bytes", lambda device, free=free: free)
        assert_same(sample(engine, 4), expected, tolerance=tolerance)
    assert made == [2, 1, 5]


def test_a_start_common_to_all_prompts_is_prefilled_once(tiny: TinyModels, prefills: list[tuple[str, list[int]]]):
    """And the samples are those of the library's modules, which prefill each whole."""
    system = list(range(20, 32))
    prompts = [[*system, *rest] for rest in ([5], [6, 7, 8], [9, 10])]
    engine = make_engine(tiny("llama"), "fused")
    assert_same(sample(engine, 3, prompts=prompts), sample(make_engine(tiny("llama")), 3, prompts=prompts))
    assert prefills == [("prefill", [len(system)]), ("extend", [1, 3, 2])]


# ---- the choice ----


def choose(made: Any, wanted: Any = "auto", *, longest: int = 64, tried: int = 0, **own: Any):
    config = GenerationConfig.model_validate({"engine": wanted, "max_new_tokens": 8} | own)
    return select_engine(config, made.policy, made.tokenizer, longest=longest, tried=tried)


@pytest.mark.parametrize(("kind", "auto"), [("qwen3", "fused"), ("granite", "hf"), ("gemma3-wide", "hf")])
def test_the_engine_is_chosen_by_its_numbers(tiny: TinyModels, kind: str, auto: str):
    """All have every part of Llama. Granite has multipliers besides; Gemma-3 raises in the trial, as its
    rotary positions want to know the kind of layer.
    """
    made = make_engine(tiny(kind), lora=True)
    stir(made)
    assert reads_like_llama(backbone_of(made.policy.causal))
    assert [choose(made, name)[0].name for name in ("auto", "hf")] == [auto, "hf"]
    if auto != "fused":
        with pytest.raises(ValueError, match=r"generation\.engine=fused"):
            choose(made, "fused")


def test_numbers_that_go_wrong_late_rule_the_fused_engine_out(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    """Keys that the decoder forgets, further back than a short text goes: 40 tokens."""
    made, step = make_engine(tiny("llama")), Decoder.step

    def forgetful(self: Decoder, token: torch.Tensor, position: torch.Tensor, *, cache: Any, width: int):
        cache.entries[..., : max(0, int(position.max()) - 40), :] = 0.0
        return step(self, token, position, cache=cache, width=width)

    assert choose(made, tried=100)[0].name == "fused"
    monkeypatch.setattr(Decoder, "step", forgetful)
    assert choose(made, tried=30)[0].name == "fused"
    assert choose(made, tried=100)[0].name == "hf"
    monkeypatch.setattr(Decoder, "step", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):  # which is no reason for another engine
        choose(made)


def test_a_window_shorter_than_the_longest_sequence_rules_the_fused_engine_out(tiny: TinyModels):
    made, config = make_engine(tiny("llama")), MistralConfig(**{**SHAPE, "sliding_window": 40})  # pyright: ignore
    made.policy = policy_of(MistralForCausalLM(config).eval())
    assert choose(made, longest=40)[0].name == "fused"
    assert choose(made, longest=41)[0].name == "hf"


def dynamic_rotation(made: Any) -> None:
    """Positions that depend on what else is in the batch."""
    made.policy.causal.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def scaled_queries(made: Any) -> None:
    """Ministral-3's, from original_max_position_embeddings on, which no trial of a few tokens would show."""
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    shape: dict[str, Any] = {**SHAPE, "head_dim": 8, "rope_parameters": rope}
    made.policy = policy_of(Ministral3ForCausalLM(Ministral3Config(**shape)).eval())
    assert not supports_fused_layers(made.policy.backbone("policy"))


@pytest.mark.parametrize("changed", [dynamic_rotation, scaled_queries])
def test_what_a_trial_would_not_show_rules_the_fused_engine_out(tiny: TinyModels, changed: Any):
    made = make_engine(tiny("llama"))
    changed(made)
    assert choose(made)[0].name == "hf"


@pytest.mark.parametrize("changes", [{"target_modules": ["embed_tokens", "q_proj"]}, {"use_dora": True}])
def test_other_adapters_rule_the_fused_engine_out(tiny: TinyModels, changes: dict[str, Any]):
    """B is zero when the engine is chosen, so a trial of numbers would not find it forgotten."""
    made = make_engine(tiny("llama"))
    made.policy = in_lora(made.policy.causal, **changes)
    assert choose(made)[0].name == "hf"


def test_a_four_bit_base_is_sampled_from_a_dense_copy_or_unpacked_at_every_use(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("bitsandbytes")
    config = AutoConfig.from_pretrained(tiny("llama"))
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16  # blocks are of 64 weights
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    made, drawn = make_engine(tiny("llama")), []
    made.policy = in_lora(load_causal_lm(str(tmp_path), dtype=torch.float32, quantization="4bit"))
    stir(made)
    for layout, free in (("separate_lora", 1 << 40), ("quantized", 1000)):
        monkeypatch.setattr(engines, "free_bytes", lambda device, free=free: free)
        engine = choose(made)[0]
        assert isinstance(engine, CachedEngine)
        assert engine.layout == layout
        drawn.append(sample(engine))
        with engine.synced("policy") as decoder:
            assert isinstance(decoder, Decoder)
            assert isinstance(decoder.layers[1].gate_up.weight, list) == (layout == "quantized")
    assert_same(drawn[0], drawn[1])
    assert_same(drawn[0], sample(choose(made, "hf")[0]))


@pytest.mark.parametrize(("deterministic", "rows"), [(True, 220), (False, 40)])
def test_a_deterministic_run_on_a_gpu_decodes_as_many_rows_whatever_memory_is_free(
    rows: int, monkeypatch: pytest.MonkeyPatch, *, deterministic: bool
):
    """2^25 logits of 151,936; else 0.4 of the free bytes, at 10 a token in rows of 100."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setattr(cached_engine, "free_bytes", lambda device: 100_000)
    engine: Any = SimpleNamespace(policy=SimpleNamespace(device=torch.device("cuda")))
    decoder: Any = SimpleNamespace(embedding=torch.empty(151_936, 1), row_bytes=lambda width: 10 * width)
    assert CachedEngine._most_rows(engine, decoder, 100) == rows
