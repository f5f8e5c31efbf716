"""Supervised fine-tuning and reward models: they learn, resume exactly, and leave what PPO can use."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.config.recipe import load_config
from tinyrl.config.schema import Config
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.models.reward_model import load_reward_model
from tinyrl.rollout.load import load_method
from tinyrl.runs.launched import Options
from tinyrl.runs.run_dir import RunDir
from tinyrl.training.sft import turns_of

RUN = {"num_steps": 30, "eval_every": 10, "save_every": 10, "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", pad_is_eos=True)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts whose completion repeats their letter; the rejected one is something else."""
    folder = tmp_path_factory.mktemp("rows")
    letters = "abcdefghijklmnopqrstuvwxyz"
    lines = [
        {"prompt": f"{a}{b}:", "completion": a * 3, "chosen": "yes yes" + a, "rejected": "no no no" + a}
        for a in letters
        for b in letters[:4]
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


def settings(method: str, model: Path, rows: Path, *, lora: bool, **sections) -> Config:
    rate = {"optim": {"learning_rate": 1e-2 if lora else 3e-3}}
    values = {"method": method, "model": {"path": str(model)}, "lora": {"enabled": lora}, "task": {"data": str(rows)}}
    return Config.model_validate({**values, **rate, "run": RUN, **sections})


def test_text_training_resumes_exactly(model: Path, rows: Path, tmp_path: Path) -> None:
    """With LoRA's dropout on: its generator is part of the checkpoint. A step that is stopped between two micro-batches
    is done again with the dropout that it began with.
    """
    chosen = settings("sft", model, rows, lora=True)
    chosen.lora.dropout = 0.1
    chosen.run.num_steps, chosen.run.micro_batch_tokens = 6, 300
    _, whole, looks = running.train(chosen, tmp_path, name="whole")
    for stop_at in range(looks // 2, looks // 2 + 3):
        code, stopped, _ = running.train(chosen, tmp_path, name=f"stopped-{stop_at}", stop_at=stop_at)
        assert code == 75
        assert running.go_on(stopped) == 0
        assert running.lasting(whole) == running.lasting(stopped)
        ours, theirs = running.weights(whole, 6), running.weights(stopped, 6)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_reward_model_is_a_plain_classifier_with_centred_scores(model: Path, rows: Path, tmp_path: Path) -> None:
    code, run, _ = running.train(settings("reward", model, rows, lora=False), tmp_path)
    assert code == 0
    assert running.metrics(run)[-1]["eval/accuracy"] > 0.9
    folder = run.checkpoints / "step-000030"
    reward = load_reward_model(str(folder), dtype=torch.float32, label=None, device=torch.device("cpu"))
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    texts = [line["prompt"] + line[side] for side in ("chosen", "rejected") for line in lines]
    tokens = [reward.tokenizer.encode(text) for text in texts]
    scores = reward.scores(tokens, micro_batches=MicroBatches(torch.device("cpu"), 512))
    chosen, rejected = scores[: len(lines)], scores[len(lines) :]
    assert sum(a > b for a, b in zip(chosen, rejected, strict=True)) > 0.9 * len(lines)
    assert abs(sum(chosen) + sum(rejected)) / (2 * len(lines)) < 0.2  # training pairs and a few held-out ones
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 1


def test_a_reward_model_trained_in_bfloat16_is_saved_as_it_was_trained(rows: Path, tmp_path: Path) -> None:
    """The base may be bfloat16 (the default on a GPU); what is trained is float32, and is not rounded when saved."""
    base = tiny_model(tmp_path / "base", "llama")
    config = settings("reward", base, rows, lora=False)
    config.model.dtype, config.run.num_steps = "bfloat16", 2
    _, run, _ = running.train(config, tmp_path)
    saved = running.weights(run, 2)["model.safetensors:model.layers.0.mlp.up_proj.weight"]
    assert saved.dtype == torch.float32
    assert not torch.equal(saved, saved.bfloat16().float())


def test_what_train_reward_says_at_its_end_can_be_typed_anywhere(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Trained with relative paths in one folder; the printed command is run in that folder, its run resumed in another;
    a full fine-tune is a model, not an adapter.
    """
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    (here / "base").symlink_to(model)
    shutil.copyfile(rows, "rows.jsonl")
    few = settings("reward", Path("base"), Path("rows.jsonl"), lora=False, run={**RUN, "num_steps": 2})
    few.task.system_prompt = "Say: yes"
    running.train(few, Path("runs"), name="rm")
    printed = capsys.readouterr().out.splitlines()
    program, train, method, *overrides = shlex.split(next(line for line in printed if line.startswith("next"))[9:])
    assert (program, train, method) == ("tinyrl", "train", "ppo")
    ppo = load_config(method, None, overrides=[*overrides, "ppo.num_prompts=4", "ppo.minibatch_size=4"])
    ppo.generation.max_new_tokens, ppo.run.num_steps, ppo.run.eval_prompts, ppo.run.threads = 4, 2, 4, 1
    code, run, _ = running.train(ppo, Path("runs"), name="ppo")
    assert code == 0
    assert ppo.task.system_prompt == "Say: yes"
    written = run.read_config()
    assert written.reward.model == str(here / "runs/rm/checkpoints/step-000002")
    assert (written.model.path, written.task.data) == (str(here / "base"), str(here / "rows.jsonl"))
    saved = json.loads((run.checkpoints / "step-000002/adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(here / "base")
    monkeypatch.chdir(tmp_path)
    moved = RunDir(tmp_path / "here/runs/ppo")
    longer = moved.read_config(["run.num_steps=3"])
    assert running.go_on(moved, config=longer, allow_config_change=True) == 0


def test_loss_on_all_keeps_separators_inside_a_text(model: Path, rows: Path) -> None:
    """Where bos is eos, only the token in front is the sequence's start; the others end turns."""
    chosen = settings("sft", model, rows, lora=True, sft={"loss_on": "all"})
    parts = load_method(chosen, options=Options(device="cpu"))
    tokenizer = parts.policy.tokenizer
    eos = tokenizer.eos_token_id
    tokenizer.bos_token = tokenizer.eos_token
    row = {"prompt": f"{tokenizer.eos_token}ab{tokenizer.eos_token}cd", "completion": "ef"}
    [(start, (target,), *_)] = turns_of(row, parts, system_prompt=None)
    letters = [tokenizer(c, add_special_tokens=False)["input_ids"] for c in ("ab", "cd", "ef")]
    assert start == [eos]
    assert target == [*letters[0], eos, *letters[1], *letters[2], eos]
    parts.close()


@pytest.mark.parametrize(("loss_on", "kept"), [("completion", 2), ("all", 3)])
def test_answers_that_are_empty_are_left_out(loss_on: str, kept: int, model: Path, tmp_path: Path) -> None:
    """One with a prompt teaches the prompt where all counts."""
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": " "}, {"text": ""}, {"text": "d"}]
    data = str(tmp_path / "rows.jsonl")
    Path(data).write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"data": data, "eval_data": data}
    values = {"method": "sft", "model": {"path": str(model)}, "task": task, "sft": {"loss_on": loss_on}}
    parts = load_method(Config.model_validate(values), options=Options(device="cpu"))
    assert len(parts.train_rows) == len(parts.held_out) == kept
    assert len([note for note in parts.notes if f"{4 - kept} of 4 rows" in note]) == 2
    parts.close()
