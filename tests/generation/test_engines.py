"""Sampling engines: equal samples whatever the memory and whichever rows have finished; the choice of an engine."""

from dataclasses import replace
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
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.generation.sampling import (
    ENGINES,
    LIKE_LLAMA,
    PROMPTS,
    assert_same,
    make_engine,
    requests,
    sample,
    stir,
    tokens_of,
)
from tests.running import LookedAt
from tests.tiny_models import KINDS, TinyModels
from tinyrl.generation import fused, select
from tinyrl.generation.decoder import Decoder, Packed, tensors
from tinyrl.generation.engine import Request, SamplingSettings
from tinyrl.generation.fused import FusedEngine
from tinyrl.generation.select import select_engine
from tinyrl.generation.slots import Slots
from tinyrl.models.batches import backbone_of, fuses
from tinyrl.models.fused_backbone import reads_like_llama
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import lora_config, wrap_in_lora
from tinyrl.models.roles import Roles

CPU = torch.device("cpu")


def eos(engine: Any, below: int) -> Any:
    """Many tokens that end a completion, in the form the engine keeps them, so that some rows end early."""
    return set(range(1, below)) if engine.name == "fused" else torch.arange(1, below)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize(("name", "kind"), [("hf-merged", k) for k in KINDS] + [("fused", k) for k in LIKE_LLAMA])
@pytest.mark.wide
def test_the_same_seed_gives_the_same_samples_from_every_engine(tiny: TinyModels, name: str, kind: str, lora: bool):
    engines = [make_engine(tiny(kind), n, lora=lora, max_new_tokens=24, temperature=0.9) for n in ("hf", name)]
    results = []
    for engine in engines:
        engine.eos = eos(engine, 12)
        stir(engine)
        results.append([sample(engine, 4), sample(engine, 2, step=3), sample(engine, 1, greedy=True)])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert_same(ours, theirs)
    assert {c.finish_reason for group in results[0][0] for c in group} == {"eos", "length"}


@pytest.mark.parametrize("look_every", [1, 2, 7, 16])
@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 8, 16, None])
@pytest.mark.wide
def test_samples_do_not_depend_on_the_places_there_are(tiny: TinyModels, max_rows: int | None, look_every: int):
    """Few slots, so that samples wait and enter as others leave; finished rows are looked for seldom, as on a GPU."""
    expected = make_engine(tiny("qwen2"), max_new_tokens=24)
    engine = make_engine(tiny("qwen2"), "fused", max_new_tokens=24)
    engine.max_rows, engine.look_every = max_rows, look_every
    expected.eos, engine.eos = eos(expected, 16), eos(engine, 16)
    assert_same(sample(engine, 4), sample(expected, 4))


def test_a_sample_does_not_depend_on_its_batch(tiny: TinyModels):
    engine = make_engine(tiny("qwen3"), "fused", max_new_tokens=24)
    engine.eos = eos(engine, 12)
    together = sample(engine, 4)
    assert_same([engine.sample([r], 4, seed=0, step=0)[0] for r in requests()], together)
    assert_same(engine.sample(requests()[::-1], 4, seed=0, step=0)[::-1], together)
    later = engine.sample([Request(PROMPTS[2], prompt_row=2, first_sample=2)], 2, seed=0, step=0)[0]
    assert tokens_of([later]) == tokens_of([together[2][2:]])
    assert engine.sample([], 4, seed=0, step=0) == []


@pytest.mark.parametrize("name", ENGINES)
def test_a_completion_can_be_taken_up_where_it_stopped(tiny: TinyModels, name: str):
    """Five tokens, and the rest as a request of its own: the same random numbers at the same places."""
    engine = make_engine(tiny("llama"), name, max_new_tokens=24)
    engine.eos = eos(engine, 1)
    whole = sample(engine, 1)
    first = engine.sample([replace(r, max_new_tokens=5 + i) for i, r in enumerate(requests())], 1, seed=0, step=0)
    assert [group[0].tokens for group in first] == [group[0].tokens[: 5 + i] for i, group in enumerate(whole)]
    assert {group[0].finish_reason for group in first} == {"length"}
    later = [
        Request(r.prompt_tokens + group[0].tokens, r.prompt_row, first_token=5 + i, max_new_tokens=19 - i)
        for i, (r, group) in enumerate(zip(requests(), first, strict=True))
    ]
    rest = engine.sample(later, 1, seed=0, step=0)
    assert [a[0].tokens + b[0].tokens for a, b in zip(first, rest, strict=True)] == [g[0].tokens for g in whole]
    again = engine.sample([replace(r, first_token=0) for r in later], 1, seed=0, step=0)
    assert [g[0].tokens for g in again] != [g[0].tokens for g in rest]  # else a later turn reuses the first's numbers


def test_finished_rows_are_not_computed_and_a_prompt_is_read_once(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    engine = make_engine(tiny("llama"), "fused", max_new_tokens=24)
    engine.eos = eos(engine, 12)
    steps: list[int] = []
    prompts: list[int] = []
    step, prefill = Decoder.step, Decoder.prefill

    def counted(self: Decoder, token: torch.Tensor, *rest: Any, **named: Any):
        steps.append(len(token))
        return step(self, token, *rest, **named)

    def read(self: Decoder, ids: torch.Tensor, *rest: Any, **named: Any):
        prompts.append(len(ids))
        return prefill(self, ids, *rest, **named)

    monkeypatch.setattr(Decoder, "step", counted)
    monkeypatch.setattr(Decoder, "prefill", read)
    completions = [c for group in sample(engine, 4) for c in group]
    lengths = [len(c.tokens) for c in completions]
    assert prompts == [len(PROMPTS)]
    assert steps == [sum(n > t for n in lengths) for t in range(1, max(lengths))]
    assert sum(steps) == sum(lengths) - len(lengths)  # the first token of each comes from reading its prompt


@pytest.mark.parametrize("fits", [1, 3, 8])
@pytest.mark.wide
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


def test_fewer_places_than_were_wanted_are_halved_from_there(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    """Not sixteen, eight and four rows in turn where there was room for three all along."""
    engine, tries = make_engine(tiny("llama"), "fused"), []

    def full(self: Decoder, rows: int, width: int) -> Any:
        tries.append(rows)
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(fused, "rows_that_fit", lambda *_, **__: 3)
    monkeypatch.setattr(Decoder, "new_cache", full)
    with pytest.raises(torch.OutOfMemoryError):
        sample(engine, 4)
    assert tries == [3, 1]


def test_the_cache_stays_within_its_share_of_memory(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    engine = make_engine(tiny("llama"), "fused")
    expected = sample(engine, 4)
    decoder = next(iter(engine.decoders.values()))
    assert decoder.cache_bytes_per_token == 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, size, bytes
    assert fused.rows_that_fit(decoder, 32, free=10_000_000) == 488  # 0.4 of it, at 32 x 256 bytes
    assert fused.rows_that_fit(decoder, 32, free=0) == 1
    seen: list[int] = []
    init = Slots.__init__

    def noted(self: Slots, *args: Any, **named: Any):
        seen.append(named["capacity"])
        init(self, *args, **named)

    monkeypatch.setattr(fused, "rows_that_fit", lambda *_, **__: 5)
    monkeypatch.setattr(Slots, "__init__", noted)
    assert_same(sample(engine, 4), expected)
    assert seen == [5]


def test_prompts_are_read_within_a_token_budget(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    engine = make_engine(tiny("llama"), "fused")
    expected = sample(engine, 4)
    shapes: list[tuple[int, ...]] = []
    prefill = Decoder.prefill

    def read(self: Decoder, ids: torch.Tensor, *rest: Any, **named: Any):
        shapes.append(tuple(ids.shape))
        return prefill(self, ids, *rest, **named)

    monkeypatch.setattr(Decoder, "prefill", read)
    monkeypatch.setattr(fused, "PREFILL_TOKENS", {"cpu": 12})
    assert_same(sample(engine, 4), expected)
    assert shapes == [(2, 3), (1, 12), (1, 5)]


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


def test_a_stop_is_looked_for_between_tokens(tiny: TinyModels):
    class Stopped(Exception):
        pass

    calls = [0]

    def stop_later() -> None:
        calls[0] += 1
        if calls[0] == 6:
            raise Stopped

    engine = make_engine(tiny("llama"), "fused")
    with LookedAt(stop_later), pytest.raises(Stopped):
        sample(engine)


def test_bfloat16_sampling_says_that_it_is_not_exact(tiny: TinyModels):
    exact, rounded = (make_engine(tiny("llama"), "fused", dtype=d) for d in (torch.float32, torch.bfloat16))
    assert exact.exact
    assert not rounded.exact
    ours, theirs = (sample(e, 8, prompts=[[20, 21]]) for e in (exact, rounded))
    first = [
        (a.logprobs[0], b.logprobs[0]) for a, b in zip(ours[0], theirs[0], strict=True) if a.tokens[0] == b.tokens[0]
    ]
    assert len(first) > 4
    assert all(a == pytest.approx(b, abs=0.1) for a, b in first)
    assert any(a != b for a, b in first)


def choose(engine: Any, wanted: str = "auto", *, dtype: torch.dtype = torch.float32, longest: int = 64, tried: int = 0):
    settings, options = SamplingSettings(temperature=1.0, max_new_tokens=8), {"longest": longest, "tried": tried}
    return select_engine(engine.roles, engine.tokenizer, settings, wanted=wanted, dtype=dtype, **options)  # pyright: ignore


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.wide
def test_the_engine_is_chosen_by_its_numbers(tiny: TinyModels, kind: str):
    made = make_engine(tiny(kind), lora=True)
    stir(made)
    engine, why = choose(made)
    assert engine.name == ("fused" if kind in LIKE_LLAMA else "hf-merged")
    assert ("own forward pass by at most" in why) == (kind in LIKE_LLAMA)
    assert choose(made, "hf")[0].name == "hf"
    assert choose(made, "hf-merged")[0].name == "hf-merged"
    if kind not in LIKE_LLAMA:
        with pytest.raises(ValueError, match=r"generation\.engine=fused: .*use auto"):
            choose(made, "fused")
        with pytest.raises(ValueError, match=r"generation\.dtype=bfloat16 needs the fused engine"):
            choose(made, dtype=torch.bfloat16)


def test_a_model_with_the_parts_of_llama_put_together_otherwise_is_found_out(tiny: TinyModels):
    """Granite has every part the decoder knows, and multipliers that it does not."""
    made = make_engine(tiny("granite"))
    assert reads_like_llama(backbone_of(made.roles.causal))
    engine, why = choose(made)
    assert (engine.name, "numbers are not those of Granite" in why) == ("hf-merged", True)


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_a_window_shorter_than_the_longest_sequence_rules_the_fused_engine_out(tiny: TinyModels, kind: str):
    shape: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64, "sliding_window": 40, "eos_token_id": 1,
    }  # fmt: skip
    qwen2 = Qwen2Config(use_sliding_window=True, max_window_layers=0, **shape)
    model = Qwen2ForCausalLM(qwen2) if kind == "qwen2" else MistralForCausalLM(MistralConfig(**shape))
    made = make_engine(tiny("llama"))
    made.roles = Roles(model.eval(), device=CPU, reference=False)
    assert choose(made, longest=40)[0].name == "fused"
    engine, why = choose(made, longest=41)
    assert engine.name == "hf-merged"
    assert "does not look at all earlier tokens" in why


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_go_wrong_late_rule_the_fused_engine_out(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
):
    """Keys that the decoder forgets, further back than a short text goes: 40 tokens."""
    made, step = make_engine(tiny("llama")), Decoder.step

    def forgetful(self: Decoder, token: torch.Tensor, position: torch.Tensor, *, cache: Any, width: int):
        cache.entries[..., : max(0, int(position.max()) - 40), :] = 0.0
        return step(self, token, position, cache=cache, width=width)

    assert choose(made, dtype=dtype, tried=100)[0].name == "fused"
    monkeypatch.setattr(Decoder, "step", forgetful)
    assert choose(made, dtype=dtype, tried=30)[0].name == "fused"
    if dtype == torch.float32:
        assert choose(made, dtype=dtype, tried=100)[0].name == "hf-merged"
    else:  # no other engine samples in another dtype
        with pytest.raises(ValueError, match="numbers are not those of"):
            choose(made, dtype=dtype, tried=100)


def test_rotary_positions_that_depend_on_the_batch_rule_the_fused_engine_out(tiny: TinyModels):
    made = make_engine(tiny("llama"))
    made.roles.causal.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    engine, why = choose(made)
    assert (engine.name, "depend on what else is in the batch" in why) == ("hf-merged", True)


def test_queries_scaled_by_their_position_rule_the_fused_engine_out(tiny: TinyModels):
    """Ministral-3's, from original_max_position_embeddings on, which no trial of a few tokens would show."""
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    shape: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "vocab_size": 64, "eos_token_id": 1, "rope_parameters": rope,
    }  # fmt: skip
    made = make_engine(tiny("llama"))
    made.roles = Roles(Ministral3ForCausalLM(Ministral3Config(**shape)).eval(), device=CPU, reference=False)
    engine, why = choose(made)
    assert (engine.name, "not built like Llama" in why) == ("hf-merged", True)
    assert not fuses(made.roles.backbone("policy"))


def test_an_adapter_on_the_embedding_is_sampled_with(tiny: TinyModels):
    """B is zero when the engine is chosen, so a trial of numbers would not find it forgotten."""
    made = make_engine(tiny("llama"))
    targets = lora_config(r=4, alpha=8, dropout=0.0, target_modules=["embed_tokens", "q_proj"])
    model = wrap_in_lora(made.roles.causal, targets)
    made.roles = Roles(model, device=CPU, reference=False)
    engine, why = choose(made)
    assert engine.name == "hf-merged"
    assert "the adapter is on the embedding" in why
    stir(made)
    drawn = [c for group in sample(engine) for c in group]
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    with torch.no_grad(), made.roles.acting("policy"):
        batch = made.roles.batch(prompts, [c.tokens for c in drawn])
        trained = made.roles.logprobs("policy", batch, temperature=1.0)[0]
    for completion, row in zip(drawn, trained, strict=True):
        assert completion.logprobs == pytest.approx(row[: len(completion.tokens)].tolist(), abs=1e-4)


def test_without_room_for_a_copy_the_base_is_sampled_from_as_it_stands(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
):
    made = make_engine(tiny("qwen3"), lora=True)
    stir(made)
    merged = choose(made)[0]
    monkeypatch.setattr(select, "free_bytes", lambda device: 1000)
    engine = choose(made)[0]
    assert (engine.name, merged.name) == ("fused", "fused")
    assert isinstance(engine, FusedEngine)
    assert engine.held == "apart"
    weight = made.roles.causal.model.layers[0].self_attn.k_proj.base_layer.weight  # pyright: ignore
    was = weight.clone()
    assert_same(sample(engine), sample(merged))
    decoder = engine.decoder(made.roles.causal)
    decoder.sync("default")
    assert decoder.layers[0].qkv.weight.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()  # pyright: ignore
    assert torch.equal(weight, was)
    with pytest.raises(ValueError, match=r"generation\.engine=hf-merged"):
        choose(made, "hf-merged")
    with pytest.raises(ValueError, match="would take most of the free memory"):
        choose(made, "fused", dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_four_bit_base_is_sampled_from_a_dense_copy_or_unpacked_at_every_use(
    dtype: torch.dtype, tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("bitsandbytes")
    config = AutoConfig.from_pretrained(tiny("llama"))
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16  # blocks are of 64 weights
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    made = make_engine(tiny("llama"))
    base = load_causal_lm(str(tmp_path), dtype=dtype, quantization="4bit")
    lora = lora_config(r=4, alpha=8, dropout=0.0, target_modules="all-linear")
    made.roles = Roles(wrap_in_lora(base, lora), device=CPU, reference=False)
    stir(made)
    drawn = {}
    for held, free in (("apart", 1 << 40), ("packed", 1000)):
        monkeypatch.setattr(select, "free_bytes", lambda device, free=free: free)
        engine = choose(made, dtype=dtype)[0]
        assert isinstance(engine, FusedEngine)
        assert engine.held == held
        drawn[held] = sample(engine)
        decoder = engine.decoders[id(made.roles.causal)]
        decoder.sync("default")
        assert isinstance(decoder.layers[1].gate_up.weight, Packed) == (held == "packed")
    assert_same(drawn["apart"], drawn["packed"])
    if dtype == torch.float32:
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


def test_the_update_gets_the_memory_of_the_copy_and_of_the_cache(tiny: TinyModels):
    engine = make_engine(tiny("qwen3"), "fused", lora=True)
    sample(engine)
    (decoder,) = engine.decoders.values()
    assert engine.copy_bytes > 0
    assert decoder.layers == []
    assert decoder.weight_bytes == 0
    assert engine._kept is None
