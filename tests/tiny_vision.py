"""Small random vision-language models with their tokenizer and processor, written to a folder as `save_pretrained`
writes them. A picture of 32 x 32 pixels takes 4 tokens (Qwen's: 16, and more where it is larger).

Image processors are of the PIL backend, and files are laid out as on the hub: preprocessor_config.json, and
processor_config.json where the processor has settings of its own. Of Qwen's and SmolVLM's processors the library's
AutoProcessor loads the video part too, which needs torchvision (`tinyrl.models.loading.load_processor` leaves it out);
SmolVLM's needs num2words besides, so Idefics3's, whose shape it shares, takes its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedTokenizerFast
from transformers.image_processing_backends import PilBackend

from tests.tiny_models import EOS, HIDDEN, PAD, POSITIONS, SIGLIP, WINDOWS, seeded, spread, tiny_tokenizer

SIDE = 32  # pixels of a test's picture
QWEN_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SMOLVLM_TOKENS = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
GEMMA_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
INTERNVL_TOKENS = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
                   "video_token": "<video>"}  # fmt: skip
GEMMA4_TOKENS = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>",
                 "boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}  # fmt: skip
NAMED_TOKENS = {"gemma3": GEMMA_TOKENS, "gemma4": GEMMA4_TOKENS, "gemma4-large": GEMMA4_TOKENS,
                "internvl": INTERNVL_TOKENS}  # which processors ask the tokenizer for  # fmt: skip
LFM2_TOKENS = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
               *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2)))  # fmt: skip
GLM_TOKENS = {"image_token_id": "<|image|>", "image_start_token_id": "<|begin_of_image|>",
              "image_end_token_id": "<|end_of_image|>", "video_token_id": "<|video|>",
              "video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>"}  # fmt: skip
# A message's content is text, or parts of the types image and text.
TEMPLATE = """\
{%- for message in messages %}{{ OPEN + message['role'] + '\n' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}
{%- if part['type'] == 'image' %}{{ IMAGE }}{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}{{ CLOSE + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ OPEN + 'assistant\n' }}{% endif %}"""
TEXT = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": POSITIONS}  # fmt: skip
M_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


@dataclass(frozen=True)
class Family:
    """How a family's tokenizer, configuration and processor are made."""

    tokens: tuple[str, ...]
    image: str  # what the chat template writes for an image
    config: Callable[[PreTrainedTokenizerFast], PretrainedConfig]
    images: Callable[[], PilBackend]
    processor: dict[str, Any]  # its class, and its own settings


def tiny_vision(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a vision-language model of FAMILIES, its tokenizer and its processor into `folder`, which is returned."""
    own = {**FAMILIES, **MORE}[family]
    tokenizer = vision_tokenizer(family)
    config = own.config(tokenizer)
    with seeded(seed):
        model = AutoModelForImageTextToText.from_config(config)
        spread(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    images = own.images().to_dict() | {"processor_class": own.processor["processor_class"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    if len(own.processor) > 1:
        (folder / "processor_config.json").write_text(json.dumps(own.processor))
    return folder


def vision_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the family's special tokens and a chat template that writes images."""
    own = {**FAMILIES, **MORE}[family]
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(t, special=True) for t in own.tokens]})  # pyright: ignore[reportArgumentType]
    if family in NAMED_TOKENS:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer,
            eos_token=tokenizer.eos_token,
            pad_token=tokenizer.pad_token,
            model_max_length=POSITIONS,
            extra_special_tokens=NAMED_TOKENS[family],
        )
    written = TEMPLATE.replace("OPEN", repr("<turn>")).replace("CLOSE", repr(EOS))
    tokenizer.chat_template = written.replace("IMAGE", repr(own.image))
    return tokenizer


def _ids(tokenizer: PreTrainedTokenizerFast, **names: str) -> dict[str, Any]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def _text(tokenizer: PreTrainedTokenizerFast, **own: Any) -> dict[str, Any]:
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {**TEXT, "vocab_size": len(tokenizer), **ends, **own}


def _qwen_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return _ids(
        tokenizer,
        image_token_id="<|image_pad|>",
        video_token_id="<|video_pad|>",
        vision_start_token_id="<|vision_start|>",
        vision_end_token_id="<|vision_end|>",
    )


def _qwen2_5_vl(tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
              "out_hidden_size": HIDDEN, "window_size": 16, "fullatt_block_indexes": [1]}  # fmt: skip
    return transformers.Qwen2_5_VLConfig(
        text_config=_text(tokenizer, rope_parameters=M_ROPE),  # pyright: ignore[reportArgumentType]
        vision_config=vision,  # pyright: ignore[reportArgumentType]
        tie_word_embeddings=True,
        **_qwen_ids(tokenizer),
    )


def _qwen3_vl(tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
              "out_hidden_size": HIDDEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}  # fmt: skip
    text = _text(tokenizer, head_dim=8, rope_parameters={**M_ROPE, "mrope_interleaved": True})
    return transformers.Qwen3VLConfig(
        text_config=text,  # pyright: ignore[reportArgumentType]
        vision_config=vision,  # pyright: ignore[reportArgumentType]
        tie_word_embeddings=True,
        **_qwen_ids(tokenizer),
    )


def _smolvlm(tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": SIDE, "patch_size": 8}  # fmt: skip
    return transformers.SmolVLMConfig(
        text_config={"model_type": "llama", **_text(tokenizer)},  # pyright: ignore[reportArgumentType]
        vision_config=vision,  # pyright: ignore[reportArgumentType]
        scale_factor=2,
        tie_word_embeddings=False,
        **_ids(tokenizer, image_token_id="<image>", pad_token_id=PAD),
    )


def _gemma3(tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    text = _text(tokenizer, head_dim=8, sliding_window=64, layer_types=WINDOWS)
    ids = _ids(
        tokenizer,
        boi_token_index="<start_of_image>",
        eoi_token_index="<end_of_image>",
        image_token_id="<image_soft_token>",
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return transformers.Gemma3Config(
        text_config=text,  # pyright: ignore[reportArgumentType]
        vision_config=SIGLIP,  # pyright: ignore[reportArgumentType]
        mm_tokens_per_image=4,
        tie_word_embeddings=True,
        **ids,
    )


def _gemma4_text(tokenizer: PreTrainedTokenizerFast, **own: Any) -> dict[str, Any]:
    """Two layers of Gemma 4, the first with a window that is shorter than a picture."""
    shape = {"head_dim": 8, "global_head_dim": 16, "sliding_window": 16, "layer_types": WINDOWS}
    return _text(tokenizer, **shape, final_logit_softcapping=2.0, **own)


def _gemma4(tokenizer: PreTrainedTokenizerFast, text: dict[str, Any]) -> PretrainedConfig:
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 8, "patch_size": 2, "position_embedding_size": 64}  # fmt: skip
    return transformers.Gemma4Config(
        text_config=text,  # pyright: ignore[reportArgumentType]
        vision_config=vision,  # pyright: ignore[reportArgumentType]
        tie_word_embeddings=True,
        **_ids(
            tokenizer,
            boi_token_id="<|image>",
            eoi_token_id="<image|>",
            image_token_id="<|image|>",
            boa_token_id="<|audio>",
            eoa_token_index="<audio|>",
            audio_token_id="<|audio|>",
            video_token_id="<|video|>",
        ),
    )


def _small_gemma4(tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """Of E2B's shape: an embedding of each layer's own, keys that layers share, causal attention in images too."""
    shape = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4,
             "vocab_size_per_layer_input": len(tokenizer)}  # fmt: skip
    return _gemma4(tokenizer, _gemma4_text(tokenizer) | shape | {"layer_types": WINDOWS * 2})


def _large_gemma4(tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """Of 31B's shape: in layers with a window the places of an image see one another."""
    own = {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
    return _gemma4(tokenizer, _gemma4_text(tokenizer, **own))


def _lfm2_vl(tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "patch_size": 4, "num_patches": 64, "vision_use_head": False}  # fmt: skip
    hybrid = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    return transformers.Lfm2VlConfig(
        text_config={"model_type": "lfm2", **_text(tokenizer), **hybrid},  # pyright: ignore[reportArgumentType]
        vision_config={"model_type": "siglip2_vision_model", **vision},  # pyright: ignore[reportArgumentType]
        projector_hidden_size=32,
        tie_word_embeddings=True,
        **_ids(tokenizer, image_token_id="<image>"),
    )


def _qwen3_5(tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
              "out_hidden_size": HIDDEN, "num_position_embeddings": 64}  # fmt: skip
    linear = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
              "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
    rope = {**M_ROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    return transformers.Qwen3_5Config(
        text_config=_text(tokenizer, head_dim=8, rope_parameters=rope, **linear),  # pyright: ignore[reportArgumentType]
        vision_config=vision,  # pyright: ignore[reportArgumentType]
        tie_word_embeddings=True,
        **_qwen_ids(tokenizer),
    )


def _internvl(tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": [28, 28], "patch_size": [7, 7]}  # fmt: skip
    return transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **_text(tokenizer)},  # pyright: ignore[reportArgumentType]
        vision_config=vision,  # pyright: ignore[reportArgumentType]
        downsample_ratio=0.5,
        tie_word_embeddings=False,
        **_ids(tokenizer, image_token_id="<IMG_CONTEXT>"),
    )


def _glm4v(tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
              "out_hidden_size": HIDDEN, "image_size": SIDE}  # fmt: skip
    text = _text(tokenizer, head_dim=8, rope_parameters={**M_ROPE, "partial_rotary_factor": 1.0})
    return transformers.Glm4vConfig(
        text_config=text,  # pyright: ignore[reportArgumentType]
        vision_config=vision,  # pyright: ignore[reportArgumentType]
        tie_word_embeddings=False,
        **_ids(tokenizer, **GLM_TOKENS),
    )


def _internvl_images() -> PilBackend:
    return transformers.GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, crop_to_patches=False)


def _glm_images() -> PilBackend:
    own: Any = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}}
    return transformers.Glm4vImageProcessorPil(**own)


def _qwen_images() -> PilBackend:
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    return transformers.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size)


def _smolvlm_images() -> PilBackend:
    size = {"longest_edge": SIDE}
    return transformers.Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)


def _gemma_images() -> PilBackend:
    return transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})


def _lfm2_images() -> Any:
    """Cut pictures above 128 x 64 pixels into tiles; this processor is of the torchvision backend alone."""
    pytest.importorskip("torchvision")
    tiles = {"tile_size": 32, "min_tiles": 2, "max_tiles": 4}
    tokens = {"encoder_patch_size": 4, "min_image_tokens": 4, "max_image_tokens": 16, "max_pixels_tolerance": 2.0}
    return transformers.Lfm2VlImageProcessor(**tiles, **tokens)


def _gemma4_images() -> PilBackend:
    return transformers.Gemma4ImageProcessorPil(patch_size=2, max_soft_tokens=70)


QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
FAMILIES = {
    "qwen2_5_vl": Family(
        tokens=QWEN_TOKENS,
        image=QWEN_IMAGE,
        config=_qwen2_5_vl,
        images=_qwen_images,
        processor={"processor_class": "Qwen2_5_VLProcessor"},
    ),
    "qwen3_vl": Family(
        tokens=QWEN_TOKENS,
        image=QWEN_IMAGE,
        config=_qwen3_vl,
        images=_qwen_images,
        processor={"processor_class": "Qwen3VLProcessor"},
    ),
    "smolvlm": Family(
        tokens=SMOLVLM_TOKENS,
        image="<image>",
        config=_smolvlm,
        images=_smolvlm_images,
        processor={"processor_class": "Idefics3Processor", "image_seq_len": 4},
    ),
    "gemma3": Family(
        tokens=(*GEMMA_TOKENS.values(),),
        image="<start_of_image>",
        config=_gemma3,
        images=_gemma_images,
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 4},
    ),
}
# Families of which a model's trials and a run are tested.
GEMMA4 = {"processor_class": "Gemma4Processor", "image_seq_length": 70}
MORE = {
    "gemma4": Family(
        tokens=(*GEMMA4_TOKENS.values(), "<|video|>"),
        image="<|image|>",
        config=_small_gemma4,
        images=_gemma4_images,
        processor=GEMMA4,
    ),
    "lfm2_vl": Family(
        tokens=LFM2_TOKENS,
        image="<image>",
        config=_lfm2_vl,
        images=_lfm2_images,
        processor={"processor_class": "Lfm2VlProcessor"},
    ),
    "gemma4-large": Family(
        tokens=(*GEMMA4_TOKENS.values(), "<|video|>"),
        image="<|image|>",
        config=_large_gemma4,
        images=_gemma4_images,
        processor=GEMMA4,
    ),
    "internvl": Family(
        tokens=(*INTERNVL_TOKENS.values(),),
        image="<IMG_CONTEXT>",
        config=_internvl,
        images=_internvl_images,
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
    ),
    "qwen3_5": Family(
        tokens=QWEN_TOKENS,
        image=QWEN_IMAGE,
        config=_qwen3_5,
        images=_qwen_images,
        processor={"processor_class": "Qwen3VLProcessor"},
    ),
    "glm4v": Family(
        tokens=(*GLM_TOKENS.values(),),
        image="<|begin_of_image|><|image|><|end_of_image|>",
        config=_glm4v,
        images=_glm_images,
        processor={"processor_class": "Glm4vProcessor"},
    ),
}
