"""Loading of causal language models and tokenizers from safetensors, and LoRA adapters put on them.

Weights are only ever read from safetensors files: `.bin`, `.pt` and `.pkl` are refused, because unpickling runs code.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
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
from transformers.pytorch_utils import Conv1D

from tinyrl.models.lora import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    check_folder_adapter,
    check_rank,
    linear_layers,
    load_adapter_weights,
    read_lora_config,
)
from tinyrl.models.reading import MODEL_FILES, TOKENIZER_FILES, reading
from tinyrl.models.weight_checks import check_language_model, check_size, check_weights
from tinyrl.starter import starter_path
from tinyrl.text import did_you_mean, first_line

OF_A_TOKENIZER = "tokenizer_config.json or tokenizer.json"
PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
# The library then says which weights are missing or of another shape, instead of an error that names none of them.
FULL_REPORT: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
HUB_DEFAULT = "main"
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


def local_folder(resolved: str) -> Path | None:
    """The folder that `resolve_model_path` found; None for a hub name."""
    folder = Path(resolved)
    return folder if folder.is_dir() else None


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


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False, needs_eos: bool = True
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; one without a pad token pads with EOS (masks never look at token ids, so that is
    safe). Raises ValueError when it cannot be read, or has no EOS where one is needed (to end a completion).
    """
    resolved = resolve_model_path(path)
    with reading(
        f"cannot load a tokenizer from {path!r}", folder=resolved, files=TOKENIZER_FILES, otherwise=OF_A_TOKENIZER
    ):
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


def load_model_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """config.json of a model. Raises ValueError when it cannot be read."""
    resolved = resolve_model_path(path)
    with reading(
        f"cannot load a model from {path!r}", folder=resolved, files=("config.json",), otherwise="config.json"
    ):
        return AutoConfig.from_pretrained(
            resolved, revision=revision or HUB_DEFAULT, trust_remote_code=trust_remote_code
        )


def saved_dtype(path: str, *, revision: str | None = None) -> torch.dtype:
    """What config.json says the weights were saved in; float32 where it says nothing, as the library takes it."""
    described, _ = PretrainedConfig.get_config_dict(resolve_model_path(path), revision=revision or HUB_DEFAULT)
    own = [described, described.get("text_config") or {}]
    named = next((d[key] for d in own for key in ("dtype", "torch_dtype") if d.get(key)), "float32")
    dtype = getattr(torch, str(named).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


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
    if quantization == "4bit":
        options["quantization_config"] = four_bit(dtype)
    with reading(
        f"cannot load a causal language model from {path!r}",
        folder=resolved,
        files=MODEL_FILES,
        otherwise="config.json",
    ):
        config = AutoConfig.from_pretrained(
            resolved, revision=revision or HUB_DEFAULT, trust_remote_code=trust_remote_code
        )
        check_size(config, folder=None if random_init else local_folder(resolved))
        loaded: Any
        if random_init:
            loaded = AutoModelForCausalLM.from_config(config, **options), None
        else:
            check_language_model(config)
            loaded = AutoModelForCausalLM.from_pretrained(
                resolved, revision=revision or HUB_DEFAULT, use_safetensors=True, **options, **FULL_REPORT
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
    check_rank(model, config, what="lora.r")
    try:
        return get_peft_model(model, config, adapter_name=POLICY_ADAPTER)  # pyright: ignore[reportReturnType]
    except ValueError as error:
        linear = sorted({n.rsplit(".", 1)[-1] for n in linear_layers(model)})
        wanted = (
            config.target_modules if isinstance(config.target_modules, str) else sorted(config.target_modules or ())
        )
        raise ValueError(
            f"lora.target_modules={wanted}: {first_line(error)}\nLinear layers there are: {', '.join(linear)}"
        ) from error


def load_start_adapter(model: PreTrainedModel, path: str) -> PeftModel:
    """Continue from a LoRA adapter that exists (plain PEFT files). Raises ValueError when it does not fit the base."""
    config, file = read_lora_config(path, model), check_folder_adapter(path) / ADAPTER_FILE
    config.base_model_name_or_path = None  # the library warns when the same base stands elsewhere
    with reading(f"model.adapter={path}: does not fit this base model", otherwise=ADAPTER_CONFIG):
        wrapped = get_peft_model(model, config, adapter_name=POLICY_ADAPTER)
    if model.device.type != "meta":
        load_adapter_weights(wrapped, POLICY_ADAPTER, file)  # pyright: ignore[reportArgumentType]
    return wrapped  # pyright: ignore[reportReturnType]
