"""Loading of models and tokenizers, and what is refused, with which message."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tests.models.building import lora, lora_roles, stir
from tests.tiny_models import TinyModels
from tinyrl.models import loading
from tinyrl.models.loading import (
    check_ids,
    check_vocabulary,
    load_causal_lm,
    load_model_config,
    load_tokenizer,
    resolve_model_path,
    save_tokenizer,
    saveable_generation,
)
from tinyrl.models.lora import load_start_adapter, save_adapter, wrap_in_lora

IDS = torch.arange(20, 50).unsqueeze(0)


def copied(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "model"))


def test_pickled_weights_are_refused(tiny: TinyModels, tmp_path: Path):
    folder = copied(tiny("llama"), tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert load_causal_lm(str(folder), dtype=torch.float32)
    (folder / "model.safetensors").rename(folder / "value_head.safetensors")
    with pytest.raises(ValueError, match="cannot load a causal language model"):  # beside other safetensors
        load_causal_lm(str(folder), dtype=torch.float32)
    (folder / "value_head.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is pickled"):
        load_causal_lm(str(folder), dtype=torch.float32)


def test_an_adapter_is_no_model_and_needs_its_base_and_safetensors(tiny: TinyModels, tmp_path: Path):
    """The library would load its base and put the adapter on it, so that the reference was adapted, too."""
    roles = lora_roles(tiny("llama"))
    assert roles.adapters.peft is not None
    save_adapter(roles.adapters.peft, "default", tmp_path)
    with pytest.raises(ValueError, match=r"is an adapter: name it as model\.adapter"):
        load_causal_lm(str(tmp_path), dtype=torch.float32)
    with pytest.raises(ValueError, match="Target modules"):
        load_start_adapter(load_causal_lm(str(tiny("gpt2")), dtype=torch.float32), str(tmp_path))
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model.safetensors is missing"):
        load_start_adapter(load_causal_lm(str(tiny("llama")), dtype=torch.float32), str(tmp_path))


def test_a_model_is_an_embedded_name_a_folder_or_a_hub_name(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tiny("llama")
    assert resolve_model_path(str(folder)) == str(folder)
    assert resolve_model_path("owner/name") == "owner/name"
    assert resolve_model_path("starter").endswith("model")
    (tmp_path / "my-model").mkdir()
    (tmp_path / "runs" / "grpo-sort-1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path, named in (
        (tmp_path / "my-modle", "no such folder.*my-model"),
        ("startr", "no such folder.*starter"),
        ("runs/grpo-sort-2", "no such folder.*grpo-sort-1"),
        (folder / "config.json", "is a file; name the folder"),
        (tmp_path / "my-model", r"no config.json \(it has: nothing\)"),
    ):
        with pytest.raises(ValueError, match=named):
            resolve_model_path(str(path))


def test_tokenizers_without_pad_or_eos(tiny: TinyModels, tmp_path: Path):
    folder = copied(tiny("llama"), tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no EOS token"):
        load_tokenizer(str(folder))
    assert load_tokenizer(str(folder), needs_eos=False).eos_token_id is None


def test_a_tokenizer_is_written_as_it_came(tiny: TinyModels, tmp_path: Path):
    """In the library's own words of today, which older versions of it do not know (TokenizersBackend), it is not."""
    folder = copied(tiny("llama"), tmp_path)
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (written := tmp_path / "written").mkdir()
    save_tokenizer(load_tokenizer(str(folder)), written)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (written / name).read_bytes() == (folder / name).read_bytes()


def test_lora_targets_match_something_and_leave_the_head_alone(tiny: TinyModels):
    model = load_causal_lm(str(tiny("gpt2")), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"(?s)lora\.target_modules=\['nope'\].*c_attn, c_fc, c_proj"):
        wrap_in_lora(model, lora(["nope"]))
    wrapped = wrap_in_lora(load_causal_lm(str(tiny("llama")), dtype=torch.float32), lora())
    adapted = {n.split(".lora_")[0].rsplit(".", 1)[-1] for n, _ in wrapped.named_parameters() if ".lora_" in n}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_weights_of_a_tied_model(tiny: TinyModels, tmp_path: Path):
    """Qwen-2's head is its embedding: the file has one of them. Other heads and layers may be left over."""
    folder = copied(tiny("qwen2"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    heads = {"v_head.summary.weight": torch.ones(1, 32), "mtp.fc.weight": torch.ones(2, 2)}
    save_file(tensors | heads, folder / "model.safetensors", {"format": "pt"})
    assert load_causal_lm(str(folder), dtype=torch.float32)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks .*(embed_tokens|lm_head)\.weight"):
        load_causal_lm(str(folder), dtype=torch.float32)
    with pytest.raises(ValueError, match="ForSequenceClassification"):  # nothing of the language model is missing
        load_causal_lm(str(tiny.reward("qwen2")), dtype=torch.float32)


def test_a_revision_reaches_every_reader(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    asked: list[str | None] = []

    def recorded(reader: object, name: str) -> None:
        real = getattr(reader, name)

        def read(path: str, *arguments: object, revision: str | None, **options: object) -> object:
            if path == "owner/name":  # a reader may call another one
                asked.append(revision)
            return real(str(tiny("llama")), *arguments, **options)

        monkeypatch.setattr(reader, name, read)

    for reader in (loading.AutoConfig, loading.AutoModelForCausalLM, loading.PreTrainedTokenizerFast):
        recorded(reader, "from_pretrained")
    recorded(loading, "get_tokenizer_config")
    recorded(loading, "written_config")
    recorded(loading, "tokenizer_folder")
    recorded(loading, "weight_files")
    load_tokenizer("owner/name", revision="1f0c")
    load_causal_lm("owner/name", dtype=torch.float32, revision="1f0c")
    load_model_config("owner/name", revision="1f0c")
    load_model_config("owner/name")
    assert asked == [*["1f0c"] * 9, *["main"] * 2]


def test_the_gradient_through_a_four_bit_base_is_that_of_its_dense_weights(tiny: TinyModels, tmp_path: Path):
    """Also after it has sampled: bitsandbytes may then keep its weights in another order."""
    functional = pytest.importorskip("bitsandbytes").functional
    config = AutoConfig.from_pretrained(tiny("llama"))
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16  # blocks are of 64 weights
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    quantised, plain = (load_causal_lm(str(tmp_path), dtype=torch.float32, quantization=q) for q in ("4bit", None))
    for name, weight in quantised.named_parameters():
        if (state := getattr(weight, "quant_state", None)) is not None:
            plain.get_parameter(name).data = functional.dequantize_4bit(weight.data, state)
    gradients = []
    for model in (quantised, plain):
        torch.manual_seed(0)  # LoRA's A
        wrapped = wrap_in_lora(model, lora())
        trained = {n: p for n, p in wrapped.named_parameters() if p.requires_grad}
        stir(trained)
        with torch.no_grad():
            wrapped(input_ids=IDS)
        wrapped(input_ids=IDS).logits.square().mean().backward()
        gradients.append({n: p.grad for n, p in trained.items()})
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


def test_a_special_token_without_a_row_is_refused_where_a_row_holds_it(tiny: TinyModels):
    """Gemma-3 1B has such a token, for images; a text model's rows do not hold it."""
    model = load_causal_lm(str(tiny("llama")), dtype=torch.float32)
    tokenizer = load_tokenizer(str(tiny("llama")))
    assert len(tokenizer) == 258
    check_ids([[0, 257], []], tokenizer, model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    check_vocabulary(tokenizer, model, path="a")
    with pytest.raises(ValueError, match=r"row 2 holds '<image>' \(token 258\)"):
        check_ids([[0, 257], [5, 258]], tokenizer, model)
    check_vocabulary(tokenizer, model, path="critic", sampled=258)
    with pytest.raises(ValueError, match=r"258 rows.*'<image>' \(token 258\)"):
        check_vocabulary(tokenizer, model, path="critic", sampled=300)  # a policy with that many rows can sample it


@pytest.mark.parametrize(
    ("published", "kept", "left_out"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}, []),
        ({"do_sample": False, "temperature": 0.6, "top_k": 7}, {"do_sample": False}, ["temperature", "top_k"]),
        ({"typical_p": 0.9}, {"do_sample": True, "typical_p": 0.9}, []),
        ({"early_stopping": True, "min_p": 0.1}, {"do_sample": True, "min_p": 0.1}, ["early_stopping"]),
        ({"length_penalty": 2.0}, {}, ["length_penalty"]),
        ({"output_scores": True}, {}, ["output_scores"]),
        ({"use_cache": False, "cache_implementation": "static"}, {"use_cache": False}, ["cache_implementation"]),
        ({"pad_token_id": -1}, {}, ["pad_token_id"]),
        ({"num_beams": 4, "early_stopping": True}, {"num_beams": 4, "early_stopping": True}, []),
        ({"do_sample": True, "top_p": 0.9}, {"do_sample": True, "top_p": 0.9}, []),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}, []),
    ],
)
def test_what_contradicts_in_a_generation_configuration_is_left_out(
    published: dict[str, object], kept: dict[str, object], left_out: list[str], tmp_path: Path
):
    """As the library itself saves it, after a change, and reads it again."""
    given = GenerationConfig(**published)
    given.eos_token_id = 7
    with contextlib.suppress(ValueError):
        given.save_pretrained(tmp_path / "as-it-was")
    saved_as_it_was = (tmp_path / "as-it-was" / "generation_config.json").is_file()
    assert saved_as_it_was == (published == kept)
    found, names = saveable_generation(given)
    assert sorted(names) == left_out
    found.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    del written["transformers_version"]
    assert written == {**kept, "eos_token_id": 7}


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_position_embeddings", value) for value in (0, -5)] + [("dtype", name) for name in ("int8", "bool", 5)],
)
def test_a_config_with_impossible_positions_or_dtype_is_refused(
    name: str, value: object, tiny: TinyModels, tmp_path: Path
):
    folder = copied(tiny("llama"), tmp_path)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**facts, name: value}))
    with pytest.raises(ValueError, match=name):
        load_model_config(str(folder))
    (folder / "config.json").write_text(json.dumps({**facts, "dtype": "float64"}))  # read in the run's own dtype
    assert load_model_config(str(folder)).max_position_embeddings == 512
