"""Loading of causal language models, tokenizers and LoRA adapters from safetensors.

Weights are only ever read from safetensors files: `.bin`, `.pt` and `.pkl` are refused, because unpickling runs code.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.pytorch_utils import Conv1D

from tinyrl.starter import starter_path
from tinyrl.text import did_you_mean, first_line, last_line

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
POLICY_ADAPTER = "default"  # PEFT's own name for a first adapter: the policy's files then load with plain PEFT


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


def check_folder(folder: Path) -> None:
    """Raise ValueError unless the folder may hold a whole model: config.json, and no weights but safetensors."""
    names = {p.name for p in folder.iterdir()}
    if "config.json" not in names and ADAPTER_CONFIG in names:
        raise ValueError(
            f"{folder} is an adapter, not a whole model: name its base as model.path and the adapter as model.adapter"
        )
    if "config.json" not in names:
        raise ValueError(
            f"{folder} is not a model folder: it has no config.json (it has: "
            f"{', '.join(sorted(names)[:8]) or 'nothing'})"
        )
    pickled = sorted(
        n for n in names if n.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")) and n != "training_args.bin"
    )
    if pickled and not any(n.endswith(".safetensors") for n in names):
        raise ValueError(
            f"{folder} has only pickled weights ({pickled[0]}), which can execute code when read; "
            "convert them to safetensors"
        )


def load_tokenizer(path: str, *, trust_remote_code: bool = False, needs_eos: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; one without a pad token pads with EOS (masks never look at token ids, so that is
    safe). Raises ValueError when it cannot be read, or has no EOS where one is needed (to end a completion).
    """
    resolved = resolve_model_path(path)
    try:
        # A folder that names no architecture's tokenizer means its tokenizer.json as it is; beside some architectures
        # (Qwen2) the library would put the vocabulary into that architecture's own tokenizer all the same.
        named = get_tokenizer_config(resolved).get("tokenizer_class")
        kind = PreTrainedTokenizerFast if named in PLAIN_TOKENIZERS else AutoTokenizer
        tokenizer = kind.from_pretrained(resolved, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"cannot load a tokenizer from {path!r}: {first_line(error)}") from error
    if tokenizer.eos_token_id is None and needs_eos:
        raise ValueError(f"the tokenizer of {path!r} has no EOS token, so a completion could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    attention: str = "sdpa",
    quantization: str | None = None,
    random_init: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal LM with every dropout off, in `dtype`. Raises ValueError when it cannot be read.

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
    if quantization == "4bit":
        options["quantization_config"] = four_bit(dtype)
    try:
        if random_init:
            config = AutoConfig.from_pretrained(resolved, trust_remote_code=trust_remote_code)
            model = AutoModelForCausalLM.from_config(config, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(resolved, use_safetensors=True, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"cannot load a causal language model from {path!r}: {first_line(error)}") from error
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


def four_bit(dtype: torch.dtype) -> Any:
    """bitsandbytes' NF4 with double quantisation (QLoRA, 2305.14314)."""
    try:
        import bitsandbytes  # noqa: F401  # pyright: ignore[reportMissingImports]
        from transformers import BitsAndBytesConfig
    except ImportError:
        raise ValueError("model.quantization=4bit needs bitsandbytes: pip install 'tinyrl[quantization]'") from None
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def lora_config(*, r: int, alpha: float, dropout: float, target_modules: str | list[str]) -> LoraConfig:
    """LoRA (2106.09685): W + (alpha / r) B A on every module in `target_modules`; `all-linear` leaves the head out."""
    return LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=target_modules, task_type="CAUSAL_LM")  # pyright: ignore[reportArgumentType]


def wrap_in_lora(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Add the policy's adapter. Raises ValueError, with the names there are, when target_modules match nothing.

    A classification model (a critic that starts from a reward model) is wrapped too; its head stays as it is.
    """
    if not hasattr(model, "prepare_inputs_for_generation"):
        config = replace(config, task_type="FEATURE_EXTRACTION", exclude_modules=["score"])
    if any(isinstance(module, Conv1D) for module in model.modules()):  # GPT-2's weights are transposed
        config = replace(config, fan_in_fan_out=True)
    try:
        return get_peft_model(model, config, adapter_name=POLICY_ADAPTER)  # pyright: ignore[reportReturnType]
    except ValueError as error:
        linear = sorted(
            {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D)}
        )
        wanted = (
            config.target_modules if isinstance(config.target_modules, str) else sorted(config.target_modules or ())
        )
        raise ValueError(
            f"lora.target_modules={wanted}: {first_line(error)}\nLinear layers there are: {', '.join(linear)}"
        ) from error


def load_start_adapter(model: PreTrainedModel, path: str) -> PeftModel:
    """Continue from a LoRA adapter that exists (plain PEFT files). Raises ValueError when it does not fit the base."""
    config = read_lora_config(path)
    config.base_model_name_or_path = None  # the library warns when the same base stands elsewhere
    try:
        wrapped = get_peft_model(model, config, adapter_name=POLICY_ADAPTER)
    except ValueError as error:
        raise ValueError(f"model.adapter={path}: does not fit this base model: {first_line(error)}") from error
    load_adapter_weights(wrapped, POLICY_ADAPTER, check_folder_adapter(path) / ADAPTER_FILE)  # pyright: ignore[reportArgumentType]
    return wrapped  # pyright: ignore[reportReturnType]


def load_adapter_weights(model: PeftModel, name: str, file: Path) -> None:
    """Read the weights of adapter `name`, which exists already. Raises ValueError unless the file has every one of them
    and nothing else: the library only warns, and leaves missing ones at their random start.
    """
    try:
        result = set_peft_model_state_dict(model, load_file(file), adapter_name=name)
    except RuntimeError as error:
        raise ValueError(f"{file} does not fit this base model: {last_line(error)}") from error
    missing = [key for key in result.missing_keys if f".{name}." in key and ".lora_" in key]
    for what, keys in (("has weights this model has no place for", result.unexpected_keys), ("lacks weights", missing)):
        if keys:
            raise ValueError(f"{file} {what}, such as {keys[0]}")


def read_lora_config(path: str) -> LoraConfig:
    """The configuration of the adapter at `path`, ready to be put on a base and to be given its weights."""
    config = LoraConfig.from_pretrained(str(check_folder_adapter(path)))
    assert isinstance(config, LoraConfig)
    config.init_lora_weights = True  # the weights are read next; other ways to draw them need data
    return config


def check_folder_adapter(path: str) -> Path:
    """The folder of a LoRA adapter. Raises ValueError where files are missing, or where the adapter is more than LoRA
    matrices: whole modules, token rows, biases and a changed base would stay when adapters are switched off.
    """
    folder = Path(path).expanduser()
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        if not (folder / name).is_file():
            raise ValueError(
                f"adapter {path!r}: {name} is missing (an adapter is a folder with {ADAPTER_CONFIG} and {ADAPTER_FILE})"
            )
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"adapter {path!r}: {ADAPTER_CONFIG} is not JSON: {first_line(error)}") from error
    if config.get("peft_type") != "LORA":
        raise ValueError(f"adapter {path!r} is of type {config.get('peft_type')}; tinyrl knows LORA")
    for key, harmless in (("modules_to_save", None), ("trainable_token_indices", None), ("bias", "none")):
        if config.get(key) not in (harmless, None, []):
            raise ValueError(f"adapter {path!r} has {key}={config[key]}; tinyrl needs one of LoRA matrices only")
    drawn = config.get("init_lora_weights", True)
    if isinstance(drawn, str) and drawn not in ("gaussian", "orthogonal", "eva"):
        raise ValueError(
            f"adapter {path!r} has init_lora_weights={drawn}, which changes the base; convert it to plain LoRA"
        )
    return folder
