"""`tinyrl export`: folders that transformers and PEFT load alone and that answer the same; a card that harms nobody."""

import json
import re
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.evaluation.targets import policy_at
from tinyrl.process.launched import Options
from tinyrl.runs.folders import LOCK
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import open_run
from tinyrl.tools import export as exporting
from tinyrl.tools.chat import ChatSession
from tinyrl.tools.export import Bundle, Difference, check_repository, check_token, compared, export, push, sequences_of
from tinyrl.training.model_card import licence_of, model_card

PROMPTS = ["letters: b a c sorted:", "letters: z y sorted:"]


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


def merged(run: Path, out: Path, *, dtype: str = "float32") -> Bundle:
    return export(str(run), merge=True, dtype=dtype, output=str(out))


def own_answers(run: Path) -> list[str]:
    with ChatSession(policy_at(str(run), []), options=Options(device="cpu")) as session:
        return [session(prompt, greedy=True) for prompt in PROMPTS]


@torch.inference_mode()
def library_answers(model, tokenizer) -> list[str]:
    """Greedy completions by the library's own loop."""
    found = []
    for prompt in PROMPTS:
        tokens = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        drawn = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False
        )
        found.append(tokenizer.decode(drawn[0, tokens.shape[1] :], skip_special_tokens=True))
    return found


def test_an_adapter_is_read_by_peft_alone_and_answers_the_same(folder: Path):
    bundle = export(str(folder / "lora"))
    assert export(str(folder / "lora")) == bundle  # in place of the one before
    out, base = bundle.folder, folder / "base"
    assert not {"optimizer.safetensors", "state.json", "MANIFEST.json"} & {path.name for path in out.iterdir()}
    bare, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(out)
    without = library_answers(bare, tokenizer)
    theirs = library_answers(PeftModel.from_pretrained(bare, str(out)), tokenizer)
    assert theirs == own_answers(folder / "lora") != without
    lines = bundle.commands
    assert lines["serve"] == f"vllm serve {base} --enable-lora --max-lora-rank 16 --lora-modules lora={out}"
    assert lines["llama.cpp"].endswith(f"{out} --base {base} --outfile lora.gguf")
    assert lines["upload"] == f"hf upload OWNER/lora {out}"


@pytest.mark.parametrize("name", ["lora", "full"])
@pytest.mark.wide
def test_a_merged_model_is_read_by_transformers_alone_and_answers_the_same(folder: Path, name: str, tmp_path: Path):
    bundle = merged(folder / name, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(bundle.folder)
    assert model.dtype == torch.float32
    assert library_answers(model, AutoTokenizer.from_pretrained(bundle.folder)) == own_answers(folder / name)
    assert "0.00% of" in bundle.notes[0]
    for written in (bundle.folder, folder / name / "checkpoints/step-000003"):  # older transformers know no other
        facts = json.loads((written / "tokenizer_config.json").read_text())
        assert facts["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_merged_model_has_a_modelfile_and_the_lines_that_run_it(folder: Path, tmp_path: Path):
    bundle = merged(folder / "lora", tmp_path / "out")
    assert "PARAMETER temperature 1\n" in (bundle.folder / "Modelfile").read_text()
    assert bundle.commands["ollama"] == f"ollama create lora -f {bundle.folder}/Modelfile"
    assert bundle.commands["then"] == "ollama run lora"
    assert "rope_theta" in json.loads((bundle.folder / "config.json").read_text())


def test_bfloat16_is_float32_rounded_and_a_4bit_run_is_merged_into_the_unquantised_base(
    folder: Path, four_bit: Path, tmp_path: Path
):
    four = merged(four_bit, tmp_path / "four")
    assert any("4bit" in note and "unquantised" in note for note in four.notes)
    exact = merged(folder / "lora", tmp_path / "exact").folder
    rounded = merged(folder / "lora", tmp_path / "rounded", dtype="bfloat16").folder
    a, b, c = (load_file(path / "model.safetensors") for path in (exact, rounded, four.folder))
    assert a.keys() == b.keys() == c.keys()
    assert all(torch.equal(a[name].bfloat16(), b[name]) and torch.equal(a[name], c[name]) for name in a)


@torch.inference_mode()
def likeliest(model, sequences: list[tuple[list[int], int]]) -> torch.Tensor:
    """The likeliest token at each place where the policy wrote one, by the library's own forward pass."""
    found = [model(input_ids=torch.tensor([ids])).logits[0, first - 1 : -1].argmax(-1) for ids, first in sequences]
    return torch.cat(found)


@pytest.fixture(scope="module")
def four_bit(folder: Path) -> Path:
    """The run of LoRA, as one on a base of 4 bits."""
    shutil.copytree(folder / "lora", run := folder / "four")
    config = (run / "config.yaml").read_text()
    assert "quantization: null" in config
    (run / "config.yaml").write_text(config.replace("quantization: null", "quantization: 4bit"))
    return run


def test_a_merge_of_a_4bit_run_is_compared_with_the_4bit_base_and_its_adapter(
    folder: Path, four_bit: Path, tmp_path: Path
):
    pytest.importorskip("bitsandbytes")
    bundle = merged(four_bit, tmp_path / "out")
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    base = AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=torch.float32, quantization_config=BitsAndBytesConfig(load_in_4bit=True, **nf4)
    )
    for module in base.modules():  # else a CPU with AVX512-BF16 repacks weights, of widths that these are not
        layer: Any = module
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    trained = PeftModel.from_pretrained(base, str(four_bit / "checkpoints/step-000003")).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    sequences = sequences_of(open_run(four_bit), tokenizer, vocabulary=258)
    ours = likeliest(trained, sequences)
    changed = float((ours != likeliest(AutoModelForCausalLM.from_pretrained(bundle.folder), sequences)).float().mean())
    assert changed > 0.1
    assert f"{changed:.2%} of {len(ours)}" in bundle.notes[0]
    assert "0.00% of" in merged(folder / "lora", tmp_path / "plain").notes[0]  # on a base that is not quantised


def test_without_bitsandbytes_a_merge_of_a_4bit_run_says_that_it_was_not_measured(
    four_bit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(exporting, "find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name))
    notes = merged(four_bit, tmp_path / "out").notes
    assert [("not measured" in note, "%" in note) for note in notes[:1]] == [(True, False)]


def different(changed: float, wanted: object, saved: object) -> Difference:
    """In place of `compared`."""
    return Difference(gap=0.3, changed=changed, positions=100)


def test_a_model_that_is_not_the_policy_is_not_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the merge loses the adapter, or rounding changes over 10 % of the tokens."""
    with monkeypatch.context() as patched:
        patched.setattr(PeftModel, "merge_and_unload", lambda model: model.unload(), raising=False)
        with pytest.raises(ValueError, match="is not the policy"):
            merged(folder / "lora", tmp_path / "out")
    for changed, kept in ((0.12, False), (0.02, True)):
        monkeypatch.setattr(exporting, "compared", partial(different, changed))
        if kept:
            assert "2.00% of" in merged(folder / "lora", tmp_path / "out", dtype="bfloat16").notes[0]
        else:
            with pytest.raises(ValueError, match=r"12\.00% of"):
                merged(folder / "lora", tmp_path / "out", dtype="bfloat16")
            assert not list(tmp_path.iterdir())


def test_changed_tokens_and_the_gap_are_counted_over_positions():
    wanted = [(torch.tensor([-1.0, -2.0]), torch.tensor([3, 4])), (torch.tensor([-0.5, -0.5]), torch.tensor([0, 1]))]
    saved = [(torch.tensor([-1.0, -2.0]), torch.tensor([3, 4])), (torch.tensor([-0.5, -1.5]), torch.tensor([0, 2]))]
    assert compared(wanted, saved) == Difference(gap=0.25, changed=0.25, positions=4)


def test_what_cannot_be_exported_is_refused_before_anything_is_read(folder: Path, tmp_path: Path):
    (there := tmp_path / "there").mkdir()
    (there / "mine.txt").write_text("mine")
    cases = [
        (folder / "lora", {"output": str(there)}, "not an exported folder"),
        (folder / "lora", {"dtype": "bfloat16"}, "is for a whole model"),
        (folder / "nowhere", {}, "is not a run"),
    ]
    for run, given, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            export(str(run), **given)
    assert (there / "mine.txt").read_text() == "mine"


def test_a_link_in_place_of_an_exported_folder_is_refused(folder: Path, tmp_path: Path):
    exported = merged(folder / "lora", tmp_path / "out").folder
    (tmp_path / "link").symlink_to(exported)
    with pytest.raises(ValueError, match="is a link"):
        merged(folder / "lora", tmp_path / "link")


@pytest.mark.parametrize("is_link", [True, False])
def test_a_picture_that_is_a_link_is_not_exported(folder: Path, tmp_path: Path, *, is_link: bool):
    """A run from somebody else may link a private file, and the export may be published."""
    run = shutil.copytree(folder / "lora", tmp_path / "run")
    (private := tmp_path / "private.png").write_bytes(b"private")
    picture = run / "report.png"
    picture.unlink(missing_ok=True)  # drawn if this file's run is the first of its process
    if is_link:
        picture.symlink_to(private)
    else:
        picture.write_bytes(b"drawn")
    exported = export(str(run), output=str(tmp_path / "out")).folder
    assert (exported / "report.png").exists() != is_link
    assert ("report.png" in (exported / "README.md").read_text()) != is_link


def test_an_export_that_was_killed_is_swept_by_the_next_and_one_that_fails_leaves_the_one_before(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = merged(folder / "lora", tmp_path / "out").folder
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (left := tmp_path / ".writing-out-0123456789abcdef").mkdir()
    (left / LOCK).write_text("process 1 on this machine")
    monkeypatch.setattr(exporting, "compared", partial(different, 0.5))
    with pytest.raises(ValueError, match="is not the policy"):
        merged(folder / "lora", out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_the_rank_is_that_of_the_adapter_whatever_the_configuration_has(folder: Path, tmp_path: Path):
    shutil.copytree(folder / "lora", run := tmp_path / "run")
    config = (run / "config.yaml").read_text()
    assert "r: 16" in config
    (run / "config.yaml").write_text(config.replace("r: 16", "r: 8").replace("alpha: 32.0", "alpha: 4.0"))
    bundle = export(str(run), output=str(tmp_path / "out"))
    assert "--max-lora-rank 16 " in bundle.render()
    assert "- LoRA rank: 16\n- LoRA alpha: 32.0\n" in (bundle.folder / "README.md").read_text()


def test_the_rank_is_the_largest_of_an_adapters_layers(folder: Path, tmp_path: Path):
    """Programs make room for so many; ranks of their own come with an adapter that the run began with."""
    ranks = LoraConfig(r=8, rank_pattern={"q_proj": 24}, target_modules=["q_proj", "v_proj"])
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    get_peft_model(base, ranks).save_pretrained(str(tmp_path / "start"))
    again = running.config("grpo", folder / "base", model={"adapter": str(tmp_path / "start")}, run={"num_steps": 1})
    code, run, _ = running.train(again, tmp_path)
    assert code == 0
    bundle = export(str(run.path))
    assert "--max-lora-rank 32 " in bundle.render()
    assert "- LoRA rank: 24\n" in (bundle.folder / "README.md").read_text()


# ---- the card ----

STEPS: dict[int, dict[str, Any]] = {
    0: {"eval/reward_mean": 0.25, "eval/reward_ci": [0.2, 0.3], "eval/kl": 0.0},
    10: {"reward/mean": 0.5},
    20: {"eval/reward_mean": 0.75, "eval/reward_ci": [0.7, 0.8], "eval/kl": 1.5},
    30: {"eval/reward_mean": 0.9, "eval/reward_ci": [0.85, 0.95], "eval/kl": 2.0},
}


def card(**sections: Any) -> str:
    config = config_of({"method": "grpo", "model": {"path": "Qwen/Qwen3-0.6B"}, **sections})
    return model_card(config, STEPS, name="my-run", step=20, dtype=None, notes=[], picture=False)


def test_the_card_has_base_data_rewards_and_the_evaluation_at_the_checkpoint():
    reward = {"functions": [{"use": "/somewhere/private/rewards.py:score", "weight": 0.5}]}
    text = card(task={"data": "openai/gsm8k:main", "name": "gsm8k"}, reward=reward)
    assert text.startswith('---\nlibrary_name: "peft"\nbase_model: "Qwen/Qwen3-0.6B"\n')
    assert 'datasets: ["openai/gsm8k"]' in text
    assert "- rewards.py:score, weight 0.5" in text
    assert "- a reward model, mine" in card(reward={"model": "/somewhere/mine"})
    assert "/somewhere" not in text  # a folder of this machine is nobody's business
    assert "0.900" not in text
    assert "| reward_mean | 0.750 (95 %: 0.700 to 0.800) |" in text


def test_the_card_leads_with_the_score_before_and_after():
    first = card().partition("# my-run\n\n")[2].partition("\n")[0]
    assert re.findall(r"\d\.\d+", first) == ["0.250", "0.200", "0.300", "0.750", "0.700", "0.800"]


def test_scores_of_another_reward_are_not_on_the_card():
    config = config_of({"method": "grpo"})
    text = model_card(config, STEPS, name="run", step=20, dtype=None, notes=[], picture=False, since=10)
    assert "0.250" not in text
    assert "**0.750**" in text


def test_the_card_of_a_method_without_a_reward_leads_with_the_loss():
    config = config_of({"method": "sft", "task": {"data": "rows.jsonl"}})
    losses = {0: {"eval/loss": 3.5}, 20: {"eval/loss": 1.25}}
    text = model_card(config, losses, name="my-run", step=20, dtype=None, notes=[], picture=False)
    assert re.search(r"# my-run\n\nHeld-out loss.*3\.50.*1\.25", text)


def test_the_card_says_that_a_policy_reads_pictures():
    assert "pictures" in card(model={"path": "Qwen/Qwen3-VL", "with_images": True})
    assert "pictures" not in card()


def test_the_card_says_what_a_processor_with_a_part_for_videos_needs():
    assert "torchvision" in card(model={"path": "Qwen/Qwen3-VL", "with_images": True})
    assert "torchvision" not in card()


def test_the_card_says_where_a_base_that_is_a_folder_is(tmp_path: Path):
    assert f'folder in place of "{tmp_path.name}"' in card(model={"path": str(tmp_path)})
    assert "in place of" not in card()


def test_the_lines_that_use_an_adapter_load_its_base():
    assert 'from_pretrained("Qwen/Qwen3-0.6B")\nmodel = PeftModel' in card()
    code = card(model={"path": "starter"}).partition("```python\n")[2].partition("model = PeftModel")[0]
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["model"].num_parameters() > 0


def test_the_licence_is_the_bases_own(tmp_path: Path):
    assert licence_of("starter") == "apache-2.0"
    assert licence_of("Qwen/Qwen3-0.6B") is None
    for text, licence in (
        ("---\ntags: [a]\nlicense: llama3.2\n---\n# a model", "llama3.2"),
        ("---\ntags: [a]\n---\nlicense: mit", None),
    ):
        (tmp_path / "README.md").write_text(text)
        assert licence_of(str(tmp_path)) == licence


def test_hostile_names_are_text():
    text = card(task={"data": "<script>alert(1)<script>a\x1b[31mb\u202e[x](http:y)|.jsonl"})
    assert not [part for part in ("<script", "\x1b", "\u202e", "[x](http", "y)|") if part in text]


# ---- the hub ----


class Hub:
    """In place of huggingface_hub's HfApi: keeps its calls; `public`: the repository is there and public."""

    endpoint = "https://hub"

    def __init__(self, *, public: bool = False, refuses: bool = False) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.public = public
        self.refuses = refuses

    def create_repo(self, repo_id: str, **given: Any) -> None:
        self.calls.append(("create_repo", {"repo_id": repo_id, **given}))
        if self.refuses:
            raise OSError("no token")

    def model_info(self, repo_id: str) -> Any:
        return SimpleNamespace(private=not self.public)

    def upload_folder(self, **given: Any) -> None:
        self.calls.append(("upload_folder", given))


@pytest.mark.parametrize("private", [True, False])
def test_the_folder_is_uploaded_to_the_repository(private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub = Hub()
    monkeypatch.setattr(exporting, "HfApi", lambda: hub)
    assert push(tmp_path / "adapter", "me/mine", private=private) == "https://hub/me/mine"
    made, uploaded = hub.calls
    assert made == ("create_repo", {"repo_id": "me/mine", "private": private, "exist_ok": True})
    assert uploaded[0] == "upload_folder"
    assert uploaded[1]["repo_id"] == "me/mine"
    assert uploaded[1]["folder_path"] == tmp_path / "adapter"


def test_nothing_private_goes_into_a_public_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub = Hub(public=True)
    monkeypatch.setattr(exporting, "HfApi", lambda: hub)
    with pytest.raises(ValueError, match="public"):
        push(tmp_path, "me/mine", private=True)
    assert [name for name, _ in hub.calls] == ["create_repo"]
    push(tmp_path, "me/mine")
    assert hub.calls[-1][0] == "upload_folder"


def test_a_hub_that_refuses_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exporting, "HfApi", lambda: Hub(refuses=True))
    with pytest.raises(ValueError, match="no token"):
        push(tmp_path, "me/mine")


@pytest.mark.parametrize("name", ["mine", "me/mine/too", "me/mi ne", "", "../x/y"])
def test_a_name_that_is_no_repository_is_refused(name: str):
    with pytest.raises(ValueError, match="USER/NAME"):
        check_repository(name)


def test_without_a_token_an_upload_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="hf auth login"):
        check_token()
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    check_token()
