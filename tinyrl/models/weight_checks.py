"""Checks of a model that was read: weights and config.json, embedding and tokenizer, rounding in half precision.

A library fills what is missing with random numbers and goes on, so that noise would be trained.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.models.reading import reading, tensor_shapes
from tinyrl.text import shortened

# ---- Tokenizer and embedding ----
# A few models (Gemma-3 1B) have special tokens without a row, which ordinary text never holds: they may stay, and only
# rows that do hold one are refused.


def embedding_rows(model: PreTrainedModel | PeftModel) -> int:
    """How many token ids a model can read."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | PeftModel, *, path: str) -> None:
    """Raise ValueError when EOS, or a token of ordinary text, has no row in the model's embedding."""
    rows, eos = embedding_rows(model), tokenizer.eos_token_id
    without = {str(tokenizer.eos_token): eos} if isinstance(eos, int) and eos >= rows else {}
    if len(tokenizer) > rows:
        added = tokenizer.added_tokens_decoder
        without |= {token: i for token, i in tokenizer.get_vocab().items() if i >= rows and i not in added}
    for token, number in without.items():
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the embedding of {path!r} {rows} rows: "
            f"there is none for {shortened(token)!r} (token {number})"
        )


def check_ids(sequences: Iterable[list[int]], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Raise ValueError for the first token of some rows that has no row in the model's embedding."""
    rows = embedding_rows(model)
    for number, ids in enumerate(sequences, start=1):
        highest = max(ids, default=0)
        if highest >= rows:
            raise ValueError(
                f"row {number} holds {shortened(str(tokenizer.convert_ids_to_tokens(highest)))!r} (token "
                f"{highest}), for which the model has no embedding: it has {rows} rows"
            )


# ---- Weights and config.json ----


MOST_LAYERS = 10_000
OTHER_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM")


class NoHead(ValueError):
    """The weights of a language model where those of a classification model were asked for: all but the head."""


def check_weights(model: PreTrainedModel, found: dict[str, Any], *, path: str) -> None:
    """Raise ValueError, naming the first weight, unless the file had every weight of `model`, in its shape.

    `found`: the library's loading info, which leaves out what is tied and what a model's class says may be absent.
    Left-over weights are refused where they say that config.json is of another model: layers beyond its last, biases
    it has none for. Other heads and towers may be left over.
    """
    mismatched = sorted(found["mismatched_keys"])
    if mismatched:
        name, in_file, in_model = mismatched[0]
        raise ValueError(
            f"{path!r} has {name} in shape {_shape(in_file)}, and config.json asks for {_shape(in_model)}"
            f"{_and_more(len(mismatched))}"
        )
    missing, left_over = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    if missing:
        instead = f"; it has {left_over[0]} instead" if left_over else ""
        raise ValueError(
            f"{path!r} lacks {missing[0]}{_and_more(len(missing))}, which config.json asks for and which would be "
            f"random noise{instead}"
        )
    foreign = _of_another_model(left_over, model)
    if foreign:
        raise ValueError(f"{path!r} has {foreign[0]}{_and_more(len(foreign))}, which config.json has no place for")


def check_classifier(model: PreTrainedModel, found: dict[str, Any], *, path: str) -> None:
    """`check_weights` for a classification model. Raises NoHead where only the head is missing."""
    missing = sorted(found["missing_keys"])
    if missing and not any(name.startswith(f"{model.base_model_prefix}.") for name in missing):
        raise NoHead(
            f"{path!r} is no reward model: its weights have no {missing[-1]}, which would be random noise (is it a "
            "language model?)"
        )
    check_weights(model, found, path=path)


def check_language_model(config: PretrainedConfig) -> None:
    """Raise ValueError for a model with another head: with tied embeddings nothing of a language model is missing."""
    others = [name for name in getattr(config, "architectures", None) or () if str(name).endswith(OTHER_HEADS)]
    if others:
        raise ValueError(
            f"it is a {others[0]}, without a language-model head to sample from (a reward model is named as "
            "reward.model, or as critic.path)"
        )


def check_size(config: PretrainedConfig, *, folder: Path | None) -> None:
    """Raise ValueError where config.json describes a model that is larger than the weights in `folder` by far: it
    would be built, for hours or beyond the memory, before a comparison could show it. Torch builds nothing here.
    """
    text: Any = config.get_text_config()
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    shapes = [shape for file in files for shape in tensor_shapes(file).values()]
    layers, most = getattr(text, "num_hidden_layers", None), min(MOST_LAYERS, len(shapes) or MOST_LAYERS)
    if layers is not None and not 1 <= layers <= most:
        raise ValueError(f"config.json: num_hidden_layers={layers}, and the weights are of 1 to {most:,} layers")
    if not shapes or getattr(config, "quantization_config", None) is not None or hasattr(text, "embedding_size"):
        return  # packed or factored weights have other sizes
    numbers = sum(math.prod(shape) for shape in shapes)
    for name in ("vocab_size", "intermediate_size"):
        needed = text.hidden_size * (getattr(text, name, None) or 0)
        if needed > numbers:
            raise ValueError(
                f"config.json: hidden_size={text.hidden_size} x {name}={getattr(text, name)} is more than the "
                f"{numbers:,} numbers that all of its weights hold"
            )


def few_ids(model: PreTrainedModel) -> Tensor:
    """Eight token ids, (1, 8), that any model can read."""
    return torch.arange(1, 9, device=next(model.parameters()).device).unsqueeze(0) % embedding_rows(model)


@torch.no_grad()
def few_tokens(model: PreTrainedModel, *, path: str) -> Tensor:
    """What a model makes of eight tokens, in float32: its logits (8, V), a classifier's (labels,), or states (8, H).
    Raises ValueError where it cannot be computed (settings that only its forward pass reads), or is not finite.
    """
    with reading(f"the model of {path!r} cannot be computed"):
        output = model(input_ids=few_ids(model))
    numbers = output.logits if hasattr(output, "logits") else output.last_hidden_state
    if not numbers.isfinite().all():
        raise ValueError(f"{path!r} gives numbers that are not finite, so some of its weights are damaged")
    return numbers[0].float()


def _of_another_model(left_over: list[str], model: nn.Module) -> list[str]:
    """Left-over weights of a kind the model has in other layers, and biases of layers that have none."""
    kinds = {re.sub(r"\d+", "*", name) for name in model.state_dict()}
    without_bias = {
        f"{name}.bias"
        for name, module in model.named_modules()
        if hasattr(module, "weight") and getattr(module, "bias", ...) is None
    }
    return [name for name in left_over if re.sub(r"\d+", "*", name) in kinds or name in without_bias]


def _shape(shape: Collection[int]) -> str:
    return " x ".join(map(str, shape)) or "()"


def _and_more(count: int) -> str:
    return f" (and {count - 1} more weights)" if count > 2 else " (and another weight)" if count == 2 else ""


# ---- Rounding in half precision ----
# With sharp logits any two correct computations in bfloat16 are far apart (on a real model of 135M parameters by 0.06
# to 0.18 nats, on average over the vocabulary). So one of ours is not compared with the library's, but both with
# float32.


HALVES = (torch.bfloat16, torch.float16)
MOST_IN_FLOAT32 = 1e-4  # nats that two computations in float32 may be apart
TIMES_THE_LIBRARY = 1.5  # how much larger our mean error may be than that of the library's modules


def as_exact(error: float, library: float) -> bool:
    """Whether a computation with this mean error is as good as one of the library's, whose mean error is `library`."""
    return error <= max(TIMES_THE_LIBRARY * library, MOST_IN_FLOAT32)  # an error that is not a number is not


def ordinary_ids(vocabulary: int, count: int, *, start: int = 0) -> list[int]:
    """Token ids spread over the middle of a vocabulary: special tokens stand at its ends."""
    middle = max(1, vocabulary // 2)
    return [(vocabulary // 4 + (7919 * (start + i) + 1009) % middle) % vocabulary for i in range(count)]


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Inside, a model with half-precision weights computes in float32. Each layer's weights are widened while it runs,
    so there is no second copy of the model.
    """
    kept: dict[nn.Parameter, Tensor] = {}

    def widen(layer: nn.Module, _: object) -> None:
        for parameter in layer.parameters(recurse=False):
            if parameter.dtype in HALVES:
                kept[parameter] = parameter.data
                parameter.data = parameter.data.float()

    def restore(layer: nn.Module, *_: object) -> None:
        for parameter in layer.parameters(recurse=False):
            if parameter in kept:
                parameter.data = kept.pop(parameter)

    layers = [m for m in model.modules() if any(p.dtype in HALVES for p in m.parameters(recurse=False))]
    hooks = [h for m in layers for h in (m.register_forward_pre_hook(widen), m.register_forward_hook(restore))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, data in kept.items():  # of a layer that raised
            parameter.data = data
