"""Vision-language models: what trains in them, what of them is saved, and whose adapters they take."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, MllamaConfig

from tests.images import image_file
from tests.models.building import lora, stir
from tests.policies import policy_of
from tests.tiny_models import TinyModels
from tests.tiny_vision import FAMILIES, tiny_vision
from tinyrl.data.image_files import ImageFiles
from tinyrl.generation import engines
from tinyrl.generation.engines import select_engine
from tinyrl.generation.request import Request
from tinyrl.models.build import build_policy
from tinyrl.models.device import Device
from tinyrl.models.loading import load_image_text_model, load_tokenizer
from tinyrl.models.lora import on_language_model, save_adapter, wrap_in_lora
from tinyrl.models.memory import STATE_BYTES, bytes_by_role, checkpoint_bytes
from tinyrl.models.policy import Policy
from tinyrl.models.policy_files import save_policy
from tinyrl.models.towers import language_parameters, tower_names, towers_of
from tinyrl.runs.resolve import config_of

IDS = torch.arange(2, 30).unsqueeze(0)
FULL: dict[str, Any] = {"lora": {"enabled": False}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("vision")
    return cache(lambda family: tiny_vision(family, root / family))


def policy_at(
    folder: Path,
    *,
    method: str = "grpo",
    dtype: torch.dtype = torch.float32,
    with_images: bool | None = True,
    **sections: Any,
) -> Policy:
    """The policy of a run on the model in a folder."""
    model = {"path": str(folder), "with_images": with_images} | sections.pop("model", {})
    config = config_of({"method": method, "reference": {"kind": "none"}, "model": model, **sections})
    tokenizer = load_tokenizer(str(folder))
    return build_policy(config, tokenizer=tokenizer, device=Device(torch.device("cpu"), dtype))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def in_towers(policy: Policy, names: Any) -> list[str]:
    towers = tuple(f"{name}." for name in tower_names(policy.causal))
    return [name for name in names if name.startswith(towers)]


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "fc1", "proj", "gate_proj"]])
def test_lora_leaves_tower_and_projector_out(folders: Any, family: str, targets: Any) -> None:
    policy = policy_at(folders(family), lora={"target_modules": targets, "r": 4})
    adapted = {name.rsplit(".lora_", 1)[0] for name in policy.parameters["policy"]}
    assert adapted
    assert in_towers(policy, adapted) == []


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES)
def test_full_fine_tuning_trains_the_language_part_with_embedding_and_head(folders: Any, family: str) -> None:
    policy = policy_at(folders(family), **FULL)
    trained = {id(parameter) for parameter in policy.parameters["policy"].values()}
    towers = {id(parameter) for tower in towers_of(policy.causal) for parameter in tower.parameters()}
    assert {id(p) for p in policy.causal.parameters()} == trained | towers
    assert not trained & towers
    assert {id(policy.causal.get_input_embeddings().weight), id(policy.causal.lm_head.weight)} <= trained


def test_full_fine_tuning_has_float32_weights_beside_a_tower_as_it_was_loaded(folders: Any) -> None:
    policy = policy_at(folders("smolvlm"), dtype=torch.bfloat16, **FULL)
    assert {parameter.dtype for parameter in policy.parameters["policy"].values()} == {torch.float32}
    assert {p.dtype for tower in towers_of(policy.causal) for p in tower.parameters()} == {torch.bfloat16}
    assert {parameter.requires_grad for tower in towers_of(policy.causal) for parameter in tower.parameters()} == {
        False
    }


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_frozen_copy_shares_the_tower_and_nothing_else(folders: Any, family: str, dtype: torch.dtype) -> None:
    policy = policy_at(folders(family), dtype=dtype, reference={"kind": "auto"}, grpo={"kl_coef": 0.1}, **FULL)
    assert policy.reference_model is not None
    own = {parameter.data_ptr() for parameter in policy.causal.parameters()}
    shared = {name for name, p in policy.reference_model.named_parameters() if p.data_ptr() in own}
    assert sorted(shared) == in_towers(policy, sorted(n for n, _ in policy.causal.named_parameters()))
    assert shared


def test_a_shared_tower_counts_once_in_memory(folders: Any) -> None:
    policy = policy_at(folders("smolvlm"), reference={"kind": "auto"}, grpo={"kl_coef": 0.1}, **FULL)
    language = sum(p.nbytes for p in language_parameters(policy.causal).values())
    assert bytes_by_role(policy)["reference"] == language
    assert bytes_by_role(policy)["base"] > language


def test_a_full_checkpoint_takes_room_for_the_tower_too(folders: Any) -> None:
    policy = policy_at(folders("smolvlm"), **FULL)
    tower = sum(p.nbytes for tower in towers_of(policy.causal) for p in tower.parameters())
    assert checkpoint_bytes(policy) == 12 * policy.num_trained + tower + STATE_BYTES


def test_a_separate_critic_s_file_has_the_tower_again_and_is_counted(folders: Any, tmp_path: Path) -> None:
    sections = {"critic": {"kind": "separate"}, "ppo": {"kl_coef": 0.0}}
    policy = policy_at(folders("smolvlm"), method="ppo", **sections, **FULL)
    save_policy(policy, tmp_path)
    weights = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    moments = 8 * policy.num_trained
    assert checkpoint_bytes(policy) - STATE_BYTES - moments == pytest.approx(weights, rel=0.05)


def test_a_shared_tower_computes_the_same_bits_beside_a_reference(folders: Any) -> None:
    """The hooks by which the reference reads half-precision weights in float32 are not on the tower."""
    reference = {"reference": {"kind": "auto"}, "grpo": {"kl_coef": 0.1}}
    alone = policy_at(folders("smolvlm"), dtype=torch.bfloat16, **FULL)
    beside = policy_at(folders("smolvlm"), dtype=torch.bfloat16, **reference, **FULL)
    pixels = torch.randn(1, 1, 3, 32, 32).bfloat16()
    with torch.no_grad():
        found = [policy.causal.get_image_features(pixels, return_dict=True).pooler_output for policy in (alone, beside)]  # pyright: ignore[reportCallIssue]
    assert all(map(torch.equal, *found))


# ---- adapters by other names ----


def saved_adapter(folders: Any, family: str, folder: Path, **own: Any) -> tuple[Policy, Path]:
    """A policy whose adapter is no longer zero, and its checkpoint."""
    policy = policy_at(folders(family), lora={"r": 4, **own})
    stir(policy.parameters["policy"])
    save_policy(policy, folder)
    return policy, folder


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_peft_reads_an_adapter_on_the_library_s_class(folders: Any, family: str, tmp_path: Path) -> None:
    policy, saved = saved_adapter(folders, family, tmp_path)
    base = AutoModelForImageTextToText.from_pretrained(folders(family))
    before = logits(base.eval())
    theirs = logits(PeftModel.from_pretrained(base, str(saved)).eval())
    assert torch.equal(theirs, logits(policy.causal))
    assert not torch.equal(theirs, before)


def renamed(saved: Path, folder: Path, old: str, new: str) -> Path:
    """Copy an adapter with other names of its modules, in its weights and in its configuration."""
    tensors = load_file(saved / "adapter_model.safetensors")
    folder.mkdir()
    save_file({key.replace(old, new): tensor for key, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    written = json.loads((saved / "adapter_config.json").read_text())
    names = {key.split(".model.", 1)[1].rsplit(".lora_", 1)[0].replace(old, new, 1) for key in tensors}
    written |= {"target_modules": sorted(f"{name}" for name in names), "exclude_modules": None}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_in_the_text_class_s_names_is_read(folders: Any, family: str, tmp_path: Path) -> None:
    policy, saved = saved_adapter(folders, family, tmp_path / "saved")
    decoder = "model.text_model." if family == "smolvlm" else "model.language_model."
    of_text = renamed(saved, tmp_path / "text", decoder, "model.")
    assert all(".model.layers." in key for key in load_file(of_text / "adapter_model.safetensors"))
    again = policy_at(folders(family), model={"adapter": str(of_text)})
    assert torch.equal(logits(again.causal), logits(policy.causal))


def test_an_adapter_on_the_tower_is_refused(folders: Any, tmp_path: Path) -> None:
    _, saved = saved_adapter(folders, "smolvlm", tmp_path / "saved", target_modules=["q_proj"])
    file = saved / "adapter_model.safetensors"
    name = "base_model.model.model.vision_model.encoder.layers.0.self_attn.q_proj"
    tower = {f"{name}.lora_A.weight": torch.ones(4, 16), f"{name}.lora_B.weight": torch.ones(16, 4)}
    save_file(load_file(file) | tower, file)
    with pytest.raises(ValueError, match=r"vision tower .*vision_model"):
        policy_at(folders("smolvlm"), model={"adapter": str(saved)})


def test_an_adapter_that_changes_nothing_on_the_tower_is_read_without_it(folders: Any, tmp_path: Path) -> None:
    """As that of a run on text, in which the tower of Gemma 3 has adapters that never get a gradient."""
    text = policy_at(folders("gemma3"), with_images=None, lora={"r": 4})
    assert in_towers(text, text.parameters["policy"])
    language = {n: p for n, p in text.parameters["policy"].items() if "language_model" in n}
    stir(language)
    save_policy(text, tmp_path)
    policy = policy_at(folders("gemma3"), model={"adapter": str(tmp_path)})
    assert in_towers(policy, policy.parameters["policy"]) == []
    assert torch.equal(logits(policy.causal), logits(text.causal))


def test_an_adapter_of_the_whole_model_is_read_by_the_text_class(tiny: TinyModels, tmp_path: Path) -> None:
    """Qwen3.5, of which rows of text load the language model alone."""
    folder = tiny("qwen3.5-vl")
    model = load_image_text_model(str(folder), dtype=torch.float32)
    whole = policy_of(wrap_in_lora(model, on_language_model(lora(), model)))
    stir(whole.parameters["policy"])
    assert whole.adapters.peft is not None
    save_adapter(whole.adapters.peft, "default", tmp_path)
    text = policy_at(folder, with_images=None, model={"adapter": str(tmp_path)})
    assert type(text.causal).__name__ == "Qwen3_5ForCausalLM"
    assert torch.allclose(logits(text.causal), logits(whole.causal), atol=1e-5)


# ---- rows of text ----


def test_rows_of_text_load_the_language_model_without_its_tower(tiny: TinyModels) -> None:
    policy = policy_at(tiny("qwen3.5-vl"), with_images=None)
    assert tower_names(policy.causal) == []
    whole = load_image_text_model(str(tiny("qwen3.5-vl")), dtype=torch.float32)
    assert tower_names(whole) == ["model.visual"]


def test_rows_of_text_train_no_other_names_than_before(tiny: TinyModels) -> None:
    """Gemma 3 is loaded whole for them, too, and a checkpoint of a run from before has to be read."""
    policy = policy_at(tiny("gemma3-vl"), with_images=None)
    assert in_towers(policy, policy.parameters["policy"])


def test_a_model_without_a_tower_is_refused_by_its_type(tiny: TinyModels) -> None:
    with pytest.raises(ValueError, match=r"llama has no vision tower"):
        policy_at(tiny("llama"))


def test_a_model_without_a_text_class_is_not_loaded_without_its_tower(folders: Any) -> None:
    with pytest.raises(ValueError, match=r"model\.with_images=true"):
        policy_at(folders("smolvlm"), with_images=False)
    assert policy_at(folders("smolvlm")).images is not None


def test_a_model_that_takes_no_features_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    """Llama 3.2 Vision, whose layers attend to what the tower sees; the folder has no weights."""
    text = {"num_hidden_layers": 1, "hidden_size": 32, "cross_attention_layers": []}
    vision = {"num_hidden_layers": 1, "num_global_layers": 1, "hidden_size": 32}
    MllamaConfig(text_config=text, vision_config=vision).save_pretrained(tmp_path)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"MllamaForConditionalGeneration takes no features"):
        load_image_text_model(str(tmp_path), dtype=torch.float32)


# ---- sampling ----


def test_a_model_whose_images_the_decoder_misreads_is_not_sampled_without_them(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_at(folders("smolvlm"))
    engine, _ = select_engine(policy.config.generation, policy, policy.tokenizer, longest=40)
    assert engine.name == "hf"
    monkeypatch.setattr(engines, "decodes_exactly", lambda *_, **__: False)
    with pytest.raises(ValueError, match="cannot be sampled from with images"):
        select_engine(policy.config.generation, policy, policy.tokenizer, longest=40)


def test_prompts_that_end_in_an_image_are_sampled_as_each_alone(folders: Any, tmp_path: Path) -> None:
    """The start that they share ends inside the image, whose positions follow from all of it."""
    policy = policy_at(folders("qwen2_5_vl"))
    with policy.trying_images():
        engine, _ = select_engine(policy.config.generation, policy, policy.tokenizer, longest=64)
    assert engine.name == "hf"
    image = ImageFiles(tmp_path).image_of(str(image_file(tmp_path / "a.png", size=(32, 32))))
    assert policy.image_expander is not None
    ends = [*range(20, 32), *policy.image_expander.tokens_of(image)]
    prompts = [ends, ends, [*ends, 40, 41, 42]]
    requests = [Request(prompt, np.uint64(row), limit=4, row=row, greedy=True) for row, prompt in enumerate(prompts)]
    together = engine.sample(requests)
    alone = [engine.sample([request])[0] for request in requests]
    assert [sample.response for sample in together] == [sample.response for sample in alone]
    assert together[0].logprobs == pytest.approx(alone[0].logprobs, abs=1e-5)
