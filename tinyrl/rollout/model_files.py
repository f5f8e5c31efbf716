"""Refuse settings that the files of a model's folder tell to be impossible, before torch is imported: its config.json,
and the names and shapes of its weights. Of a hub name nothing is known yet; loading refuses the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyrl.config.refusal import Refusal
from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.models.reading import OTHER_HEADS, missing_files
from tinyrl.runs.records import json_object
from tinyrl.runs.resolve import config_json
from tinyrl.text import did_you_mean, join_truncated, truncate

LARGEST_HEADER = 100_000_000  # bytes of a safetensors file's, as the library has it
NAME_EXPERTS = ("expert", "moe", "mixtral", "deepseek")  # parts of keys, or of the type, of models that have some
MAY_BE_TIED = ("lm_head", "embed_out", "output", "score")  # heads, which no file need have
BITSANDBYTES = "bitsandbytes"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Kinds of models (model_type) whose files name each layer by the last part of its name in the model. transformers makes
# other layers of some others' (gate_proj and up_proj of one matrix), which only loading tells.
STORED_BY_LAYER = (
    "cohere", "cohere2", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "gpt2",
    "gpt_neox", "granite", "lfm2", "llama", "mistral", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen2_5_vl",
    "qwen3", "qwen3_5", "qwen3_5_text", "qwen3_vl", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip


def model_refusals(config: Config) -> Iterator[Refusal]:
    """Yield settings that do not go with the model at model.path, or with the teacher."""
    facts = config_json(config.model.path)
    if not facts:
        return
    yield from _of_kind(config, facts)
    if config.lora.enabled and config.model.adapter is None:
        yield from _of_adapters(config, facts)
    yield from _of_teacher(config, facts)


def _of_kind(config: Config, facts: dict[str, Any]) -> Iterator[Refusal]:
    """Yield what the files themselves exclude: weights that are missing, a classifier, a model without a vision tower,
    one that is quantised.
    """
    model = config.model
    if not model.random_init and (missing := missing_weights(model.path)):
        yield Refusal(("model.path",), f"model.path={model.path}: {missing}, which {INDEX} names; download it again")
    architectures = facts.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    heads = [str(name) for name in named if str(name).endswith(OTHER_HEADS)]
    if heads and not model.random_init:
        yield Refusal(
            ("model.path",),
            f"model.path={model.path} is a {truncate(heads[0])} (architectures in its config.json); a reward model is "
            "named as reward.model or critic.path",
        )
    if model.with_images and "vision_config" not in facts:
        yield Refusal(
            ("model.with_images", "model.path"),
            f"model.with_images=true, and model.path={model.path} has no vision tower (no vision_config in its "
            "config.json); null loads it where rows have images",
        )
    quantization = facts.get("quantization_config")
    quantized_by = quantization.get("quant_method", BITSANDBYTES) if isinstance(quantization, dict) else BITSANDBYTES
    if model.quantization is not None and quantized_by != BITSANDBYTES:
        yield Refusal(
            ("model.quantization", "model.path"),
            f"model.quantization={model.quantization}, and model.path={model.path} is quantised already "
            f"(quant_method={truncate(str(quantized_by))} in its config.json); name the model that it was made of",
        )


def _of_adapters(config: Config, facts: dict[str, Any]) -> Iterator[Refusal]:
    """Yield adapters on what the model does not have, and ranks above those of its layers."""
    lora = config.lora
    path = config.model.path
    if lora.target_parameters not in (None, "peft") and not _may_have_experts(facts):
        shown = json.dumps(lora.target_parameters).strip('"')
        yield Refusal(
            ("lora.target_parameters", "model.path"),
            f"lora.target_parameters={shown}: model.path={path} has no experts (none in its config.json); null adapts "
            "linear layers alone",
        )
    weights = None if config.model.random_init or not _is_stored_by_layer(facts) else Weights.of(path)
    if weights is None:
        return
    if isinstance(lora.target_modules, list) and not any(map(weights.has, lora.target_modules)):
        layers = weights.layers
        shown = json.dumps(lora.target_modules)
        yield Refusal(
            ("lora.target_modules", "model.path"),
            f"lora.target_modules={shown}: model.path={path} has no such layer."
            f"{did_you_mean(lora.target_modules[0], layers)} Layers: {join_truncated(layers)}",
        )
    if lora.r > weights.rank:
        yield Refusal(
            ("lora.r", "model.path"), f"lora.r={lora.r}: the layers of this model have a rank of at most {weights.rank}"
        )


def _of_teacher(config: Config, facts: dict[str, Any]) -> Iterator[Refusal]:
    """Yield a teacher.top_k of more tokens than there are."""
    teacher = config.teacher
    if not config.learns_from_teacher or teacher.top_k is None:
        return
    theirs = config_json(str(teacher.path)) if teacher.kind == "model" else {}
    sizes = [size for size in (_vocabulary(facts), _vocabulary(theirs)) if size is not None]
    if sizes and teacher.top_k > min(sizes):
        yield Refusal(
            ("teacher.top_k", "teacher.path"),
            f"teacher.top_k={teacher.top_k} is more than the {min(sizes)} tokens of the vocabulary; null takes all",
        )


def _text_facts(facts: dict[str, Any]) -> dict[str, Any]:
    of_text = facts.get("text_config")
    return of_text if isinstance(of_text, dict) else facts


def _vocabulary(facts: dict[str, Any]) -> int | None:
    size = _text_facts(facts).get("vocab_size")
    return size if type(size) is int and size > 0 else None


def _is_stored_by_layer(facts: dict[str, Any]) -> bool:
    """Return whether the layers of the model are those of its files, and no others that loading makes of them."""
    is_converted = "quantization_config" in facts or "auto_map" in facts or _may_have_experts(facts)
    return facts.get("model_type") in STORED_BY_LAYER and not is_converted


def _may_have_experts(facts: dict[str, Any]) -> bool:
    """Return whether a config.json says anything about experts."""
    kinds = (str(facts.get("model_type")), str(_text_facts(facts).get("model_type")))
    if any(part in kind for kind in kinds for part in NAME_EXPERTS):
        return True
    return "auto_map" in facts or _names_experts(facts)


def _names_experts(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return any(
        (bool(inner) and any(part in str(key).lower() for part in NAME_EXPERTS)) or _names_experts(inner)
        for key, inner in value.items()
    )


def missing_weights(path: str) -> str:
    """Say which file of a folder's weights is missing; "" where none is, or where an index is not as it should be,
    which loading will refuse.
    """
    folder = starter_path(path) or Path(path)
    if (folder / WEIGHTS).is_file():  # which is read before an index
        return ""
    try:
        named = json_object(folder / INDEX).get("weight_map")
    except (OSError, ValueError):
        return ""
    files = named.values() if isinstance(named, dict) else ()
    return missing_files(folder, sorted({file for file in files if isinstance(file, str)}))


@dataclass(frozen=True)
class Weights:
    """The last parts of the names of the modules that files have a weight of, and the largest rank of a matrix."""

    ends: frozenset[str]
    rank: int

    @classmethod
    def of(cls, path: str) -> Weights | None:
        """Read the headers of a folder's safetensors files; None where there are none that can be read."""
        ends = set[str]()
        ranks = list[int]()
        for file in sorted((starter_path(path) or Path(path)).glob("*.safetensors")):
            header = _header(file)
            if header is None:
                return None
            for name, tensor in header.items():
                *_, end, part = ("", *name.split("."))
                shape = tensor.get("shape") if isinstance(tensor, dict) else None
                if part != "weight" or not isinstance(shape, list):
                    continue
                if len(shape) > 1:  # a convolution is adapted too
                    ends.add(end)
                if len(shape) == 2 and all(isinstance(size, int) for size in shape):
                    ranks.append(min(shape))
        return cls(frozenset(ends), max(ranks)) if ranks else None

    @property
    def layers(self) -> list[str]:
        """Return the ends without those of embeddings."""
        return sorted(end for end in self.ends if "embed" not in end)

    def has(self, name: str) -> bool:
        """Return whether a name of lora.target_modules may be of a layer: what comes before its last part may have
        another name in the model (`model.language_model.layers` of `language_model.model.layers`).
        """
        end = name.rpartition(".")[2]
        return end in self.ends or end in MAY_BE_TIED


def _header(file: Path) -> dict[str, Any] | None:
    """Read the names and shapes of a safetensors file; None of a damaged one, which loading will refuse."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)) if length <= LARGEST_HEADER else None
    except (OSError, ValueError, RecursionError):
        return None
    return header if isinstance(header, dict) else None
