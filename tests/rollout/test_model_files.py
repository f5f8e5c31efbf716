"""Settings that the files of a model's folder tell to be impossible are refused before it is loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.pytorch_utils import Conv1D

from tests.tiny_models import TinyModels
from tinyrl.rollout.model_files import STORED_BY_LAYER, Weights, model_refusals
from tinyrl.runs.resolve import config_of

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 50}
SIZES = {"model.embed_tokens.weight": (50, 32), "model.layers.0.self_attn.q_proj.weight": (32, 32),
         "model.layers.0.mlp.down_proj.weight": (32, 64), "model.layers.0.conv1d.weight": (64, 1, 4)}  # fmt: skip
DISTILL = {"method": "distill", "teacher": {"path": "starter-teacher"}}


def model(folder: Path, config: dict[str, Any]) -> str:
    """Write the files of a model as they are read here."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.zeros(shape, np.float32) for name, shape in SIZES.items()}, folder / "model.safetensors")
    return str(folder)


def refused(folder: Path, config: dict[str, Any], sections: dict[str, Any]) -> list[str]:
    """Return the first setting of each refusal."""
    sections = {"method": "grpo", **sections, "model": {"path": model(folder, config), **sections.get("model", {})}}
    return [refusal.settings[0] for refusal in model_refusals(config_of(sections))]


@pytest.mark.parametrize(
    ("config", "sections", "setting"),
    [
        ({}, {"lora": {"target_parameters": "experts"}}, "lora.target_parameters"),
        ({}, {"lora": {"target_parameters": ["mlp.experts.down_proj"]}}, "lora.target_parameters"),
        ({"num_experts": None}, {"lora": {"target_parameters": "experts"}}, "lora.target_parameters"),
        ({}, {"lora": {"target_modules": ["q_prj", "v_prj"]}}, "lora.target_modules"),
        ({}, {"lora": {"r": 33}}, "lora.r"),
        ({}, {"model": {"with_images": True}}, "model.with_images"),
        ({"quantization_config": {"quant_method": "gptq"}}, {"model": {"quantization": "4bit"}}, "model.quantization"),
        ({"architectures": ["LlamaForSequenceClassification"]}, {}, "model.path"),
        ({}, {**DISTILL, "teacher": {"path": "starter-teacher", "top_k": 51}}, "teacher.top_k"),
        ({"text_config": {"vocab_size": 40}}, {**DISTILL, "teacher": {"path": "starter-teacher", "top_k": 41}},
         "teacher.top_k"),
    ],
)  # fmt: skip
def test_what_the_files_exclude_is_refused(
    tmp_path: Path, config: dict[str, Any], sections: dict[str, Any], setting: str
) -> None:
    assert refused(tmp_path, {**LLAMA, **config}, sections) == [setting]


@pytest.mark.parametrize(
    ("config", "sections"),
    [
        ({}, {"lora": {"r": 32}}),
        ({}, {"lora": {"target_modules": ["q_prj", "q_proj"]}}),  # PEFT needs one of them
        ({}, {"lora": {"target_modules": ["0.mlp.down_proj"]}}),
        ({}, {"lora": {"target_modules": ["model.language_model.layers.0.mlp.down_proj"]}}),
        ({"model_type": "hrm_text"}, {"lora": {"target_modules": ["v_proj"]}}),  # whose layers loading renames
        ({}, {"lora": {"target_modules": ["model.language_model.layers.0.self_attn.q_proj"]}}),  # as it is loaded
        ({}, {"lora": {"target_modules": ["conv1d"]}}),
        ({}, {"lora": {"target_modules": ["lm_head"]}}),  # tied to the embedding, it is in no file
        ({}, {"lora": {"target_parameters": "peft"}}),
        ({"model_type": "hrm_text"}, {"lora": {"target_modules": ["x"], "r": 33}}),  # loading splits its matrices
        ({}, {"lora": {"target_modules": ["x"], "r": 33}, "model": {"random_init": True}}),  # not made of the files
        ({"num_experts": 4}, {"lora": {"target_parameters": "experts", "target_modules": ["gate_up_proj"]}}),
        ({"model_type": "mixtral"}, {"lora": {"target_parameters": "experts"}}),  # without its default in the file
        ({"text_config": {"num_local_experts": 4}}, {"lora": {"target_parameters": "experts"}}),
        ({"auto_map": {"AutoModel": "m.py"}}, {"lora": {"target_parameters": "experts", "target_modules": ["x"]}}),
        ({"vision_config": {}}, {"model": {"with_images": True}}),
        ({"quantization_config": {"load_in_4bit": True}}, {"model": {"quantization": "4bit"}}),
        ({"quantization_config": {"quant_method": "gptq"}}, {}),
        ({"architectures": ["LlamaForSequenceClassification"]}, {"model": {"random_init": True}}),
        ({"architectures": 5}, {}),  # loading says what is wrong with it
        ({}, {**DISTILL, "teacher": {"path": "starter-teacher", "top_k": 50}}),
    ],
)
def test_what_is_near_it_is_not(tmp_path: Path, config: dict[str, Any], sections: dict[str, Any]) -> None:
    assert refused(tmp_path, {**LLAMA, **config}, sections) == []


def test_of_a_hub_name_and_of_damaged_files_nothing_is_known(tmp_path: Path) -> None:
    values = {"method": "grpo", "lora": {"target_modules": ["x"], "r": 500}}
    assert [*model_refusals(config_of({**values, "model": {"path": "owner/name"}}))] == []
    model(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert [*model_refusals(config_of({**values, "model": {"path": str(tmp_path)}}))] == []


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3"])
def test_every_layer_that_is_loaded_is_in_the_headers(tiny: TinyModels, kind: str) -> None:
    folder = tiny(kind)
    weights = Weights.of(str(folder))
    assert weights is not None
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    layers = [(name, module) for name, module in loaded.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    assert all(weights.has(name) for name, _ in layers)
    assert weights.rank >= max(min(module.weight.shape) for _, module in layers)


@pytest.mark.parametrize("kind", STORED_BY_LAYER)
def test_of_these_kinds_the_library_renames_no_layer(kind: str) -> None:
    renamed = [each.source_patterns for each in get_checkpoint_conversion_mapping(kind) or ()]
    assert all(pattern.startswith("^") for patterns in renamed for pattern in patterns)  # parts before the layers


def test_of_other_kinds_it_renames_some() -> None:
    assert get_checkpoint_conversion_mapping("hrm_text")
    assert "hrm_text" not in STORED_BY_LAYER


@pytest.mark.parametrize(("there", "random_init", "found"), [
    (["a"], False, ["model.path"]), (["a", "b"], False, []), (["a"], True, []), (["a", "model"], False, []),
])  # fmt: skip
def test_a_file_that_the_index_names_has_to_be_there(
    tmp_path: Path, there: list[str], random_init: bool, found: list[str]
) -> None:
    path = model(tmp_path, LLAMA)
    weights = (tmp_path / "model.safetensors").rename(tmp_path / "all")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in there:
        shutil.copy(weights, tmp_path / f"{name}.safetensors")
    config = config_of({"method": "grpo", "model": {"path": path, "random_init": random_init}})
    assert [refusal.settings[0] for refusal in model_refusals(config)] == found
