"""Sampling engines: equal samples whatever the memory and whichever rows have finished; the choice of an engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from tests.generation.sampling import (
    LIKE_LLAMA,
    assert_same,
    make_engine,
    sample,
    stir,
)
from tests.tiny_models import TinyModels
from tinyrl.generation import engines
from tinyrl.generation.decoder import Decoder, tensors
from tinyrl.generation.engine import SamplingSettings
from tinyrl.generation.engines import FusedEngine, select_engine
from tinyrl.generation.scheduler import Scheduler
from tinyrl.models.batches import backbone_of
from tinyrl.models.checks import supports_fused_layers
from tinyrl.models.layers import reads_like_llama
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import lora_config, wrap_in_lora
from tinyrl.models.roles import Roles

CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "eos_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "lora"),
    [("fused", "qwen3", True), ("fused", "qwen2", False), ("hf-merged", "gpt2", True), ("hf-merged", "gemma2", True)],
)
def test_the_same_seed_gives_the_same_samples_from_every_engine(tiny: TinyModels, name: str, kind: str, lora: bool):
    both = [make_engine(tiny(kind), n, lora=lora, max_new_tokens=24, temperature=0.9) for n in ("hf", name)]
    results = []
    for engine in both:
        engine.eos = set(range(1, 12))
        stir(engine)
        results.append([sample(engine, 4), sample(engine, 2, step=3), sample(engine, 1, greedy=True)])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert_same(ours, theirs)
    assert {c.finish_reason for group in results[0][0] for c in group} == {"eos", "length"}


@pytest.mark.parametrize(("max_rows", "look_every"), [(1, 7), (3, 1), (5, 16), (None, 2)])
def test_samples_do_not_depend_on_the_places_there_are(tiny: TinyModels, max_rows: int | None, look_every: int):
    """Few slots, so that samples wait and enter as others leave; finished rows are looked for seldom, as on a GPU."""
    expected = make_engine(tiny("qwen2"), max_new_tokens=24)
    engine = make_engine(tiny("qwen2"), "fused", max_new_tokens=24)
    engine.max_rows, engine.look_every = max_rows, look_every
    expected.eos = engine.eos = set(range(1, 16))
    assert_same(sample(engine, 4), sample(expected, 4))


@pytest.mark.parametrize("fits", [1, 8])
def test_out_of_memory_halves_the_places_and_gives_the_same_samples(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, fits: int
):
    engine = make_engine(tiny("llama"), "fused")
    expected = sample(engine, 4)
    real = Decoder.new_cache

    def full(self: Decoder, rows: int, width: int):
        if rows > fits:
            raise torch.OutOfMemoryError("full")
        return real(self, rows, width)

    monkeypatch.setattr(Decoder, "new_cache", full)
    assert_same(sample(engine, 4), expected)
    assert engine.max_rows is not None
    assert 2 * fits >= 2 * engine.max_rows > fits  # the first of 16, 8, 4, 2, 1 that fits
    monkeypatch.setattr(Decoder, "new_cache", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        sample(engine, 4)


def test_the_cache_stays_within_its_share_of_memory(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    engine = make_engine(tiny("llama"), "fused")
    expected = sample(engine, 4)
    decoder = next(iter(engine.decoders.values()))
    assert decoder.cache_bytes_per_token == 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, size, bytes
    assert engines.rows_that_fit(decoder, 32, free=10_000_000) == 488  # 0.4 of it, at 32 x 256 bytes
    assert engines.rows_that_fit(decoder, 32, free=0) == 1
    seen: list[int] = []
    init = Scheduler.__init__

    def noted(self: Scheduler, *args: Any, **named: Any):
        seen.append(named["capacity"])
        init(self, *args, **named)

    monkeypatch.setattr(engines, "rows_that_fit", lambda *_, **__: 5)
    monkeypatch.setattr(Scheduler, "__init__", noted)
    assert_same(sample(engine, 4), expected)
    assert seen == [5]


@pytest.mark.parametrize("count", [1, 3])
def test_what_all_prompts_begin_with_is_read_once(count: int, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    """And the samples are those of the library's modules, which read each whole."""
    system = list(range(20, 32))
    prompts = [[*system, *rest] for rest in ([5], [6, 7, 8], [9, 10])]
    expected = sample(make_engine(tiny("llama"), "hf"), count, prompts=prompts)
    engine, read = make_engine(tiny("llama"), "fused"), list[int]()
    for name in ("prefill", "extend"):
        method = getattr(Decoder, name)

        def noted(self: Decoder, ids: Any, lengths: Any, *rest: Any, method: Any = method, **named: Any):
            read.append(int(lengths.sum()))
            return method(self, ids, lengths, *rest, **named)

        monkeypatch.setattr(Decoder, name, noted)
    assert_same(sample(engine, count, prompts=prompts), expected)
    assert read == [len(system), 6]


def choose(engine: Any, wanted: str = "auto", *, dtype: torch.dtype = torch.float32, longest: int = 64, tried: int = 0):
    settings, options = SamplingSettings(temperature=1.0, max_new_tokens=8), {"longest": longest, "tried": tried}
    return select_engine(engine.roles, engine.tokenizer, settings, wanted=wanted, dtype=dtype, **options)  # pyright: ignore


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_the_engine_is_chosen_by_its_numbers(tiny: TinyModels, kind: str):
    made = make_engine(tiny(kind), lora=True)
    stir(made)
    assert choose(made)[0].name == ("fused" if kind in LIKE_LLAMA else "hf-merged")
    assert choose(made, "hf")[0].name == "hf"
    assert choose(made, "hf-merged")[0].name == "hf-merged"
    if kind not in LIKE_LLAMA:
        with pytest.raises(ValueError, match=r"generation\.engine=fused: .*use auto"):
            choose(made, "fused")


def test_a_model_with_the_parts_of_llama_put_together_otherwise_is_found_out(tiny: TinyModels):
    """Granite has every part the decoder knows, and multipliers that it does not."""
    made = make_engine(tiny("granite"))
    assert reads_like_llama(backbone_of(made.roles.causal))
    engine, why = choose(made)
    assert (engine.name, "numbers are not those of Granite" in why) == ("hf-merged", True)


def test_a_window_shorter_than_the_longest_sequence_rules_the_fused_engine_out(tiny: TinyModels):
    shape: dict[str, Any] = {**SHAPE, "sliding_window": 40}
    made = make_engine(tiny("llama"))
    made.roles = Roles(MistralForCausalLM(MistralConfig(**shape)).eval(), device=CPU, reference=False)
    assert choose(made, longest=40)[0].name == "fused"
    engine, why = choose(made, longest=41)
    assert engine.name == "hf-merged"
    assert "does not look at all earlier tokens" in why


def test_numbers_that_go_wrong_late_rule_the_fused_engine_out(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    """Keys that the decoder forgets, further back than a short text goes: 40 tokens."""
    made, step = make_engine(tiny("llama")), Decoder.step

    def forgetful(self: Decoder, token: torch.Tensor, position: torch.Tensor, *, cache: Any, width: int):
        cache.entries[..., : max(0, int(position.max()) - 40), :] = 0.0
        return step(self, token, position, cache=cache, width=width)

    assert choose(made, tried=100)[0].name == "fused"
    monkeypatch.setattr(Decoder, "step", forgetful)
    assert choose(made, tried=30)[0].name == "fused"
    assert choose(made, tried=100)[0].name == "hf-merged"


def test_a_four_bit_base_is_sampled_from_a_dense_copy_or_unpacked_at_every_use(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("bitsandbytes")
    dtype, config = torch.float32, AutoConfig.from_pretrained(tiny("llama"))
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16  # blocks are of 64 weights
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    made = make_engine(tiny("llama"))
    base = load_causal_lm(str(tmp_path), dtype=dtype, quantization="4bit")
    lora = lora_config(r=4, alpha=8, dropout=0.0, target_modules="all-linear")
    made.roles = Roles(wrap_in_lora(base, lora), device=CPU, reference=False)
    stir(made)
    drawn = {}
    for held, free in (("apart", 1 << 40), ("packed", 1000)):
        monkeypatch.setattr(engines, "free_bytes", lambda device, free=free: free)
        engine = choose(made, dtype=dtype)[0]
        assert isinstance(engine, FusedEngine)
        assert engine.held == held
        drawn[held] = sample(engine)
        decoder = engine.decoders[id(made.roles.causal)]
        decoder.sync("default")
        assert isinstance(decoder.layers[1].gate_up.weight, list) == (held == "packed")
    assert_same(drawn["apart"], drawn["packed"])
    assert_same(drawn["apart"], sample(choose(made, "hf", dtype=dtype)[0]))


def addresses(decoder: Decoder) -> list[int]:
    return [tensor.data_ptr() for layer in decoder.layers for tensor in tensors(layer)]


def test_weights_are_taken_over_into_the_same_memory(tiny: TinyModels):
    """A CUDA graph holds addresses. Norms and embeddings are shared with the model; merged matrices are private."""
    engine = make_engine(tiny("qwen3"), lora=True)
    decoder = Decoder(engine.roles.causal, dtype=torch.float32, held="merged")
    decoder.sync("default")
    before = addresses(decoder)
    values = decoder.layers[0].qkv.matrix.clone()
    stir(engine)
    decoder.sync("default")
    assert before == addresses(decoder)
    assert not torch.equal(values, decoder.layers[0].qkv.matrix)
    matrices = [tensor for layer in decoder.layers for tensor in tensors(layer) if tensor.dim() > 1]
    assert decoder.weight_bytes == 4 * sum(tensor.numel() for tensor in matrices)


def on_the_embedding(made: Any) -> None:
    """B is zero when the engine is chosen, so a trial of numbers would not find it forgotten."""
    targets = lora_config(r=4, alpha=8, dropout=0.0, target_modules=["embed_tokens", "q_proj"])
    made.roles = Roles(wrap_in_lora(made.roles.causal, targets), device=CPU, reference=False)


def dynamic_rotation(made: Any) -> None:
    """Positions that depend on what else is in the batch."""
    made.roles.causal.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def scaled_queries(made: Any) -> None:
    """Ministral-3's, from original_max_position_embeddings on, which no trial of a few tokens would show."""
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    shape: dict[str, Any] = {**SHAPE, "head_dim": 8, "rope_parameters": rope}
    made.roles = Roles(Ministral3ForCausalLM(Ministral3Config(**shape)).eval(), device=CPU, reference=False)
    assert not supports_fused_layers(made.roles.backbone("policy"))


@pytest.mark.parametrize("changed", [on_the_embedding, dynamic_rotation, scaled_queries])
def test_what_a_trial_would_not_show_rules_the_fused_engine_out(tiny: TinyModels, changed: Any):
    made = make_engine(tiny("llama"))
    changed(made)
    assert choose(made)[0].name == "hf-merged"
