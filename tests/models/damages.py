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
    "config cut": cut("config.json", 0.5),
    "config nested deep": written("config.json", '{"a":' * 20_000 + "1" + "}" * 20_000),
    "config of unknown type": config(model_type="no-such-type"),
    "config a folder": a_folder("config.json"),
    "weights empty": written(WEIGHTS, b""),
    "weights cut in half": cut(WEIGHTS, 0.5),
    "weights cut at the end": cut(WEIGHTS, 0.999),
    "weights of text": written(WEIGHTS, "<html>404 Not Found</html>" * 20),
    "weights with a huge header": written(WEIGHTS, (1 << 60).to_bytes(8, "little") + b"{}"),
    "weights absent": removed(WEIGHTS),
    "index of shards that are not there": together(
        removed(WEIGHTS),
        written("other.safetensors", b""),
        written("model.safetensors.index.json", '{"metadata": {}, "weight_map": {"a": "model-00001.safetensors"}}'),
    ),
    "index null": together(removed(WEIGHTS), written("model.safetensors.index.json", "null")),
    "generation config null": written("generation_config.json", "null"),
}

KEYS: dict[str, Damage] = {
    "one weight missing": without(r"layers\.0\.mlp\.down_proj"),
    "no embedding": without("embed_tokens"),
    "keys renamed": renamed("^model", "network"),
    "more layers in config than in file": config(num_hidden_layers=4),
    "fewer layers in config than in file": config(num_hidden_layers=1),
    "a billion layers": config(num_hidden_layers=10**9),
    "a billion wide": config(hidden_size=10**9),
    "biases in config": config(attention_bias=True),
    "an embedding one row short": each("embed_tokens", lambda t: t[:-1]),
    "transposed weights": each("up_proj", lambda t: t.T),
    "weights that are not finite": each("down_proj", lambda t: t * torch.nan),
}

VALUES: dict[str, Damage] = {
    "hidden_size a text": config(hidden_size="abc"),
    "hidden_size null": config(hidden_size=None),
    "hidden_size 0": config(hidden_size=0),
    "num_attention_heads 3": config(num_attention_heads=3),
    "vocab_size 0": config(vocab_size=0),
    "hidden_act unknown": config(hidden_act="no-such-function"),
    "rope_parameters a text": config(rope_parameters="fast"),
    "dtype unknown": config(dtype="float99"),
    "pad_token_id beyond the vocabulary": config(pad_token_id=258),
    "auto_map to code": config(auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}),
}

TOKENIZERS: dict[str, Damage] = {
    "tokenizer absent": removed("tokenizer.json"),
    "tokenizer empty": written("tokenizer.json", ""),
    "tokenizer cut": cut("tokenizer.json", 0.5),
    "tokenizer of an unknown model": written("tokenizer.json", '{"version": "1.0", "model": {"type": "Nope"}}'),
    "tokenizer one word more": one_more_word,
    "tokenizer one added token more": one_more_added,
    "tokenizer config null": written("tokenizer_config.json", "null"),
    "eos a number": tokenizer_config(eos_token=5),
    "eos absent": tokenizer_config(eos_token=None),
    "eos beyond the embedding": tokenizer_config(eos_token="<never seen>"),
    "pad beyond the embedding": tokenizer_config(pad_token="<never seen>"),
    "extra special tokens of numbers": tokenizer_config(extra_special_tokens=[1, 2]),
    "added tokens far away": tokenizer_config(added_tokens_decoder={"9999999": {"content": "<far>", "special": True}}),
    "special tokens map of numbers": written("special_tokens_map.json", '{"eos_token": 5}'),
}

DEEP = "(" * 5_000 + "1" + ")" * 5_000
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES: dict[str, Damage] = {
    "template that raises": template("{{ raise_exception('no thanks') }}"),
    "template with a syntax error": template("{% if %}"),
    "template of nothing": template("{# nothing #}"),
    "template of an unknown call": template("{{ nobody() }}"),
    "template that recurses": template("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"),
    "template nested deep": template("{{ " + DEEP + " }}"),
    "template that loops in a macro": template("{% macro m() %}" + LOOP + "{% endmacro %}{{ m() }}"),
    "template of a long range": template("{% for a in range(10**9) %}{% endfor %}"),
    "template of one huge text": template("{{ 'x' * 10**15 }}"),
    "template of a huge number": template("{{ 9 ** (9 ** 9) }}"),
    "template that reaches out": template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "template that includes a file": template("{% include '/etc/passwd' %}"),
    "template not UTF-8": written("chat_template.jinja", b"{{ '\xff' }}"),
    "template a folder": together(template(""), a_folder("chat_template.jinja")),
    "template a number": tokenizer_config(chat_template=5),
}

ADAPTERS: dict[str, Damage] = {
    "adapter config empty": written("adapter_config.json", ""),
    "adapter config null": written("adapter_config.json", "null"),
    "adapter config of another type": adapter_config(peft_type="IA3"),
    "adapter for classification": adapter_config(task_type="SEQ_CLS"),
    "adapter weights empty": written(ADAPTER, b""),
    "adapter weights cut": cut(ADAPTER, 0.5),
    "adapter with one weight missing": without(r"layers\.1\.mlp\.down_proj\.lora_B", ADAPTER),
    "adapter with weights too many": tensors(ADAPTER, lambda all: {**all, "extra.lora_A.weight": torch.zeros(2, 2)}),
    "adapter that is not finite": each("down_proj", lambda t: t * torch.nan, ADAPTER),
    "adapter transposed": each("down_proj", lambda t: t.T, ADAPTER),
    "r of 8 for weights of 4": adapter_config(r=8),
    "r 0": adapter_config(r=0),
    "r a text": adapter_config(r="four"),
    "r a billion": adapter_config(r=10**9),
    "rank pattern a bad regex": adapter_config(rank_pattern={"(": 4}),
    "alpha null": adapter_config(lora_alpha=None),
    "targets a bad regex": adapter_config(target_modules="(("),
    "targets a regex of nothing": adapter_config(target_modules="nothing_like_it"),
    "targets of numbers": adapter_config(target_modules=[1, 2]),
    "layers to transform far away": adapter_config(layers_to_transform=[77]),
    "layer replication": adapter_config(layer_replication=[[0, 2], [1, 2]]),
    "dora without its weights": adapter_config(use_dora=True),
}

HEADS: dict[str, Damage] = {
    "score head empty": written("score_head.safetensors", b""),
    "score head of another shape": each("weight", lambda t: t[:, :-1], "score_head.safetensors"),
    "score head not finite": each("weight", lambda t: t * torch.nan, "score_head.safetensors"),
}
