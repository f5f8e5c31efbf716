"""Supervised fine-tuning and reward models: they learn, resume exactly, and leave what PPO can use."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.components import Options
from tinyrl.config.schema import Config
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.models.reward_model import load_reward_model
from tinyrl.trainers.sft import example, load

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


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("loss_on", ["completion", "all"])
def test_sft_learns(lora: bool, loss_on: str, model: Path, rows: Path, tmp_path: Path) -> None:
    code, run, _ = running.train(settings("sft", model, rows, lora=lora, sft={"loss_on": loss_on}), tmp_path)
    assert code == 0
    losses = [line["eval/loss"] for line in running.metrics(run) if "eval/loss" in line]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("method", ["sft", "reward"])
def test_text_training_resumes_exactly(method: str, lora: bool, model: Path, rows: Path, tmp_path: Path) -> None:
    """With LoRA's dropout on: its generator is part of the checkpoint."""
    chosen = settings(method, model, rows, lora=lora)
    chosen.lora.dropout = 0.1 if lora else 0.0
    chosen.run.num_steps = 6
    _, whole, looks = running.train(chosen, tmp_path, name="whole")
    code, stopped, _ = running.train(chosen, tmp_path, name="stopped", stop_at=looks // 2)
    assert code == 75
    assert running.go_on(stopped) == 0
    assert running.lasting(whole) == running.lasting(stopped)
    ours, theirs = running.weights(whole, 6), running.weights(stopped, 6)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("method", ["sft", "reward"])
def test_a_batch_is_at_most_all_rows(method: str, model: Path, rows: Path, tmp_path: Path) -> None:
    """Of 104 rows 94 are trained on: a larger batch is these, each once, and not a billion of them."""
    section = {"sft": "sft", "reward": "reward_model"}[method]
    runs = []
    for size in (94, 10**9):
        chosen = settings(method, model, rows, lora=True, **{section: {"batch_size": size}})
        chosen.run.num_steps = 2
        code, run, _ = running.train(chosen, tmp_path, name=f"of-{size}")
        assert code == 0
        runs.append(running.lasting(run))
    assert runs[0] == runs[1]


def test_reward_model_is_a_plain_classifier_with_centred_scores(model: Path, rows: Path, tmp_path: Path) -> None:
    code, run, _ = running.train(settings("reward", model, rows, lora=False), tmp_path)
    assert code == 0
    assert running.metrics(run)[-1]["eval/accuracy"] > 0.9
    folder = run.checkpoints / "step-000030"
    reward = load_reward_model(str(folder), dtype=torch.float32, label=None, device=torch.device("cpu"))
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    chosen, rejected = (
        reward.scores(
            [line["prompt"] + line[side] for line in lines], micro_batches=MicroBatches(torch.device("cpu"), 512)
        )
        for side in ("chosen", "rejected")
    )
    assert sum(a > b for a, b in zip(chosen, rejected, strict=True)) > 0.9 * len(lines)
    assert abs(sum(chosen) + sum(rejected)) / (2 * len(lines)) < 0.2  # training pairs and a few held-out ones
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 1


def test_reward_adapter_scores_in_ppo_on_the_shared_base(model: Path, rows: Path, tmp_path: Path) -> None:
    code, made, _ = running.train(settings("reward", model, rows, lora=True), tmp_path, name="reward")
    assert code == 0
    assert running.metrics(made)[-1]["eval/accuracy"] > 0.9
    adapter = made.checkpoints / "step-000030"
    ppo = running.config("ppo", model, reward={"functions": [], "model": str(adapter)})
    code, run, _ = running.train(ppo, tmp_path, name="ppo")
    assert code == 0
    assert running.metrics(run)[1]["reward/std"] > 0
    plain = running.config(
        "ppo",
        model,
        reward={"functions": [], "model": str(adapter)},
        model={"path": str(model)},
        lora={"enabled": False},
    )
    with pytest.raises(ValueError, match=r"needs lora\.enabled=true"):
        running.train(plain, tmp_path, name="refused")


def test_loss_on_all_keeps_separators_inside_a_text(model: Path, rows: Path) -> None:
    """Where bos is eos, only the token in front is the sequence's start; the others end turns."""
    chosen = settings("sft", model, rows, lora=True, sft={"loss_on": "all"})
    parts = load(chosen, options=Options(device="cpu"))
    tokenizer = parts.tokenizer
    eos = tokenizer.eos_token_id
    tokenizer.bos_token = tokenizer.eos_token
    row = {"prompt": f"{tokenizer.eos_token}ab{tokenizer.eos_token}cd", "completion": "ef"}
    start, target = example(row, parts)
    letters = [tokenizer(c, add_special_tokens=False)["input_ids"] for c in ("ab", "cd", "ef")]
    assert start == [eos]
    assert target == [*letters[0], eos, *letters[1], *letters[2], eos]
    parts.close()
