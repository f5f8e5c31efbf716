"""`tinyrl export`: folders that transformers and PEFT load alone and that say the same; what is refused is not kept."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.evaluation.targets import policy_at
from tinyrl.runs.launched import Options
from tinyrl.tools import export as exporting
from tinyrl.tools.chat import ChatSession
from tinyrl.tools.export import Bundle, compared, export

PROMPTS = ["letters: b a c sorted:", "letters: z y sorted:"]
NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base; a run of LoRA on it, and one of every weight."""
    folder = tmp_path_factory.mktemp("exports")
    base = tiny_model(folder / "base", "llama")
    written = (base / "tokenizer_config.json").read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast")
    (base / "tokenizer_config.json").write_text(written)
    for name, lora in (("lora", True), ("full", False)):
        settings = running.config("grpo", base, lora={"enabled": lora}, optim={"learning_rate": 1e-2 if lora else 1e-3})
        assert running.train(settings, folder, name=name)[0] == 0
    return folder


def merged(run: Path, out: Path, *, dtype: str = "float32", accept_changes: bool = False) -> Bundle:
    return export(str(run), merge=True, dtype=dtype, output=str(out), accept_changes=accept_changes)


def own_answers(run: Path) -> list[str]:
    with ChatSession(policy_at(str(run), []), options=Options(device="cpu")) as speaker:
        return [speaker(prompt, greedy=True) for prompt in PROMPTS]


@torch.inference_mode()
def library_answers(model, tokenizer) -> list[str]:
    """Greedy completions by the library's own loop."""
    found = []
    for prompt in PROMPTS:
        tokens = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        said = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=False
        )
        found.append(tokenizer.decode(said[0, tokens.shape[1] :], skip_special_tokens=True))
    return found


def test_an_adapter_is_read_by_peft_alone_and_says_the_same(folder: Path):
    out = export(str(folder / "lora")).folder
    names = {path.name for path in out.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md", "export.json"} <= names
    assert not {"optimizer.safetensors", "state.json", "MANIFEST.json", "random.safetensors"} & names
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), str(out))
    theirs = library_answers(model, AutoTokenizer.from_pretrained(out))
    assert theirs == own_answers(folder / "lora")
    bare = AutoModelForCausalLM.from_pretrained(folder / "base")
    assert library_answers(bare, AutoTokenizer.from_pretrained(out)) != theirs  # the adapter matters


@pytest.mark.parametrize("name", ["lora", "full"])
@pytest.mark.wide
def test_a_merged_model_is_read_by_transformers_alone_and_says_the_same(folder: Path, name: str, tmp_path: Path):
    bundle = merged(folder / name, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(bundle.folder)
    assert model.dtype == torch.float32
    assert library_answers(model, AutoTokenizer.from_pretrained(bundle.folder)) == own_answers(folder / name)
    assert "0.00% of" in bundle.notes[0]
    checkpoint = folder / name / "checkpoints/step-000003"
    for written in (bundle.folder, checkpoint):  # older versions of transformers know no TokenizersBackend
        assert (
            json.loads((written / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
        )
    assert not list(tmp_path.glob(".writing-*"))


def test_bfloat16_weights_are_the_rounded_ones_of_float32(folder: Path, tmp_path: Path):
    exact = merged(folder / "lora", tmp_path / "exact").folder
    rounded = merged(folder / "lora", tmp_path / "rounded", dtype="bfloat16", accept_changes=True).folder
    a, b = load_file(exact / "model.safetensors"), load_file(rounded / "model.safetensors")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name].bfloat16(), b[name]) for name in a)


def test_a_4bit_run_is_merged_into_the_unquantised_base_and_says_so(folder: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(folder / "lora", run)
    config = (run / "config.yaml").read_text()
    assert "quantization: null" in config
    (run / "config.yaml").write_text(config.replace("quantization: null", "quantization: 4bit"))
    bundle = merged(run, tmp_path / "four")
    assert any("4bit" in note and "unquantised" in note for note in bundle.notes)
    assert "unquantised" in (bundle.folder / "README.md").read_text()
    plain = merged(folder / "lora", tmp_path / "plain").folder
    a, b = load_file(bundle.folder / "model.safetensors"), load_file(plain / "model.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_merge_that_loses_the_adapter_is_found_and_not_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda model: model.unload(), raising=False)
    with pytest.raises(ValueError, match="is not the policy"):
        merged(folder / "lora", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_over_one_percent_of_changed_tokens_is_refused_unless_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(exporting, "compared", lambda wanted, saved: (0.3, 0.02))
    with pytest.raises(ValueError, match=r"2\.00% of .* more than 1%"):
        merged(folder / "lora", tmp_path / "out", dtype="bfloat16")
    assert not list(tmp_path.iterdir())
    kept = merged(folder / "lora", tmp_path / "out", dtype="bfloat16", accept_changes=True)
    assert "2.00% of" in kept.notes[0]


def test_the_share_of_changed_tokens_and_the_gap_are_counted_over_positions():
    wanted = [torch.tensor([[0.0, -1.0], [-1.0, 0.0]]), torch.tensor([[-2.0, -1.0], [0.0, -3.0]])]
    saved = [torch.tensor([[0.0, -1.0], [-1.0, -0.5]]), torch.tensor([[-1.0, -2.0], [0.0, -3.0]])]
    assert compared(wanted, saved) == (1.0, 0.25)


def test_what_cannot_be_exported_is_refused_before_anything_is_read(folder: Path, tmp_path: Path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine.txt").write_text("mine")
    cases = [
        (folder / "lora", {"output": str(there)}, "exists"),
        (folder / "lora", {"output": str(there), "overwrite": True}, "no exported folder"),
        (folder / "lora", {"dtype": "bfloat16"}, "is for a whole model"),
        (folder / "nowhere", {}, "is not a run"),
    ]
    for run, given, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            export(str(run), **given)
    assert (there / "mine.txt").read_text() == "mine"


def test_the_next_lines_name_the_folder_the_base_and_a_rank_that_vllm_takes(folder: Path, tmp_path: Path):
    bundle = export(str(folder / "lora"), output=str(tmp_path / "out"))
    lines = bundle.commands
    base = json.loads((bundle.folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert lines["serve"] == (f"vllm serve {base} --enable-lora --max-lora-rank 16 --lora-modules lora={tmp_path}/out")
    assert lines["llama.cpp"].endswith(f"{tmp_path}/out --base {base} --outfile lora.gguf")
    assert lines["upload"] == f"hf upload OWNER/lora {tmp_path}/out"
    assert lines["upload"] in bundle.render()


def test_the_rank_is_that_of_the_adapter_whatever_the_configuration_says(folder: Path, tmp_path: Path):
    shutil.copytree(folder / "lora", run := tmp_path / "run")
    config = (run / "config.yaml").read_text()
    assert "r: 16" in config
    (run / "config.yaml").write_text(config.replace("r: 16", "r: 8").replace("alpha: 32.0", "alpha: 4.0"))
    bundle = export(str(run), output=str(tmp_path / "out"))
    assert "--max-lora-rank 16 " in bundle.render()
    card = (bundle.folder / "README.md").read_text()
    assert "- LoRA rank: 16\n- LoRA alpha: 32.0\n" in card
