"""LoRA adapters: their files, checked against the base, and their matrices, merged for sampling.

Merging makes private float32 copies: adding B A to the base in place and subtracting it again rounds the base at every
update, and a bfloat16 weight is spaced wider than the first updates are large.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, TaskType, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tinyrl.models.experts import expert_targets, routers
from tinyrl.models.reading import ADAPTER_FILES, reading
from tinyrl.models.towers import decoder_name, tower_names, tower_pattern
from tinyrl.text import first_line

ADAPTER_CONFIG, ADAPTER_FILE = ADAPTER_FILES
POLICY_ADAPTER = "default"  # PEFT's own name for a first adapter: the policy's files then load with plain PEFT
IN_A_MODEL = "base_model.model."  # PEFT's prefix of the names in an adapter's file
ALL_LINEAR = "all-linear"
PEFTS_OWN = "peft"  # of lora.target_parameters: what PEFT adds to all-linear by itself
PEFTS_RENAMING = "peft.utils.transformers_weight_conversion"  # not in versions before 0.19
# Linear layers that PEFT refuses to adapt, by model_type: Mamba's kernels read their weights past the branch.
NOT_ADAPTABLE: dict[str, list[str]] = {
    name: ["out_proj"] for name in ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
}
# Fields by which an adapter is more than LoRA matrices, and their harmless values.
CHANGES_BASE = {
    "modules_to_save": None, "trainable_token_indices": None, "bias": "none", "layer_replication": None,
    "lora_bias": False, "alora_invocation_tokens": None,
}  # fmt: skip


# ---- adapters on a base ----


def lora_config(*, r: int, alpha: float, dropout: float, target_modules: str | list[str]) -> LoraConfig:
    """Configure LoRA (2106.09685): W + (alpha / r) B A on `target_modules`; `all-linear` leaves the head out, and what
    PEFT cannot adapt.
    """
    return LoraConfig(
        r=r,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]  fractions, too
        lora_dropout=dropout,
        target_modules=target_modules,
        task_type=TaskType.CAUSAL_LM,
    )


def with_experts(config: LoraConfig, model: PreTrainedModel, wanted: str | list[str] | None) -> LoraConfig:
    """Put adapters on the `wanted` matrices of experts, as lora.target_parameters names them, and leave other bare
    parameters out; of `all-linear` also routers, whatever they are. Raises ValueError where `wanted` are not in the
    model.
    """
    if wanted == PEFTS_OWN:
        return config
    parameters = None if wanted is None else expert_targets(model, wanted)
    excluded = config.exclude_modules
    if config.target_modules == ALL_LINEAR and (scoring := routers(model)):
        refused = without_refused(config, model).exclude_modules or ()
        excluded = [*refused, *scoring]
    modules = _linear_targets(config, model)
    return replace(config, target_modules=modules, target_parameters=parameters, exclude_modules=excluded)


def _linear_targets(config: LoraConfig, model: PreTrainedModel) -> Any:
    """Return target_modules; of `all-linear` the layers themselves, where PEFT would add experts and routers to it: in
    models whose experts were linear layers in earlier versions of transformers. Linear layers that share a name with
    those experts (`down_proj` of a shared expert) are left out, since PEFT takes every such name for the experts'.
    """
    if config.target_modules != ALL_LINEAR or find_spec(PEFTS_RENAMING) is None:
        return config.target_modules
    converted = copy.deepcopy(config)
    import_module(PEFTS_RENAMING).convert_peft_config_for_transformers(converted, model, None)
    named: Any = converted.target_modules
    return sorted(named) if converted.target_parameters else config.target_modules


def wrap_in_lora(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Add the policy's adapter; a classification model (a critic that starts from a reward model) keeps its head.
    Raises ValueError when target_modules match nothing.
    """
    config = without_refused(config, model)
    if not hasattr(model, "prepare_inputs_for_generation"):
        excluded = ["score", *(config.exclude_modules or ())]
        config = replace(config, task_type="FEATURE_EXTRACTION", exclude_modules=excluded)
    if any(isinstance(module, Conv1D) for module in model.modules()):  # GPT-2's weights are transposed
        config = replace(config, fan_in_fan_out=True)
    check_rank(model, config, what="lora.r")
    try:
        adapted = get_peft_model(model, config, adapter_name=POLICY_ADAPTER)
    except ValueError as error:
        there = ", ".join(sorted({name.rsplit(".", 1)[-1] for name, _ in _linear_layers(model)}))
        targets: Any = config.target_modules
        wanted = targets if isinstance(targets, str) else sorted(targets)
        raise ValueError(f"lora.target_modules={wanted}: {first_line(error)}\nLinear layers: {there}") from error
    assert isinstance(adapted, PeftModel)
    return adapted


def on_language_model(config: LoraConfig, model: PreTrainedModel) -> LoraConfig:
    """Leave the tower and the projector of a vision-language model out, whatever names its target_modules have."""
    config = without_refused(config, model)
    patterns = [tower_pattern(model)]
    given = config.exclude_modules
    if isinstance(given, str):
        patterns.append(f"({given})")
    elif given:  # names, or the ends of names
        patterns.append(rf"(.*\.)?({'|'.join(sorted(map(re.escape, given)))})")
    return replace(config, exclude_modules="|".join(patterns))


def without_refused(config: LoraConfig, model: PreTrainedModel) -> LoraConfig:
    """Leave out of `all-linear` what PEFT refuses to adapt in this model. (Layers that are named are refused by it.)"""
    refused = NOT_ADAPTABLE.get(str(model.config.model_type), [])
    if config.target_modules != ALL_LINEAR or not refused or config.exclude_modules:
        return config
    return replace(config, exclude_modules=refused)


def base_of(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the library's model inside PEFT's, if it has adapters."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel)
    return base


def config_of(model: PeftModel, adapter: str) -> LoraConfig:
    """Return the configuration of an adapter."""
    config = model.peft_config[adapter]
    assert isinstance(config, LoraConfig)
    return config


def check_rank(model: PreTrainedModel, config: LoraConfig, *, what: str) -> None:
    """Raise ValueError for a rank above that of every layer, which only costs memory."""
    most = max((min(layer.get_parameter("weight").shape) for _, layer in _linear_layers(model)), default=0)
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    if rank > most > 0:
        raise ValueError(f"{what}={rank}: the layers of this model have a rank of at most {most}")


def _linear_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]


def load_start_adapter(
    model: PreTrainedModel, path: str, *, dropout: float = 0.0, with_images: bool = False
) -> PeftModel:
    """Continue from a LoRA adapter (plain PEFT files). with_images: the base is a vision-language model, whose tower
    has no adapters. Raises ValueError when it does not fit the base.
    """
    config = read_lora_config(path, model)
    if with_images:
        config = on_language_model(config, model)
    config.lora_dropout = dropout
    config.base_model_name_or_path = None  # the library warns when the same base stands elsewhere
    with reading(f"model.adapter={path}: {ADAPTER_CONFIG} does not fit this base model"):
        wrapped: Any = get_peft_model(model, config, adapter_name=POLICY_ADAPTER)
    load_adapter_weights(wrapped, POLICY_ADAPTER, Path(path).expanduser() / ADAPTER_FILE)
    return wrapped


# ---- files ----


def read_lora_config(path: str, model: PreTrainedModel) -> LoraConfig:
    """Read the configuration of the adapter at `path`, to be put on `model`. Raises ValueError where files are missing
    or damaged, and where the adapter is more than LoRA matrices: whole modules, token rows, biases and a changed base
    would stay when adapters are switched off, or could not be merged.
    """
    folder = Path(path).expanduser()
    for name in ADAPTER_FILES:
        if not (folder / name).is_file():
            raise ValueError(f"adapter {path!r}: {name} is missing (a folder with {' and '.join(ADAPTER_FILES)})")
    with reading(f"adapter {path!r} ({ADAPTER_CONFIG})", folder):
        values = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if values.get("peft_type") != "LORA":
            raise ValueError(f"it has peft_type={values.get('peft_type')}; tinyrl reads LORA")
        for key, harmless in CHANGES_BASE.items():
            if values.get(key) not in (harmless, None, []):
                raise ValueError(f"it has {key}={values[key]}; tinyrl needs one of LoRA matrices only")
        drawn = values.get("init_lora_weights", True)
        if isinstance(drawn, str) and drawn not in ("gaussian", "orthogonal", "eva"):
            raise ValueError(f"it has init_lora_weights={drawn}, which changes the base")
        config: Any = LoraConfig.from_pretrained(str(folder))
        config.init_lora_weights = True  # the weights are read next; other ways to draw them need data
        if not isinstance(config.target_modules, str):
            config.target_modules = {own_name(name, model) for name in config.target_modules or ()}
        excluded = config.exclude_modules
        if isinstance(excluded, str) and not any(re.fullmatch(excluded, name) for name, _ in model.named_modules()):
            config.exclude_modules = None  # of a tower, and `model` is the language model alone
        config.target_parameters = [own_name(name, model) for name in config.target_parameters or ()] or None
        config.rank_pattern = {own_name(name, model): rank for name, rank in (config.rank_pattern or {}).items()}
        config.alpha_pattern = {own_name(name, model): alpha for name, alpha in (config.alpha_pattern or {}).items()}
        check_rank(model, config, what="r")
    return config


def own_name(name: str, model: PreTrainedModel) -> str:
    """Return the name in `model` of a module that an adapter names, where it was made on the whole of a vision-language
    model (`model.language_model.layers...`) and `model` is its language model alone (`model.layers...`), or the other
    way round. Other names are returned as they are.
    """
    decoder = decoder_name(model)
    parts = {child for child, _ in model.get_submodule(decoder).named_children()}
    backbone = model.base_model_prefix
    inside, *rest = name.removeprefix(f"{backbone}.").split(".")
    if not name.startswith(f"{backbone}."):
        return name
    if decoder == backbone and inside not in parts and rest[:1] and rest[0] in parts:
        return ".".join([decoder, *rest])
    if decoder != backbone and inside in parts:
        return ".".join([decoder, inside, *rest])
    return name


def load_adapter_weights(model: PeftModel, name: str, file: Path) -> None:
    """Read the weights of an adapter that the model has already. Raises ValueError unless the file has exactly these:
    the library only warns, and leaves missing ones at their random start.
    """
    base = base_of(model)
    tensors = {
        IN_A_MODEL + own_name(key.removeprefix(IN_A_MODEL), base): tensor for key, tensor in read_finite(file).items()
    }
    own = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    tensors = _without_tower(tensors, own, base, file=file)
    for key, tensor in tensors.items():
        if key in own and own[key].shape != tensor.shape:
            there = f"{key} has the shape {tuple(tensor.shape)} there"
            raise ValueError(f"{file} does not fit this base model: {there}, and {tuple(own[key].shape)} here")
    with reading(f"{file} does not fit this base model"):
        result = set_peft_model_state_dict(model, tensors, adapter_name=name)
    missing = [key for key in result.missing_keys if f".{name}." in f"{key}." and ".lora_" in key]
    if missing or result.unexpected_keys:
        raise ValueError(f"{file} does not fit: missing {missing[:1]}, unexpected {result.unexpected_keys[:1]}")


def _without_tower(
    tensors: dict[str, Tensor], own: dict[str, Tensor], base: PreTrainedModel, *, file: Path
) -> dict[str, Tensor]:
    """Leave out the weights on a tower that is frozen here where they change nothing, as after training on text.
    Raises ValueError where they do.
    """
    towers = tuple(f"{IN_A_MODEL}{name}." for name in tower_names(base))
    of_tower = [key for key in tensors if key not in own and key.startswith(towers)]
    changed = [key for key in of_tower if key.endswith(".lora_B.weight") and tensors[key].any()]
    if changed:
        raise ValueError(f"{file} adapts the vision tower ({changed[0]}), which is frozen here: train without it")
    return {key: tensor for key, tensor in tensors.items() if key not in of_tower}


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read a safetensors file. Raises ValueError, naming the file, where it cannot be read."""
    with reading(f"cannot read {str(file)!r}"):
        return load_file(file)


def read_finite(file: Path) -> dict[str, Tensor]:
    """Read a small safetensors file (an adapter, a head). Raises ValueError for numbers that are not finite."""
    tensors = read_tensors(file)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ValueError(f"{file}: {name} is not of finite floating-point numbers")
    return tensors


def save_adapter(model: PeftModel, name: str, folder: Path) -> None:
    """Save one adapter as plain PEFT: adapter_model.safetensors and adapter_config.json."""
    folder.mkdir(exist_ok=True)
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    tensors = {key: tensor.detach().contiguous().cpu() for key, tensor in state.items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
    save_adapter_config(model, name, folder)


def save_adapter_config(model: PeftModel, name: str, folder: Path) -> None:
    """Save adapter_config.json of one adapter."""
    folder.mkdir(exist_ok=True)
    config: Any = copy.copy(model.peft_config[name])
    config.inference_mode = True  # plain PEFT then loads it ready to use
    for targets in ("target_modules", "target_parameters"):
        if isinstance(getattr(config, targets), set):
            setattr(config, targets, sorted(getattr(config, targets)))  # the order of a set changes with the process
    config.save_pretrained(str(folder))


# ---- matrices ----


def is_plain_lora(layer: LoraLayer) -> bool:
    """Return whether W + (alpha / r) B A is all that the layer's adapters compute (DoRA scales columns)."""
    return not layer.lora_variant


def merged_weight(module: nn.Module, adapter: str | None) -> tuple[Tensor, Tensor | None]:
    """Return (weight, bias) under `adapter`: W + (alpha / r) B A, added in float32; W itself where it has no branch."""
    base = module.get_base_layer() if isinstance(module, LoraLayer) else module
    weight: Tensor = base.weight  # pyright: ignore[reportAssignmentType]
    if adapter is not None and isinstance(module, LoraLayer) and adapter in module.lora_A:
        weight = weight.float() + module.get_delta_weight(adapter)  # pyright: ignore
    return weight, base.bias  # pyright: ignore[reportReturnType]


def dense_weight(weight: Tensor) -> Tensor:
    """Return W, dequantised where it is in 4 bits."""
    if (state := getattr(weight, "quant_state", None)) is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit  # pyright: ignore[reportMissingImports]

    return dequantize_4bit(weight.data, state)


def lora_rank(module: nn.Module) -> int:
    """Return the largest rank of the adapters on a layer; 0 where there is none."""
    return max(module.r.values(), default=0) if isinstance(module, LoraLayer) else 0


def lora_matrices(module: nn.Module, adapter: str | None) -> tuple[Tensor, Tensor] | None:
    """Return A (r, in) and (alpha / r) B (out, r) of a linear layer, in float32; None where it has no branch."""
    if adapter is None or not isinstance(module, LoraLayer) or adapter not in module.lora_A:
        return None
    a = module.lora_A[adapter].get_parameter("weight")
    b = module.lora_B[adapter].get_parameter("weight")
    return a.detach(), b.detach() * module.scaling[adapter]
