"""Small random models with real tokenizers, written to a folder as `save_pretrained` writes them, in milliseconds.

Weights are drawn wider than a library would (and biases and norms away from 0 and 1), so that distributions are far
from uniform and a forgotten bias, norm or position shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
POSITIONS = 512
HIDDEN = 32
WINDOWS = ["sliding_attention", "full_attention"]
SOFT_CAPS = {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}
LINEAR = {"key_head_dim": 8, "value_head_dim": 8, "num_key_heads": 2, "num_value_heads": 4, "conv_kernel_dim": 4}
TURNS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
         "mrope_interleaved": True}  # fmt: skip
SPARSE = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2,
          "shared_expert_intermediate_size": 16}  # fmt: skip
HYBRID = {"head_dim": 8, "num_hidden_layers": 4, "full_attention_interval": 2, "tie_word_embeddings": True,
          "rope_parameters": TURNS, **{f"linear_{name}": value for name, value in LINEAR.items()}}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
          "out_hidden_size": 32, "num_position_embeddings": 16}  # fmt: skip
SIGLIP = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
# Kind: the library's configuration class, and what differs from `tiny_config`'s shape. Windows, soft-caps and shared
# keys are small enough to show within a prompt, but for the window of `gemma3-wide`. GPT-2 keeps its dropout.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 8,
                                     "num_experts_per_tok": 2}),
    "phi-moe": ("PhimoeConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "glm-moe": ("Glm4MoeConfig", {"head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 8,
                                  "num_experts_per_tok": 2, "first_k_dense_replace": 1}),
    "gpt2": ("GPT2Config", {}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 8, **SOFT_CAPS}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "hyperclovax": ("HyperCLOVAXConfig", {"logits_scaling": 0.25, "attention_multiplier": 0.35}),
    "gemma3-wide": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 4096, "layer_types": WINDOWS}),
    "gemma4": ("Gemma4TextConfig", {"head_dim": 8, "global_head_dim": 16, "sliding_window": 8, "num_hidden_layers": 4,
                                    "num_kv_shared_layers": 2, "layer_types": WINDOWS * 2,
                                    "hidden_size_per_layer_input": 4, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 8, "layer_types": WINDOWS}),
    "gpt-oss": ("GptOssConfig", {"head_dim": 8, "sliding_window": 8, "layer_types": WINDOWS, "num_local_experts": 4,
                                 "num_experts_per_tok": 2}),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "olmo3": ("Olmo3Config", {"sliding_window": 8, "layer_types": WINDOWS}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "falcon-h1": ("FalconH1Config", {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8,
                                     "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}),
    "jamba": ("JambaConfig", {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
                              "expert_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4,
                              "use_mamba_kernels": False}),
    "recurrentgemma": ("RecurrentGemmaConfig", {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 64,
                                                "num_key_value_heads": 1}),
    "qwen3.5": ("Qwen3_5TextConfig", HYBRID),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**HYBRID, **SPARSE}),
    # Folders with a vision tower: of Qwen3.5's the language model alone is loaded, of Gemma's the whole.
    "qwen3.5-vl": ("Qwen3_5TextConfig", HYBRID),
    "qwen3.5-moe-vl": ("Qwen3_5MoeTextConfig", {**HYBRID, **SPARSE}),
    "gemma3-vl": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 64, "layer_types": WINDOWS}),
}  # fmt: skip


def tiny_model(
    folder: Path, kind: str, *, seed: int = 0, pad_is_eos: bool = False, vocabulary: Sequence[str] | None = None
) -> Path:
    """Write a causal language model of a kind of KINDS and its tokenizer into `folder`, which is returned.

    The tokenizer reads single bytes, so any text round-trips; with `vocabulary` it reads those words, split at
    spaces, instead (not for qwen2: transformers reads any tokenizer beside that architecture as Qwen's own BPE).
    pad_is_eos: there is no pad token of its own. The same arguments give the same weights.
    """
    assert kind != "qwen2" or vocabulary is None, "transformers would replace a tokenizer of words beside qwen2"
    tokenizer = tiny_tokenizer(pad_is_eos=pad_is_eos, vocabulary=vocabulary)
    config = tiny_config(kind, tokenizer)
    with seeded(seed):
        auto = AutoModelForImageTextToText if kind.endswith("-vl") else AutoModelForCausalLM
        model = auto.from_config(config)
        spread(model)
    return _save(model, tokenizer, folder)


def sharp_model(folder: Path, kind: str = "llama", *, seed: int = 0, deviation: float = 4.0, **shape: Any) -> Path:
    """`tiny_model` with logits as sharp as a real language model's: their standard deviation is `deviation`, by the
    weight of the last norm. `shape` changes its configuration (num_hidden_layers=12).
    """
    tokenizer = tiny_tokenizer()
    config = tiny_config(kind, tokenizer)
    config.update(shape)
    with seeded(seed), torch.no_grad():
        model: Any = AutoModelForCausalLM.from_config(config)
        spread(model)
        ids = torch.arange(40).reshape(4, 10) * 6
        model.base_model.norm.weight.mul_(deviation / model.eval()(input_ids=ids).logits.std())
    return _save(model, tokenizer, folder)


def tiny_reward_model(
    folder: Path,
    kind: str = "llama",
    *,
    seed: int = 0,
    labels: Sequence[str] = ("score",),
    pad_is_eos: bool = False,
    vocabulary: Sequence[str] | None = None,
) -> Path:
    """Write a sequence-classification model with these labels and its tokenizer into `folder`; returns it."""
    tokenizer = tiny_tokenizer(pad_is_eos=pad_is_eos, vocabulary=vocabulary)
    config = tiny_config(kind, tokenizer)
    config.id2label, config.label2id = dict(enumerate(labels)), {name: i for i, name in enumerate(labels)}
    with seeded(seed):
        model = AutoModelForSequenceClassification.from_config(config)
        spread(model)
    return _save(model, tokenizer, folder)


def tiny_tokenizer(*, pad_is_eos: bool = False, vocabulary: Sequence[str] | None = None) -> PreTrainedTokenizerFast:
    """A fast tokenizer: <pad> is 0 (absent where pad_is_eos), then <eos>, then the bytes, or <unk> and the words."""
    specials = [EOS] if pad_is_eos else [PAD, EOS]
    if vocabulary is None:
        tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        inner = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
        inner.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    else:
        tokens = [*specials, UNK, *vocabulary]
        inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNK))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=EOS,
        pad_token=EOS if pad_is_eos else PAD,
        unk_token=UNK if vocabulary is not None else None,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(kind: str, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """Two layers of width 32 (KINDS); skip the test where transformers does not know the architecture."""
    name, own = KINDS[kind]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    shape = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": POSITIONS}  # fmt: skip
    if kind == "gemma4":
        own = own | {"vocab_size_per_layer_input": len(tokenizer)}
    if kind == "gpt2":
        shape = {"n_positions": POSITIONS, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = getattr(transformers, name)(**(shape | {"vocab_size": len(tokenizer)} | ends | own))
    if kind in ("qwen3.5-vl", "qwen3.5-moe-vl"):
        whole = getattr(transformers, name.replace("TextConfig", "Config"))
        return whole(text_config=config.to_dict(), vision_config=VISION, tie_word_embeddings=True)
    if kind == "gemma3-vl":
        whole = getattr(transformers, "Gemma3Config")  # noqa: B009
        images = {"vision_config": SIGLIP, "mm_tokens_per_image": 4}
        return whole(text_config=config.to_dict(), tie_word_embeddings=True, **images, **ends)
    return config


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from a generator of our own: making a model must not shift the random numbers of the test."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def spread(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class TinyModels:
    """Makes each tiny model once for a session of tests: `tiny("gpt2", pad_is_eos=True)` is its folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: dict[str, Path] = {}

    def __call__(self, kind: str, **options: Any) -> Path:
        return self._once(f"{kind} {options}", lambda folder: tiny_model(folder, kind, **options))

    def reward(self, kind: str = "llama", **options: Any) -> Path:
        return self._once(f"reward {kind} {options}", lambda folder: tiny_reward_model(folder, kind, **options))

    def _once(self, key: str, make: Callable[[Path], Path]) -> Path:
        if key not in self.made:
            self.made[key] = make(self.root / str(len(self.made)))
        return self.made[key]
