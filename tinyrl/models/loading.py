"""Loading of causal language models and tokenizers, and whether weights, config.json and tokenizer go together.

Weights are only ever read from safetensors files: `.bin`, `.pt` and `.pkl` are refused, because unpickling runs code. A
library fills missing weights with random numbers and goes on, so that noise would be trained. A token without a row in
the embedding would be an error of indices later; a few models (Gemma-3 1B) have special tokens without one, which
ordinary text never holds: they may stay, and only rows that hold one are refused.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils.hub import cached_file

from tinyrl.config.sections import starter_path
from tinyrl.models.reading import ADAPTER_FILES, MODEL_FILES, TOKENIZER_FILES, reading, tensor_shapes
from tinyrl.text import did_you_mean, shortened

PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
# The library then says which weights are missing or of another shape, instead of an error that names none of them.
FULL_REPORT: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
HUB_DEFAULT = "main"
MOST_LAYERS = 10_000
OTHER_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM")


def resolve_model_path(path: str) -> str:
    """`starter` and `starter-reward` name the embedded models; a folder is itself; everything else is a hub name.

    Raises ValueError for a path that looks local and is not there, and for a folder without safetensors weights.
    """
    embedded = starter_path(path)
    if embedded is not None:
        return str(embedded)
    folder = Path(path).expanduser()
    if folder.is_dir():
        check_folder(folder)
        return str(folder)
    if folder.is_file():
        raise ValueError(f"model.path={path} is a file; name the folder that holds config.json and *.safetensors")
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        raise ValueError(f"model path {path!r} does not exist.{did_you_mean(folder.name, [*siblings, 'starter'])}")
    return path


def local_folder(resolved: str) -> Path | None:
    """The folder that `resolve_model_path` found; None for a hub name."""
    folder = Path(resolved)
    return folder if folder.is_dir() else None


def check_folder(folder: Path) -> None:
    """Raise ValueError unless the folder may hold a whole model: config.json, and no weights but safetensors."""
    names = {p.name for p in folder.iterdir()}
    if "config.json" not in names and ADAPTER_FILES[0] in names:
        raise ValueError(f"{folder} is an adapter, not a whole model: name it as model.adapter, its base as model.path")
    if "config.json" not in names:
        there = ", ".join(sorted(names)[:8]) or "nothing"
        raise ValueError(f"{folder} is not a model folder: it has no config.json (it has: {there})")
    pickled = sorted(n for n in names - {"training_args.bin"} if n.endswith(PICKLED))
    if pickled and not any(n.endswith(".safetensors") for n in names):
        raise ValueError(f"{folder}: {pickled[0]} is pickled and can execute code when read; convert it to safetensors")


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False, needs_eos: bool = True
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; one without a pad token pads with EOS (masks never look at token ids, so that is
    safe). Raises ValueError when it cannot be read, or has no EOS where one is needed (to end a completion).
    """
    resolved, what = resolve_model_path(path), f"cannot load a tokenizer from {path!r}"
    with reading(what, folder=resolved, files=TOKENIZER_FILES, otherwise="tokenizer_config.json or tokenizer.json"):
        # A folder that names no architecture's tokenizer means its tokenizer.json as it is; beside some architectures
        # (Qwen2) the library would put the vocabulary into that architecture's own tokenizer all the same.
        named = get_tokenizer_config(resolved, revision=revision or HUB_DEFAULT).get("tokenizer_class")
        kind = PreTrainedTokenizerFast if named in PLAIN_TOKENIZERS else AutoTokenizer
        tokenizer = kind.from_pretrained(
            resolved, revision=revision or HUB_DEFAULT, trust_remote_code=trust_remote_code
        )
        if not isinstance(tokenizer.model_max_length, int | float) or tokenizer.model_max_length < 1:
            raise ValueError(f"model_max_length is {tokenizer.model_max_length!r}; it must be a number of at least 1")
        if tokenizer.vocab_size < 1:
            raise ValueError("it has no tokens")
        tokenizer.decode(tokenizer("a b")["input_ids"])
    if tokenizer.eos_token_id is None and needs_eos:
        raise ValueError(f"the tokenizer of {path!r} has no EOS token, so a completion could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, *, revision: str | None = None) -> None:
    """Save a tokenizer of `load_tokenizer` as the files it was loaded from: older versions of the library cannot read
    what this one writes.
    """
    tokenizer.save_pretrained(folder)
    names = {*TOKENIZER_FILES, "merges.txt", "tokenizer.model", *tokenizer.vocab_files_names.values()}
    for name in sorted(names) if tokenizer.name_or_path else ():
        own = cached_file(
            tokenizer.name_or_path,
            name,
            revision=revision or HUB_DEFAULT,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if own is not None:
            shutil.copyfile(own, folder / name)


def load_model_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """config.json of a model. Raises ValueError when it cannot be read."""
    resolved = resolve_model_path(path)
    what, revision = f"cannot load a model from {path!r}", revision or HUB_DEFAULT
    with reading(what, folder=resolved, files=("config.json",), otherwise="config.json"):
        return AutoConfig.from_pretrained(resolved, revision=revision, trust_remote_code=trust_remote_code)


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    attention: str = "sdpa",
    quantization: str | None = None,
    random_init: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal LM with every dropout off, in `dtype`. Raises ValueError when it cannot be read, or is not all there.

    attention `sdpa` falls back to eager for the few models that scaled_dot_product_attention cannot compute: those
    with a soft-cap or sinks (Gemma-2, gpt-oss). random_init draws the weights from torch's generator instead of
    reading them (for models trained from scratch).
    """
    resolved = resolve_model_path(path)
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": None if attention == "sdpa" else attention,  # None: sdpa where it is supported
        "trust_remote_code": trust_remote_code,
    }
    if quantization is not None:
        options["quantization_config"] = few_bits(quantization, dtype)
    what = f"cannot load a causal language model from {path!r}"
    with reading(what, folder=resolved, files=MODEL_FILES, otherwise="config.json"):
        revision = revision or HUB_DEFAULT
        config = AutoConfig.from_pretrained(resolved, revision=revision, trust_remote_code=trust_remote_code)
        check_size(config, folder=None if random_init else local_folder(resolved))
        loaded: Any
        if random_init:
            loaded = AutoModelForCausalLM.from_config(config, **options), None
        else:
            check_language_model(config)
            loaded = AutoModelForCausalLM.from_pretrained(
                resolved, revision=revision, use_safetensors=True, **options, **FULL_REPORT
            )
    model, found = loaded
    if found is not None:
        check_weights(model, found, path=path)
    if quantization == "4bit":
        keep_differentiable(model)
    return model.eval()


def keep_differentiable(model: PreTrainedModel) -> None:
    """Stop bitsandbytes from repacking 4-bit weights for a CPU with AVX512-BF16 when the model first samples: its
    product with repacked weights has no gradient, and every adapter before it would silently get none.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


def few_bits(quantization: str, dtype: torch.dtype) -> Any:
    """bitsandbytes' NF4 with double quantisation (QLoRA, 2305.14314), or its 8 bits (LLM.int8, 2208.07339)."""
    try:
        import bitsandbytes  # noqa: F401  # pyright: ignore[reportMissingImports]
        from transformers import BitsAndBytesConfig
    except ImportError:
        raise ValueError(
            f"quantization={quantization} needs bitsandbytes: pip install 'tinyrl[quantization]'"
        ) from None
    if quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def embedding_rows(model: PreTrainedModel | PeftModel) -> int:
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | PeftModel, *, path: str, sampled: int = 0
) -> None:
    """Raise ValueError when EOS, a token of ordinary text, or an added token that another model can sample (it has
    `sampled` rows) has no row in the model's embedding.
    """
    rows, eos = embedding_rows(model), tokenizer.eos_token_id
    without = {str(tokenizer.eos_token): eos} if isinstance(eos, int) and eos >= rows else {}
    if len(tokenizer) > rows:
        added = tokenizer.added_tokens_decoder
        without |= {
            token: i for token, i in tokenizer.get_vocab().items() if i >= rows and (i < sampled or i not in added)
        }
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
        shapes = f"in shape {_shape(in_file)}, and config.json asks for {_shape(in_model)}"
        raise ValueError(f"{path!r} has {name} {shapes}{_and_more(len(mismatched))}")
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
        raise ValueError(f"it is a {others[0]}; a reward model is named as reward.model or critic.path")


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
    bias = getattr(model.get_output_embeddings(), "bias", None)
    never = False if bias is None else bias == -torch.inf  # tokens that a head rules out
    if not (numbers.isfinite() | never).all():
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
