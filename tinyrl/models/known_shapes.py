"""Shapes of the models that recipes name, so that `tinyrl plan` answers where the hub cannot be reached.

A plan needs no weight, only shapes; what stands in for the rest is an embedded tokenizer, and rows as long as they may
be. Figures are those of the models' config.json.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tinyrl.config.recipe import build_config
from tinyrl.config.schema import Config
from tinyrl.config.yaml_reader import Source
from tinyrl.models.loading import load_tokenizer
from tinyrl.starter import starter_path

QWEN2: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6}
QWEN3: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6}
LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
SHAPES: dict[str, tuple[dict[str, Any], tuple[int | bool, ...]]] = {
    "Qwen/Qwen2.5-0.5B": (QWEN2, (896, 4864, 24, 14, 2, 64, 151_936, 32_768, True)),
    "Qwen/Qwen2.5-0.5B-Instruct": (QWEN2, (896, 4864, 24, 14, 2, 64, 151_936, 32_768, True)),
    "Qwen/Qwen2.5-1.5B-Instruct": (QWEN2, (1536, 8960, 28, 12, 2, 128, 151_936, 32_768, True)),
    "Qwen/Qwen2.5-3B-Instruct": (QWEN2, (2048, 11_008, 36, 16, 2, 128, 151_936, 32_768, True)),
    "Qwen/Qwen2.5-7B-Instruct": (QWEN2, (3584, 18_944, 28, 28, 4, 128, 152_064, 32_768, False)),
    "Qwen/Qwen3-4B-Instruct-2507": (QWEN3, (2560, 9728, 36, 32, 8, 128, 151_936, 262_144, True)),
    "meta-llama/Llama-3.2-1B-Instruct": (LLAMA, (2048, 8192, 16, 32, 8, 64, 128_256, 131_072, True)),
}
TEXT_TOKENS = 512  # of a prompt, and of an answer, in rows that nobody has seen


def described(name: str) -> dict[str, Any]:
    """The config.json of a model as far as shapes go; all of these were saved in bfloat16."""
    family, figures = SHAPES[name]
    return {**family, **dict(zip(FIELDS, figures, strict=True)), "dtype": "bfloat16"}


def stand_in(config: Config, folder: Path) -> Config:
    """The configuration with a model of the same shapes, without weights, and rows as long as they may be, in `folder`.

    An environment's turns are a longer response. Raises KeyError for a model whose shapes are not known.
    """
    model, rows, starter = folder / "model", folder / "rows.jsonl", starter_path("starter")
    assert starter is not None
    facts = described(config.model.path)
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(starter / name, model / name)
    (model / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    samples, environment = config.samples, config.environment
    prompt = _text(model, config.generation.max_prompt_tokens if samples else TEXT_TOKENS)
    answer = prompt if samples else _text(model, TEXT_TOKENS)
    row = {"completion": answer, "chosen": answer, "rejected": answer[::-1], "label": True, "score": 1.0}
    row = {} if samples else {name: row[name] for name in _columns(config)}
    count = max(config.run.eval_prompts, config.on_policy.num_prompts if samples else config.own.batch_size)
    rows.write_text((json.dumps({"prompt": prompt, **row}) + "\n") * count, encoding="utf-8")
    values = config.model_dump()
    values["model"] |= {"path": str(model), "revision": None}
    values["task"] = {"name": "rows", "data": str(rows), "eval_data": str(rows), "chat": False}
    values["reward"] |= {"functions": []}
    values["environment"] = {}
    if environment.use or environment.tools:
        values["generation"]["max_new_tokens"] += (environment.max_turns - 1) * environment.max_observation_tokens
    return build_config(Source("settings", values))


def _columns(config: Config) -> tuple[str, ...]:
    """What a row of a method that learns from rows has beside its prompt."""
    if config.trains.rows == "judged":
        of = {"labels": ("completion", "label"), "ratings": ("completion", "score")}
        return of.get(config.reward_model.objective, ("chosen", "rejected"))
    return ("chosen", "rejected") if config.trains.rows == "pairs" else ("completion",)


def _text(model: Path, tokens: int) -> str:
    """A text of so many tokens, or a few less where joints melt."""
    tokenizer = load_tokenizer(str(model))
    return str(tokenizer.decode(tokenizer("sort: q w e r " * tokens, add_special_tokens=False)["input_ids"][:tokens]))
