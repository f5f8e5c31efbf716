"""Small configurations of the architectures that people train, by transformers' own configuration classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers
from transformers import PretrainedConfig

WINDOWS = ["sliding_attention", "full_attention"]
EXPERTS: dict[str, Any] = {"head_dim": 8, "num_experts_per_tok": 2}
HYBRID: dict[str, Any] = {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
# Windows, soft-caps and shared keys are small enough to bite within a prompt. `-wide`: a window nothing reaches.
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", {"head_dim": 8, "sliding_window": 8}),
    "phi3": ("Phi3Config", {}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 16, **EXPERTS}),
    "qwen3.5": ("Qwen3_5TextConfig", HYBRID),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 8, "layer_types": WINDOWS}),
    "gemma3-wide": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 4096, "layer_types": WINDOWS}),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": WINDOWS * 2,
            "hidden_size_per_layer_input": 4,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 4, "sliding_window": 8, "layer_types": WINDOWS, **EXPERTS}),
}
VISION_LANGUAGE = ("qwen3.5-vl",)  # folders with a vision tower, of which the language model is trained
MORE_KINDS = (*CLASSES, *VISION_LANGUAGE)


def config_of(kind: str, shape: dict[str, Any]) -> PretrainedConfig:
    """The configuration of a kind of MORE_KINDS, of this shape; skips the test where transformers does not know it."""
    if kind in VISION_LANGUAGE:
        text = _class("Qwen3_5TextConfig")(**(shape | HYBRID)).to_dict()
        return _class("Qwen3_5Config")(text_config=text, vision_config=VISION, tie_word_embeddings=True)
    name, options = CLASSES[kind]
    if kind == "gemma4":
        options = options | {"vocab_size_per_layer_input": shape["vocab_size"]}
    return _class(name)(**(shape | options))


def _class(name: str) -> Callable[..., PretrainedConfig]:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)
