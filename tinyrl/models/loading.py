"""Load causal language models and tokenizers; check that weights, config.json and tokenizer go together.

Weights are read from safetensors files only, because unpickling others runs code. The library fills missing weights
with random numbers and goes on, so they are refused. A few models (Gemma-3 1B) have special tokens without a row in the
embedding; only rows of data that hold one are refused.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils.hub import cached_file

from tinyrl.models.reading import TOKENIZER_FILES, reading, resolve_model_path
from tinyrl.text import truncate

PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
# The library then reports weights that are missing or of another shape, instead of an error that names none of them.
FULL_REPORT: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
HUB_DEFAULT = "main"
OTHER_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM")


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False, needs_eos: bool = True
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer. Without a pad token it pads with EOS, which is safe: masks come from lengths. Raises
    ValueError when it cannot be read, or has no EOS where one is needed (to end a completion).
    """
    options: dict[str, Any] = {"revision": revision or HUB_DEFAULT}
    resolved = resolve_model_path(path)
    with reading(f"cannot load a tokenizer from {path!r} (tokenizer_config.json, tokenizer.json)", resolved):
        # Beside some architectures (Qwen2) the library would put any vocabulary into the architecture's own tokenizer.
        named = get_tokenizer_config(resolved, **options).get("tokenizer_class")
        kind = PreTrainedTokenizerFast if named in PLAIN_TOKENIZERS else AutoTokenizer
        tokenizer = kind.from_pretrained(resolved, trust_remote_code=trust_remote_code, **options)
        if tokenizer.model_max_length < 1:
            raise ValueError(f"model_max_length is {tokenizer.model_max_length!r}; it must be at least 1")
        tokenizer.decode(tokenizer("a b")["input_ids"])
    if tokenizer.eos_token_id is None and needs_eos:
        raise ValueError(f"the tokenizer of {path!r} has no EOS token, so a completion could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, *, revision: str | None = None) -> None:
    """Save a tokenizer of `load_tokenizer` as the files that it was loaded from: older versions of the library cannot
    read those that this one writes.
    """
    tokenizer.save_pretrained(folder)
    names = {*TOKENIZER_FILES, "merges.txt", "tokenizer.model", *tokenizer.vocab_files_names.values()}
    options: dict[str, Any] = {
        "revision": revision or HUB_DEFAULT, "local_files_only": True,
        "_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False,
    }  # fmt: skip
    for name in sorted(names) if tokenizer.name_or_path else ():
        own = cached_file(tokenizer.name_or_path, name, **options)
        if own is not None:
            shutil.copyfile(own, folder / name)


def load_model_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """Load a model's config.json. Raises ValueError when it cannot be read."""
    resolved, revision = resolve_model_path(path), revision or HUB_DEFAULT
    with reading(f"cannot load a model from {path!r} (config.json)", resolved):
        return AutoConfig.from_pretrained(resolved, revision=revision, trust_remote_code=trust_remote_code)


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    quantization: str | None = None,
    random_init: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a causal LM in `dtype`, with every dropout off. Raises ValueError when it cannot be read, or is incomplete.
    random_init draws the weights from torch's generator.
    """
    resolved, revision = resolve_model_path(path), revision or HUB_DEFAULT
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    options["attn_implementation"] = None  # sdpa, and eager where a model's soft-cap or sinks are beyond it (Gemma-2)
    if quantization is not None and find_spec("bitsandbytes") is None:
        raise ValueError(f"quantization={quantization} needs bitsandbytes: pip install 'tinyrl[quantization]'")
    if quantization is not None:  # NF4 with double quantisation (QLoRA, 2305.14314), or 8 bits (LLM.int8, 2208.07339)
        nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
        bits: Any = {"load_in_8bit": True} if quantization == "8bit" else {"load_in_4bit": True, **nf4}
        options["quantization_config"] = BitsAndBytesConfig(**bits)
    with reading(f"cannot load a causal language model from {path!r} (config.json, *.safetensors)", resolved):
        config = AutoConfig.from_pretrained(resolved, revision=revision, trust_remote_code=trust_remote_code)
        if random_init:
            return AutoModelForCausalLM.from_config(config, **options).eval()
        others = [name for name in getattr(config, "architectures", None) or () if str(name).endswith(OTHER_HEADS)]
        if others:  # with tied embeddings nothing of a language model would be missing
            raise ValueError(f"it is a {others[0]}; a reward model is named as reward.model or critic.path")
        loaded: Any = AutoModelForCausalLM.from_pretrained(resolved, revision=revision, **options, **FULL_REPORT)
    model, found = loaded
    check_weights(model, found, path=path)
    for module in model.modules():  # bitsandbytes would repack 4-bit weights for a CPU with AVX512-BF16 when it first
        if hasattr(module, "support_avx512bf16_for_cpu"):  # samples, and products with repacked ones have no gradient
            module.support_avx512bf16_for_cpu = False
    return model.eval()


def embedding_rows(model: PreTrainedModel | PeftModel) -> int:
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | PeftModel, *, path: str, sampled: int = 0
) -> None:
    """Raise ValueError when EOS, a token of ordinary text, or an added token that another model can sample (it has
    `sampled` rows) has no row in the model's embedding.
    """
    rows, added = embedding_rows(model), tokenizer.added_tokens_decoder
    for token, number in tokenizer.get_vocab().items():
        if number >= rows and (number < sampled or number not in added or number == tokenizer.eos_token_id):
            missing = f"there is none for {truncate(token)!r} (token {number}) of the tokenizer"
            raise ValueError(f"the embedding of {path!r} has {rows} rows: {missing}")


def check_ids(sequences: Iterable[list[int]], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Raise ValueError for the first row of data with a token that has no row in the model's embedding."""
    rows = embedding_rows(model)
    for number, ids in enumerate(sequences, start=1):
        if (highest := max(ids, default=0)) >= rows:
            token = truncate(str(tokenizer.convert_ids_to_tokens(highest)))
            raise ValueError(f"row {number} holds {token!r} (token {highest}): the embedding has {rows} rows")


class NoHead(ValueError):
    """Weights of a language model where a classification model was asked for: only the head is missing."""


def check_weights(model: PreTrainedModel, found: dict[str, Any], *, path: str) -> None:
    """Raise ValueError, naming the first weight, unless the file had every weight of `model`, in its shape.

    `found`: the library's loading info, without tied weights and those that a model's class lets be absent. Left-over
    weights are refused where config.json must be of another model: of kinds that the model has in other layers, and
    biases of layers that have none. Other heads and towers may be left over.
    """
    kinds = {re.sub(r"\d+", "*", name) for name in model.state_dict()}
    modules = model.named_modules()
    no_bias = {f"{n}.bias" for n, m in modules if hasattr(m, "weight") and getattr(m, "bias", ...) is None}
    shapes = [(name, [*there], [*own]) for name, there, own in sorted(found["mismatched_keys"])]
    wrong = [f"has {name} in shape {there}, and config.json asks for {own}" for name, there, own in shapes]
    wrong += [f"lacks {name}, which would be random noise" for name in sorted(found["missing_keys"])]
    for name in sorted(found["unexpected_keys"]):
        if re.sub(r"\d+", "*", name) in kinds or name in no_bias:
            wrong.append(f"has {name}, for which config.json has no place")
    if wrong:
        raise ValueError(f"{path!r} {wrong[0]}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""))
