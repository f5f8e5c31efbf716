"""Exports in the names of the class that config.json of their base names, and read by it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests import running
from tests.models.building import lora_roles
from tests.tiny_models import TinyModels
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import load_start_adapter, save_adapter
from tinyrl.tools.export import export
from tinyrl.tools.export.served import ExportedClass, check_adapter_keys, served_model, write_adapter

WRAPPED = "base_model.model.model.language_model.layers.0."


def served(base: Path) -> ExportedClass:
    return served_model(AutoConfig.from_pretrained(base), path=str(base), revision=None)


@pytest.mark.parametrize(
    ("kind", "class_name", "decoder", "own_decoder"),
    [
        ("qwen3.5-vl", "Qwen3_5ForConditionalGeneration", "model.language_model", "model"),
        ("gemma3-vl", "Gemma3ForConditionalGeneration", "model", "model"),
        ("gpt2", "GPT2LMHeadModel", "transformer", "transformer"),
    ],
)
def test_the_class_that_config_json_names_reads_an_export(
    kind: str, class_name: str, decoder: str, own_decoder: str, tiny: TinyModels
):
    found = served(tiny(kind))
    assert (found.class_name, found.decoder, found.own_decoder) == (class_name, decoder, own_decoder)


def test_a_class_without_the_decoder_that_was_trained_is_refused(tiny: TinyModels):
    config = AutoConfig.from_pretrained(tiny("llama"))
    assert served_model(config, path="base", revision=None).class_name == "LlamaForCausalLM"
    config.architectures = ["MistralForCausalLM"]
    with pytest.raises(ValueError, match=r"MistralForCausalLM.*LlamaModel"):
        served_model(config, path="base", revision=None)


def test_an_adapter_of_a_decoder_inside_a_vision_model_has_the_whole_models_names(tiny: TinyModels, tmp_path: Path):
    base = tiny("qwen3.5-vl")
    policy = lora_roles(base)
    assert policy.adapters.peft is not None
    save_adapter(policy.adapters.peft, "default", own := tmp_path / "own")
    config = json.loads((own / "adapter_config.json").read_text())
    patterns = {"rank_pattern": {"model.layers.0.mlp.up_proj": 2}, "alpha_pattern": {"up_proj": 3}}
    (own / "adapter_config.json").write_text(json.dumps({**config, **patterns}))
    tensors = load_file(own / "adapter_model.safetensors")
    up = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight"
    smaller = {up.format("A"): torch.ones(2, 32), up.format("B"): torch.ones(64, 2)}
    save_file({**tensors, **smaller}, own / "adapter_model.safetensors")
    (out := tmp_path / "out").mkdir()
    write_adapter(own, out, served=served(base))
    keys = load_file(out / "adapter_model.safetensors").keys()
    assert keys == {key.replace("model.layers.", "model.language_model.layers.") for key in tensors}
    written = json.loads((out / "adapter_config.json").read_text())
    assert written["rank_pattern"]["model.language_model.layers.0.mlp.up_proj"] == 2
    assert written["alpha_pattern"]["model.language_model.layers.1.mlp.up_proj"] == 3
    check_adapter_keys(out, served=served(base))
    ours, again = (load_start_adapter(load_causal_lm(str(base), dtype=torch.float32), str(at)) for at in (own, out))
    assert ours.state_dict().keys() == again.state_dict().keys()
    ids = torch.arange(20).unsqueeze(0)
    assert torch.equal(ours(input_ids=ids).logits, again(input_ids=ids).logits)  # an export is read as it was trained
    with pytest.raises(ValueError, match="does not fit a Qwen3_5ForConditionalGeneration"):
        check_adapter_keys(own, served=served(base))
    (out / "adapter_model.safetensors").unlink()
    save_file({f"{WRAPPED}mlp.up_proj.lora_A.weight": torch.ones(2, 32)}, out / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="has no weight in the adapter"):
        check_adapter_keys(out, served=served(base))


READ = """
import json, sys, torch, transformers
from peft import PeftModel
from safetensors.torch import save_file

base, adapter, merged, out = sys.argv[1:]
ids = torch.arange(2, 30).unsqueeze(0)

def read(folder):
    named = json.load(open(f"{folder}/config.json"))["architectures"]
    reader = getattr(transformers, named[0])
    model, found = reader.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(map(len, (found["missing_keys"], found["unexpected_keys"], found["mismatched_keys"]))), found
    return model.eval()

with torch.no_grad():
    logits = {"base": read(base)(input_ids=ids).logits, "merged": read(merged)(input_ids=ids).logits}
    logits["adapter"] = PeftModel.from_pretrained(read(base), adapter).eval()(input_ids=ids).logits
assert "tinyrl" not in sys.modules
save_file({name: values.contiguous() for name, values in logits.items()}, out)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3.5-vl", "gemma3-vl"])
def test_the_named_class_reads_both_exports_as_the_policy(kind: str, tiny: TinyModels, tmp_path: Path):
    """In a process without tinyrl: its logits move as the policy's do."""
    base = tiny(kind)
    settings = running.config("grpo", base, generation={"max_prompt_tokens": 128})
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    adapter = export(str(run.path)).folder
    merged = export(str(run.path), merge=True).folder
    folders = [str(folder) for folder in (base, adapter, merged)]
    command = [sys.executable, "-c", READ, *folders, str(tmp_path / "logits.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    logits = load_file(tmp_path / "logits.safetensors")
    own = load_causal_lm(str(base), dtype=torch.float32)
    policy = load_start_adapter(own, str(run.checkpoints / "step-000003")).eval()
    with torch.no_grad():
        ours = policy(input_ids=torch.arange(2, 30).unsqueeze(0)).logits
    assert (ours - logits["base"]).abs().max() > 0.1
    torch.testing.assert_close(logits["adapter"], ours, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits["merged"], ours, atol=1e-4, rtol=1e-4)
    base_class = json.loads((base / "config.json").read_text())["architectures"]
    assert json.loads((merged / "config.json").read_text())["architectures"] == base_class
    card = (adapter / "README.md").read_text()
    assert (base_class[0] in card) == (kind == "qwen3.5-vl")


@pytest.mark.slow
def test_a_fully_trained_decoder_is_exported_inside_the_vision_model(tiny: TinyModels, tmp_path: Path):
    full = {"lora": {"enabled": False}, "optim": {"learning_rate": 1e-3}}
    base = tiny("qwen3.5-vl")
    code, run, _ = running.train(running.config("grpo", base, generation={"max_prompt_tokens": 128}, **full), tmp_path)
    assert code == 0
    out = export(str(run.path)).folder
    before, after = (load_file(folder / "model.safetensors") for folder in (base, out))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("model.language_model.") for name in changed)
    shutil.rmtree(out)
