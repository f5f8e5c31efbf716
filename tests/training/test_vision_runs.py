"""Runs of vision-language models: resumed to the bit, their checkpoints, and exports as other programs read them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from contextlib import closing
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as PILImage
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests import running
from tests.images import image_file
from tests.tiny_vision import FAMILIES, tiny_vision
from tests.training.rows import loaded, write_rows
from tinyrl.evaluation.prepared import prepare_evaluation
from tinyrl.evaluation.targets import Asked
from tinyrl.models.batch import batch_of, examples
from tinyrl.models.loading import load_image_text_model, load_tokenizer
from tinyrl.models.lora import load_start_adapter
from tinyrl.models.processors import load_processor
from tinyrl.models.towers import language_parameters, towers_of
from tinyrl.process.launched import Options
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.run_dir import RunDir
from tinyrl.runs.show import image_lines
from tinyrl.tools.compare import evaluate_target
from tinyrl.tools.export import export
from tinyrl.workers.loading import use_of

FULL = {"lora": {"enabled": False}, "optim": {"learning_rate": 1e-3}}
LORA: dict[str, Any] = {}
ORDER = sorted(FAMILIES, key=lambda family: family != "smolvlm")  # of which the first is fast


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("vision")
    return cache(lambda family: tiny_vision(family, root / family))


def letters(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Reward different characters."""
    return [float(len({*str(completion)})) for completion in completions]


def settings(base: Path, rows: Path, *, num_steps: int, **sections: Any) -> Any:
    """The settings of a run on eight pictures of one colour each, which are written into a folder."""
    lines = list[dict[str, Any]]()
    for number in range(8):
        image_file(rows / f"{number}.png", color=(30 * number, 200, 90), size=(32, 32))
        prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how green?"}]}]
        lines.append({"prompt": prompt, "image": f"{number}.png", "answer": str(number)})
    data = str(write_rows(rows / "rows.jsonl", lines))
    task = {"name": "rows", "data": data, "eval_data": data}
    more = {
        "run": {"num_steps": num_steps, "eval_every": 0},
        "reward": {"functions": [{"use": use_of(partial(letters))}]},
    }
    values = {"task": task, "generation": {"max_prompt_tokens": 256}, **more, **sections}
    return running.config("grpo", base, **values)


@pytest.fixture(scope="module")
def runs(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of one step, by family and whether the whole language part is trained."""
    root = tmp_path_factory.mktemp("runs")

    def run(family: str, is_full: bool) -> RunDir:
        sections = FULL if is_full else LORA
        own = root / f"{family}-{is_full}"  # pictures that no other run writes again
        config = settings(folders(family), own, num_steps=1, **sections)
        code, done, _ = running.train(config, own, name="run")
        assert code == 0
        return done

    return cache(run)


@pytest.mark.wide
@pytest.mark.parametrize("family", ORDER)
@pytest.mark.parametrize("sections", [FULL, LORA], ids=["full", "lora"])
def test_a_run_that_is_stopped_and_resumed_is_bit_equal(
    folders: Any, family: str, sections: dict[str, Any], tmp_path: Path
) -> None:
    config = settings(folders(family), tmp_path, num_steps=3, grpo={"kl_coef": 0.1}, **sections)
    code, whole, looks = running.train(config, tmp_path, name="whole")
    assert code == 0
    code, stopped, _ = running.train(config, tmp_path, name="stopped", stop_at=int(looks * 0.8))
    assert code == 75
    assert running.go_on(stopped) == 0
    assert running.lasting(stopped) == running.lasting(whole)
    mine, its = running.weights(whole, 3), running.weights(stopped, 3)
    assert mine.keys() == its.keys()
    assert [name for name in mine if not torch.equal(mine[name], its[name])] == []


@pytest.mark.wide
@pytest.mark.parametrize("family", [*ORDER, "gemma4", "gemma4-large", "lfm2_vl"])
def test_sampled_log_probabilities_are_those_of_a_training_pass(folders: Any, family: str, tmp_path: Path) -> None:
    with closing(loaded(settings(folders(family), tmp_path, num_steps=1))) as method:
        method.check()
        samples = method.collector.collect(method.collector.train_prompts[:3], group_size=2, step=1, greedy=False)
        sides = [[sample.prompt for sample in samples], [sample.response for sample in samples]]
        batch = batch_of(examples(*sides), device=method.policy.device, images=method.policy.images)
        with torch.no_grad():
            rescored, _ = method.policy.logprobs("policy", batch, temperature=1.0)
    for row, sample in zip(rescored, samples, strict=True):
        torch.testing.assert_close(row[: len(sample.logprobs)], torch.tensor(sample.logprobs), atol=1e-4, rtol=0)


def test_the_divergence_from_the_reference_begins_at_zero(runs: Any) -> None:
    assert running.metrics(runs("smolvlm", False))[0]["eval/kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("family", ORDER)
def test_a_full_checkpoint_is_of_the_class_that_the_base_names(folders: Any, runs: Any, family: str) -> None:
    saved = runs(family, True).checkpoints / "step-000001"
    names = [json.loads((folder / "config.json").read_text())["architectures"] for folder in (saved, folders(family))]
    assert names[0] == names[1]


@pytest.mark.wide
@pytest.mark.parametrize("family", ORDER)
def test_a_full_checkpoint_has_the_base_s_tower_to_the_bit(folders: Any, runs: Any, family: str) -> None:
    saved = load_image_text_model(str(runs(family, True).checkpoints / "step-000001"), dtype=torch.float32)
    base = load_image_text_model(str(folders(family)), dtype=torch.float32)
    ours, theirs = saved.state_dict(), base.state_dict()
    moved = {name for name in theirs if not torch.equal(ours[name], theirs[name])}
    assert moved
    assert moved <= language_parameters(saved).keys() | {"lm_head.weight"}  # which may be the embedding


@pytest.mark.wide
@pytest.mark.parametrize("is_full", [False, True], ids=["lora", "full"])
def test_a_checkpoint_has_the_processor_as_it_was_loaded(folders: Any, runs: Any, is_full: bool) -> None:
    saved = runs("smolvlm", is_full).checkpoints / "step-000001"
    for name in ("preprocessor_config.json", "processor_config.json", "chat_template.jinja"):
        assert (saved / name).read_bytes() == (folders("smolvlm") / name).read_bytes()


def test_features_that_are_computed_in_each_pass_are_the_same_to_the_bit(
    folders: Any, runs: Any, tmp_path: Path
) -> None:
    kept = runs("smolvlm", False)
    config = settings(folders("smolvlm"), tmp_path, num_steps=1, model={"image_cache_gb": 0})
    code, computed, _ = running.train(config, tmp_path)
    assert code == 0
    assert running.lasting(computed) == running.lasting(kept)
    mine, its = running.weights(computed, 1), running.weights(kept, 1)
    assert [name for name in its if not torch.equal(mine[name], its[name])] == []


def test_a_picture_that_changed_is_named_by_the_refusal_to_resume(runs: Any) -> None:
    run = runs("smolvlm", False)
    picture = Path(str(run.read_config().task.data)).with_name("3.png")
    before = picture.read_bytes()
    image_file(picture, color=(1, 2, 3), size=(32, 32))
    try:
        with pytest.raises(ValueError, match=re.escape(str(picture))):
            running.go_on(run)
    finally:
        picture.write_bytes(before)


def test_a_run_whose_pictures_moved_goes_on(runs: Any, tmp_path: Path) -> None:
    run = runs("smolvlm", False)
    config = run.read_config()
    moved = shutil.copytree(Path(str(config.task.data)).parent, tmp_path / "moved") / "rows.jsonl"
    task = config.task.model_copy(update={"data": str(moved), "eval_data": str(moved)})
    here = RunDir(shutil.copytree(run.path, tmp_path / "run"))
    section = config.run.model_copy(update={"num_steps": 2})
    changed = config.model_copy(update={"task": task, "run": section})
    assert running.go_on(here, config=changed, allow_config_change=True) == 0
    assert [line["step"] for line in running.metrics(here)] == [0, 1, 2]


def test_config_yaml_says_that_the_model_was_loaded_with_its_tower(runs: Any) -> None:
    assert runs("smolvlm", False).read_config().model.with_images is True


def test_env_json_has_what_images_take_and_what_reads_them(runs: Any) -> None:
    environment = runs("smolvlm", False).read_environment()
    assert environment["images"] == {"count": 8, "least": 4, "median": 4, "most": 4}
    assert "8 images take 4 tokens each" in image_lines(environment)[0]
    assert f"pillow {version('pillow')}" in image_lines(environment)[0]


def test_a_model_that_is_compared_on_pictures_is_loaded_with_its_tower(folders: Any, runs: Any) -> None:
    prepared = prepare_evaluation(str(runs("smolvlm", False).path), Asked(), vs=str(folders("smolvlm")))
    assert evaluate_target(prepared, options=Options(device="cpu"))


def test_rows_with_images_are_refused_where_the_tower_was_left_out_by_hand(folders: Any, tmp_path: Path) -> None:
    config = settings(folders("smolvlm"), tmp_path, num_steps=1, model={"with_images": False})
    with pytest.raises(ValueError, match=r"model\.with_images=false"):
        prepare(config)


@pytest.mark.slow
@pytest.mark.parametrize("family", ORDER)
def test_a_base_in_four_bits_keeps_its_tower_and_is_trained_resumed_and_merged(
    folders: Any, family: str, tmp_path: Path
) -> None:
    """Only layers of the language model are quantised, the head and what it is tied to aside."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = {"quantization": "4bit", "dtype": "float32"}
    config = settings(folders(family), tmp_path, num_steps=2, model=model)
    with closing(loaded(config)) as method:
        named = dict(method.policy.causal.named_modules())
        in_four_bits = {name for name, module in named.items() if isinstance(module, bitsandbytes.nn.Linear4bit)}
        towers = {id(module) for tower in towers_of(method.policy.adapters.base) for module in tower.modules()}
        assert any("mlp" in name for name in in_four_bits)
        assert not any(id(named[name]) in towers for name in in_four_bits)
    code, whole, looks = running.train(config, tmp_path, name="whole")
    assert code == 0
    gaps = [line["policy/sampling_gap"] for line in running.metrics(whole) if "policy/sampling_gap" in line]
    assert max(gaps) < 1e-4
    code, stopped, _ = running.train(config, tmp_path, name="stopped", stop_at=int(looks * 0.8))
    assert code == 75
    assert running.go_on(stopped) == 0
    mine, its = running.weights(whole, 2), running.weights(stopped, 2)
    assert [name for name in mine if not torch.equal(mine[name], its[name])] == []
    merged = export(str(whole.path), merge=True).folder
    assert AutoModelForImageTextToText.from_pretrained(merged).get_input_embeddings().weight.dtype == torch.float32


def test_rows_of_text_train_the_language_part_of_a_model_that_comes_with_its_tower(
    folders: Any, tmp_path: Path
) -> None:
    """Transformers has no class for the language model of SmolVLM alone."""
    data = str(write_rows(tmp_path / "rows.jsonl", [{"prompt": f"say {i}", "answer": str(i)} for i in range(4)]))
    task = {"name": "rows", "data": data, "eval_data": data}
    run = {"num_steps": 1, "eval_every": 0}
    config = running.config("grpo", folders("smolvlm"), task=task, run=run)
    code, done, _ = running.train(config, tmp_path, name="run")
    assert code == 0
    assert done.read_config().model.with_images
    names = [name for name in running.weights(done, 1) if "lora_A" in name]
    assert names
    assert all(".vision_model." not in name and ".connector." not in name for name in names), sorted(names)[:3]


def test_a_model_without_a_processor_is_refused_before_its_weights_are_read(folders: Any, tmp_path: Path) -> None:
    kept = shutil.ignore_patterns("pre*", "processor_config.json", "*.safetensors")
    bare = shutil.copytree(folders("smolvlm"), tmp_path / "bare", ignore=kept)
    with pytest.raises(ValueError, match=r"has no preprocessor_config\.json"):
        loaded(settings(bare, tmp_path, num_steps=1))


# Reads a picture as any program would: by the class that config.json names, and by the processor in the same folder.
# The library reads videos in Qwen's processor, which needs torchvision; so its image part is read, beside the tokens.
READ = """
import json, sys, torch, transformers
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file

base, adapter, merged, processor_class = sys.argv[1:]

def model_of(folder):
    named = json.load(open(f"{folder}/config.json"))["architectures"]
    options = {"dtype": torch.float32, "output_loading_info": True}
    model, found = getattr(transformers, named[0]).from_pretrained(folder, **options)
    assert not any(map(len, (found["missing_keys"], found["unexpected_keys"], found["mismatched_keys"]))), found
    return model.eval()

def inputs_of(folder):
    processor = getattr(transformers, processor_class).from_pretrained(folder)
    given = {"images": [Image.open("picture.png")], "return_tensors": "pt"}
    if processor_class == "AutoProcessor":
        return processor(text=[open("text").read()], **given)
    return {**load_file("tokens.safetensors"), **processor(**given)}

with torch.no_grad():
    found = {"base": model_of(base)(**inputs_of(base)).logits, "merged": model_of(merged)(**inputs_of(merged)).logits}
    found["adapter"] = PeftModel.from_pretrained(model_of(base), adapter).eval()(**inputs_of(adapter)).logits
assert "tinyrl" not in sys.modules
save_file({name: values.contiguous() for name, values in found.items()}, "logits.safetensors")
"""


def write_prompt(base: Path, folder: Path) -> Any:
    """Write a picture, the text of a prompt with it, and its tokens into a folder; return what a model reads."""
    generator = torch.Generator().manual_seed(0)
    colours = torch.randint(0, 256, (32, 32, 3), generator=generator, dtype=torch.uint8)
    picture = PILImage.fromarray(colours.numpy())
    picture.save(folder / "picture.png")
    processor: Any = load_processor(str(base), tokenizer=load_tokenizer(str(base)))
    parts = [{"type": "image"}, {"type": "text", "text": "sort c b a"}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    (folder / "text").write_text(text)
    inputs = processor(images=[picture], text=[text], return_tensors="pt")
    names = {"input_ids", "mm_token_type_ids"} & inputs.keys()
    save_file({name: inputs[name] for name in names}, folder / "tokens.safetensors")
    return inputs


@pytest.mark.slow
@pytest.mark.parametrize("family", ORDER)
def test_exports_are_read_on_a_picture_as_the_policy_is(folders: Any, runs: Any, family: str, tmp_path: Path) -> None:
    """In a process without tinyrl."""
    base = folders(family)
    run = runs(family, False)
    inputs = write_prompt(base, tmp_path)
    processor = "AutoImageProcessor" if family.startswith("qwen") else "AutoProcessor"
    given = [str(base), str(export(str(run.path)).folder), str(export(str(run.path), merge=True).folder), processor]
    done = subprocess.run([sys.executable, "-c", READ, *given], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "logits.safetensors")
    own = load_image_text_model(str(base), dtype=torch.float32)
    policy = load_start_adapter(own, str(run.checkpoints / "step-000001"), with_images=True).eval()
    with torch.no_grad():
        ours = policy(**inputs).logits
    assert (ours - found["base"]).abs().max() > 1e-3
    torch.testing.assert_close(found["adapter"], ours, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found["merged"], ours, atol=1e-4, rtol=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("family", ["smolvlm", "gemma3"])
def test_a_fully_trained_model_is_exported_whole_with_its_processor(folders: Any, runs: Any, family: str) -> None:
    run = runs(family, True)
    bundle = export(str(run.path))
    folder = bundle.folder
    assert bundle.commands["serve"] == f"vllm serve {folder}"
    assert any("max_pixels" in note for note in bundle.notes)
    exported = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    saved = load_image_text_model(str(run.checkpoints / "step-000001"), dtype=torch.float32)
    ours, theirs = saved.state_dict(), exported.state_dict()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert type(AutoProcessor.from_pretrained(folder)) is type(AutoProcessor.from_pretrained(folders(family)))
