"""Damages to model, tokenizer, template and adapter folders: each changes a sound folder in place."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Damage = Callable[[Path], None]
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"


def in_json(name: str, **changes: Any) -> Damage:
    """Fields of a JSON file set to other values; `...` takes one away."""

    def damage(folder: Path) -> None:
        values = {**json.loads((folder / name).read_text()), **changes}
        (folder / name).write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))

    return damage


def written(name: str, content: str | bytes) -> Damage:
    """A file replaced by some bytes."""
    return lambda folder: void((folder / name).write_bytes(content.encode() if isinstance(content, str) else content))


def cut(name: str, share: float) -> Damage:
    """A file of which only the first part was written."""
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def removed(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def a_folder(name: str) -> Damage:
    """A folder where a file should be."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def tensors(name: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Damage:
    """Weights changed as a whole: {name: tensor} -> {name: tensor}."""

    def damage(folder: Path) -> None:
        changed = change(load_file(folder / name))
        save_file({key: tensor.contiguous() for key, tensor in changed.items()}, folder / name, {"format": "pt"})

    return damage


def without(pattern: str, name: str = WEIGHTS) -> Damage:
    """Weights whose names match are missing."""
    return tensors(name, lambda all: {key: tensor for key, tensor in all.items() if not re.search(pattern, key)})


def renamed(pattern: str, to: str, name: str = WEIGHTS) -> Damage:
    return tensors(name, lambda all: {re.sub(pattern, to, key): tensor for key, tensor in all.items()})


def each(pattern: str, change: Callable[[Tensor], Tensor], name: str = WEIGHTS) -> Damage:
    """Weights whose names match, changed."""
    return tensors(name, lambda all: {k: change(t) if re.search(pattern, k) else t for k, t in all.items()})


def together(*damages: Damage) -> Damage:
    return lambda folder: void([damage(folder) for damage in damages])


def void(_: object) -> None:
    """Nothing, from what a lambda did."""


def config(**changes: Any) -> Damage:
    return in_json("config.json", **changes)


def tokenizer_config(**changes: Any) -> Damage:
    return in_json("tokenizer_config.json", **changes)


def adapter_config(**changes: Any) -> Damage:
    return in_json("adapter_config.json", **changes)


def one_more_word(folder: Path) -> None:
    """An ordinary token more than the embedding has rows."""
    values = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["zzzz"] = max(vocabulary.values()) + 1
    (folder / "tokenizer.json").write_text(json.dumps(values))


def one_more_added(folder: Path) -> None:
    """A special token more than the embedding has rows; no text holds it unless somebody writes it."""
    values = json.loads((folder / "tokenizer.json").read_text())
    number = max(values["model"]["vocab"].values()) + 1
    values["added_tokens"].append(
        {"id": number, "content": "<image>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
    )  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(values))


def template(text: str) -> Damage:
    """A chat template."""
    return written("chat_template.jinja", text)


FILES: dict[str, Damage] = {
    "config empty": written("config.json", ""),
    "config null": written("config.json", "null"),
    "config a list": written("config.json", "[]"),
    "config a text": written("config.json", '"llama"'),
    "config cut": cut("config.json", 0.5),
    "config not UTF-8": written("config.json", b'{"model_type": "\xff\xfe"}'),
    "config nested deep": written("config.json", '{"a":' * 20_000 + "1" + "}" * 20_000),
    "config without type": written("config.json", "{}"),
    "config of unknown type": config(model_type="no-such-type"),
    "config of a type that is no text": config(model_type=5),
    "config of an encoder": config(model_type="bert"),
    "config a folder": a_folder("config.json"),
    "weights empty": written(WEIGHTS, b""),
    "weights cut in the header": cut(WEIGHTS, 0.01),
    "weights cut in half": cut(WEIGHTS, 0.5),
    "weights cut at the end": cut(WEIGHTS, 0.999),
    "weights of no tensors": tensors(WEIGHTS, lambda all: {}),
    "weights of zeros": written(WEIGHTS, b"\0" * 4096),
    "weights of text": written(WEIGHTS, "<html>404 Not Found</html>" * 20),
    "weights of git-lfs": written(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    "weights with a header of no JSON": written(WEIGHTS, (20).to_bytes(8, "little") + b"{" * 20),
    "weights with a huge header": written(WEIGHTS, (1 << 60).to_bytes(8, "little") + b"{}"),
    "weights a folder": a_folder(WEIGHTS),
    "weights absent": removed(WEIGHTS),
    "index of shards that are not there": together(
        removed(WEIGHTS),
        written("other.safetensors", b""),
        written("model.safetensors.index.json", '{"metadata": {}, "weight_map": {"a": "model-00001.safetensors"}}'),
    ),
    "index that is no JSON": together(removed(WEIGHTS), written("model.safetensors.index.json", "{")),
    "index null": together(removed(WEIGHTS), written("model.safetensors.index.json", "null")),
    "index without a map": together(removed(WEIGHTS), written("model.safetensors.index.json", "{}")),
    "generation config null": written("generation_config.json", "null"),
    "generation config cut": written("generation_config.json", '{"eos_token_id": '),
}

KEYS: dict[str, Damage] = {
    "one layer missing": without(r"layers\.1\."),
    "one weight missing": without(r"layers\.0\.mlp\.down_proj"),
    "no final norm": without(r"model\.norm\."),
    "no embedding": without("embed_tokens"),
    "keys renamed": renamed("^model", "network"),
    "keys wrapped": renamed("^", "module."),
    "keys of another architecture": renamed(r"self_attn\.", "attention."),
    "more layers in config than in file": config(num_hidden_layers=4),
    "fewer layers in config than in file": config(num_hidden_layers=1),
    "a billion layers": config(num_hidden_layers=10**9),
    "wider in config": config(hidden_size=64),
    "a billion wide": config(hidden_size=10**9),
    "a larger feed-forward layer in config": config(intermediate_size=96),
    "a billion wide feed-forward layer": config(intermediate_size=10**9),
    "more heads in config": config(num_attention_heads=8, head_dim=8),
    "more key heads in config": config(num_key_value_heads=4),
    "a larger vocabulary in config": config(vocab_size=300),
    "a vocabulary of a billion": config(vocab_size=10**9),
    "biases in config": config(attention_bias=True),
    "an embedding one row short": each("embed_tokens", lambda t: t[:-1]),
    "transposed weights": each("up_proj", lambda t: t.T),
    "a weight of one dimension": each("up_proj", lambda t: t.flatten()),
    "weights that are not finite": each("down_proj", lambda t: t * torch.nan),
    "an infinite embedding": each("embed_tokens", lambda t: t * torch.inf),
}

VALUES: dict[str, Damage] = {
    "hidden_size a text": config(hidden_size="abc"),
    "hidden_size null": config(hidden_size=None),
    "hidden_size 0": config(hidden_size=0),
    "hidden_size -1": config(hidden_size=-1),
    "hidden_size a fraction": config(hidden_size=32.5),
    "hidden_size a list": config(hidden_size=[32]),
    "num_hidden_layers a text": config(num_hidden_layers="two"),
    "num_hidden_layers 0": config(num_hidden_layers=0),
    "num_hidden_layers -1": config(num_hidden_layers=-1),
    "num_attention_heads 0": config(num_attention_heads=0),
    "num_attention_heads 3": config(num_attention_heads=3),
    "num_attention_heads null": config(num_attention_heads=None),
    "num_key_value_heads 3": config(num_key_value_heads=3),
    "num_key_value_heads 0": config(num_key_value_heads=0),
    "vocab_size null": config(vocab_size=None),
    "vocab_size 0": config(vocab_size=0),
    "hidden_act unknown": config(hidden_act="no-such-function"),
    "hidden_act a number": config(hidden_act=5),
    "rms_norm_eps a text": config(rms_norm_eps="tiny"),
    "rms_norm_eps null": config(rms_norm_eps=None),
    "rope_parameters a text": config(rope_parameters="fast"),
    "rope_parameters of unknown kind": config(rope_parameters={"rope_type": "no-such-kind", "rope_theta": 1e4}),
    "rope_theta a text": config(rope_parameters={"rope_type": "default", "rope_theta": "big"}),
    "rope_theta 0": config(rope_parameters={"rope_type": "default", "rope_theta": 0}),
    "max_position_embeddings a text": config(max_position_embeddings="many"),
    "max_position_embeddings 4": config(max_position_embeddings=4),
    "tie_word_embeddings a text": config(tie_word_embeddings="no"),
    "dtype unknown": config(dtype="float99"),
    "architectures a number": config(architectures=5),
    "eos_token_id a text": config(eos_token_id="end"),
    "pad_token_id beyond the vocabulary": config(pad_token_id=258),
    "pad_token_id a list": config(pad_token_id=[0]),
    "quantization_config unknown": config(quantization_config={"quant_method": "no-such-method"}),
    "quantization_config null fields": config(quantization_config={}),
    "head_dim 0": config(head_dim=0),
    "layer_types wrong": config(layer_types=["sideways", "sideways"]),
    "auto_map to code": config(auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}),
}

TOKENIZERS: dict[str, Damage] = {
    "tokenizer absent": removed("tokenizer.json"),
    "tokenizer empty": written("tokenizer.json", ""),
    "tokenizer null": written("tokenizer.json", "null"),
    "tokenizer a list": written("tokenizer.json", "[]"),
    "tokenizer cut": cut("tokenizer.json", 0.5),
    "tokenizer of an unknown model": written("tokenizer.json", '{"version": "1.0", "model": {"type": "Nope"}}'),
    "tokenizer of no tokens": in_json("tokenizer.json", model={"type": "BPE", "vocab": {}, "merges": []}),
    "tokenizer with a bad pattern": in_json(
        "tokenizer.json",
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    ),
    "tokenizer without a decoder": in_json("tokenizer.json", decoder=None),
    "tokenizer one word more": one_more_word,
    "tokenizer one added token more": one_more_added,
    "tokenizer a folder": a_folder("tokenizer.json"),
    "tokenizer config empty": written("tokenizer_config.json", ""),
    "tokenizer config null": written("tokenizer_config.json", "null"),
    "tokenizer config a list": written("tokenizer_config.json", "[]"),
    "tokenizer config cut": cut("tokenizer_config.json", 0.5),
    "tokenizer of unknown class": tokenizer_config(tokenizer_class="NoSuchTokenizer"),
    "tokenizer class a number": tokenizer_config(tokenizer_class=5),
    "eos a number": tokenizer_config(eos_token=5),
    "eos a list": tokenizer_config(eos_token=["<eos>"]),
    "eos an object": tokenizer_config(eos_token={"a": 1}),
    "eos absent": tokenizer_config(eos_token=None),
    "eos empty": tokenizer_config(eos_token=""),
    "eos beyond the embedding": tokenizer_config(eos_token="<never seen>"),
    "pad a number": tokenizer_config(pad_token=7),
    "pad a list": tokenizer_config(pad_token=[]),
    "pad beyond the embedding": tokenizer_config(pad_token="<never seen>"),
    "bos an object": tokenizer_config(bos_token={"content": 3}),
    "extra special tokens a number": tokenizer_config(extra_special_tokens=3),
    "extra special tokens of numbers": tokenizer_config(extra_special_tokens=[1, 2]),
    "added tokens a list": tokenizer_config(added_tokens_decoder=[1]),
    "added tokens without content": tokenizer_config(added_tokens_decoder={"300": {"special": True}}),
    "added tokens far away": tokenizer_config(added_tokens_decoder={"9999999": {"content": "<far>", "special": True}}),
    "model_max_length a text": tokenizer_config(model_max_length="long"),
    "model_max_length null": tokenizer_config(model_max_length=None),
    "model_max_length -5": tokenizer_config(model_max_length=-5),
    "model_max_length 0": tokenizer_config(model_max_length=0),
    "padding side unknown": tokenizer_config(padding_side="middle"),
    "special tokens map null": written("special_tokens_map.json", "null"),
    "special tokens map of numbers": written("special_tokens_map.json", '{"eos_token": 5}'),
    "added tokens file a list": written("added_tokens.json", "[]"),
}

DEEP = "(" * 5_000 + "1" + ")" * 5_000
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES: dict[str, Damage] = {
    "template that raises": template("{{ raise_exception('no thanks') }}"),
    "template with a syntax error": template("{% if %}"),
    "template that does not end": template("{% for m in messages %}"),
    "template of nothing": template("{# nothing #}"),
    "template of an unknown filter": template("{{ messages | no_such_filter }}"),
    "template of an unknown name": template("{{ nobody.home.at_all }}"),
    "template of an unknown call": template("{{ nobody() }}"),
    "template of text plus number": template("{{ messages[0].content + 1 }}"),
    "template that divides by zero": template("{{ 1 / 0 }}"),
    "template with an index too far": template("{{ messages[7].content }}"),
    "template that recurses": template("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"),
    "template nested deep": template("{{ " + DEEP + " }}"),
    "template that loops": template(LOOP),
    "template that loops in a macro": template("{% macro m() %}" + LOOP + "{% endmacro %}{{ m() }}"),
    "template of a long range": template("{% for a in range(10**9) %}{% endfor %}"),
    "template of endless text": template("{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}"),
    "template of one huge text": template("{{ 'x' * 10**15 }}"),
    "template of a huge number": template("{{ 9 ** (9 ** 9) }}"),
    "template that reaches out": template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "template that includes a file": template("{% include '/etc/passwd' %}"),
    "template of ten megabytes": template("{# " + "x" * 10_000_000 + " #}"),
    "template not UTF-8": written("chat_template.jinja", b"{{ '\xff' }}"),
    "template a folder": together(template(""), a_folder("chat_template.jinja")),
    "template a number": tokenizer_config(chat_template=5),
    "template a list": tokenizer_config(chat_template=["{{ messages }}"]),
    "templates without a default": tokenizer_config(chat_template=[{"name": "rag", "template": "{{ messages }}"}]),
    "templates without names": tokenizer_config(chat_template=[{"template": "{{ messages }}"}]),
}

ADAPTERS: dict[str, Damage] = {
    "adapter config empty": written("adapter_config.json", ""),
    "adapter config null": written("adapter_config.json", "null"),
    "adapter config a list": written("adapter_config.json", "[]"),
    "adapter config cut": cut("adapter_config.json", 0.5),
    "adapter config without type": adapter_config(peft_type=...),
    "adapter config of unknown type": adapter_config(peft_type="NOPE"),
    "adapter config of another type": adapter_config(peft_type="IA3"),
    "adapter for classification": adapter_config(task_type="SEQ_CLS"),
    "adapter for an unknown task": adapter_config(task_type="NOPE"),
    "adapter weights empty": written(ADAPTER, b""),
    "adapter weights cut": cut(ADAPTER, 0.5),
    "adapter weights of text": written(ADAPTER, "junk" * 100),
    "adapter weights of no tensors": tensors(ADAPTER, lambda all: {}),
    "adapter weights a folder": a_folder(ADAPTER),
    "adapter with one weight missing": without(r"layers\.1\.mlp\.down_proj\.lora_B", ADAPTER),
    "adapter with weights too many": tensors(ADAPTER, lambda all: {**all, "extra.lora_A.weight": torch.zeros(2, 2)}),
    "adapter renamed": renamed("base_model", "model_base", ADAPTER),
    "adapter that is not finite": each("down_proj", lambda t: t * torch.nan, ADAPTER),
    "adapter transposed": each("down_proj", lambda t: t.T, ADAPTER),
    "adapter of whole numbers": each("", lambda t: t.to(torch.int8), ADAPTER),
    "r of 8 for weights of 4": adapter_config(r=8),
    "r 0": adapter_config(r=0),
    "r -1": adapter_config(r=-1),
    "r a text": adapter_config(r="four"),
    "r null": adapter_config(r=None),
    "r a billion": adapter_config(r=10**9),
    "rank pattern of a billion": adapter_config(rank_pattern={"down_proj": 10**9}),
    "rank pattern a list": adapter_config(rank_pattern=[1]),
    "rank pattern a bad regex": adapter_config(rank_pattern={"(": 4}),
    "alpha a text": adapter_config(lora_alpha="much"),
    "alpha null": adapter_config(lora_alpha=None),
    "targets a bad regex": adapter_config(target_modules="(("),
    "targets a regex of nothing": adapter_config(target_modules="nothing_like_it"),
    "targets null": adapter_config(target_modules=None),
    "targets a number": adapter_config(target_modules=5),
    "targets an object": adapter_config(target_modules={"a": 1}),
    "targets of numbers": adapter_config(target_modules=[1, 2]),
    "targets empty": adapter_config(target_modules=[]),
    "targets of another architecture": adapter_config(target_modules=["c_attn"]),
    "layers to transform far away": adapter_config(layers_to_transform=[77]),
    "layers to transform a text": adapter_config(layers_to_transform="all"),
    "layer replication": adapter_config(layer_replication=[[0, 2], [1, 2]]),
    "dora without its weights": adapter_config(use_dora=True),
    "fan in fan out": adapter_config(fan_in_fan_out="yes"),
    "initialised by a number": adapter_config(init_lora_weights=5),
    "bias a number": adapter_config(bias=5),
    "exclude a bad regex": adapter_config(exclude_modules="(("),
    "an unknown field": adapter_config(no_such_field=1),
    "base model name a number": adapter_config(base_model_name_or_path=5),
}

HEADS: dict[str, Damage] = {
    "score head empty": written("score_head.safetensors", b""),
    "score head of another shape": each("weight", lambda t: t[:, :-1], "score_head.safetensors"),
    "score head without bias": without("bias", "score_head.safetensors"),
    "score head of no tensors": tensors("score_head.safetensors", lambda all: {}),
    "score head not finite": each("weight", lambda t: t * torch.nan, "score_head.safetensors"),
}
