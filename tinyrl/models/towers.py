"""The parts of a vision-language model: the language model, which trains; the tower and the projector, which do not."""

from __future__ import annotations

import inspect
import re

import transformers
from torch import nn
from transformers import PreTrainedModel

FEATURES = "mm_encoder_outputs"  # the argument of a backbone that takes features in place of pixels
TRIED_VERSION = "5.23"  # of transformers


def decoder_name(model: PreTrainedModel) -> str:
    """Return the name of the language model's decoder: `model.language_model`, or `model` where there is no tower."""
    decoder = model.get_decoder()
    return next(name for name, module in model.named_modules() if module is decoder)


def tower_names(model: PreTrainedModel) -> list[str]:
    """List the parts beside the decoder of a vision-language model (`model.visual`); none of a language model."""
    backbone, _, own = decoder_name(model).rpartition(".")
    if not backbone:
        return []
    return [f"{backbone}.{name}" for name, _ in model.get_submodule(backbone).named_children() if name != own]


def towers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the tower and the projector of a vision-language model."""
    return [model.get_submodule(name) for name in tower_names(model)]


def tower_pattern(model: PreTrainedModel) -> str:
    """Return the regular expression of the names of modules in the tower and the projector."""
    return rf"({'|'.join(map(re.escape, tower_names(model)))})\..+"


def language_parts(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder of a vision-language model, with its embedding, and its head."""
    head = model.get_output_embeddings()
    return [model.get_decoder()] if head is None else [model.get_decoder(), head]


def language_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the parameters of the language model, its embedding and its head, by name."""
    frozen = {id(parameter) for tower in towers_of(model) for parameter in tower.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in frozen}


def share_towers(model: PreTrainedModel, source: PreTrainedModel) -> None:
    """Put the tower and the projector of `source` in the place of those of a model with the same base."""
    for name in tower_names(model):
        model.set_submodule(name, source.get_submodule(name))


def check_takes_features(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that has no tower, or whose backbone takes no features in place of pixels, as in
    earlier versions of transformers.
    """
    name = type(model).__name__
    if not tower_names(model):
        raise ValueError(f"{name} has no vision tower beside its language model")
    if FEATURES not in inspect.signature(model.base_model.forward).parameters:
        raise ValueError(
            f"{name} takes no features of images ({FEATURES}) in transformers {transformers.__version__}; "
            f"{TRIED_VERSION} is tried, on Qwen2.5-VL, Qwen3-VL, Qwen3.5, SmolVLM, Gemma 3 and 4, InternVL, GLM-4V and "
            "LFM2-VL"
        )
