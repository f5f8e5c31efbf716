"""Supervised fine-tuning and reward models: they learn, resume exactly, and leave what PPO can use."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForSequenceClassification

from tests import running
from tests.tiny_models import tiny_model, tiny_tokenizer
from tinyrl.config.methods import METHODS
from tinyrl.config.recipe import load_config
from tinyrl.config.schema import Config
from tinyrl.config.sections import RewardConfig
from tinyrl.data.rows import example_rows
from tinyrl.models import reward_model as reward_models
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.models.reward_model import load_reward_model
from tinyrl.models.roles import Roles
from tinyrl.rollout.components import Options, SamplingParts
from tinyrl.runs.run_dir import RunDir
from tinyrl.tasks.prompts import prepare_prompts, token_ids
from tinyrl.trainers import reward_model
from tinyrl.trainers.sft import Sft, turns_of

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
@pytest.mark.wide
def test_sft_learns(lora: bool, loss_on: str, model: Path, rows: Path, tmp_path: Path) -> None:
    code, run, _ = running.train(settings("sft", model, rows, lora=lora, sft={"loss_on": loss_on}), tmp_path)
    assert code == 0
    losses = [line["eval/loss"] for line in running.metrics(run) if "eval/loss" in line]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("method", ["sft", "reward", "dpo"])
@pytest.mark.wide
def test_text_training_resumes_exactly(method: str, lora: bool, model: Path, rows: Path, tmp_path: Path) -> None:
    """With LoRA's dropout on: its generator is part of the checkpoint. A step that is stopped between two micro-batches
    is done again with the dropout that it began with.
    """
    chosen = settings(method, model, rows, lora=lora)
    chosen.lora.dropout = 0.1 if lora else 0.0
    chosen.run.num_steps, chosen.run.micro_batch_tokens = 6, 300
    _, whole, looks = running.train(chosen, tmp_path, name="whole")
    for stop_at in range(looks // 2, looks // 2 + 3):
        code, stopped, _ = running.train(chosen, tmp_path, name=f"stopped-{stop_at}", stop_at=stop_at)
        assert code == 75
        assert running.go_on(stopped) == 0
        assert running.lasting(whole) == running.lasting(stopped)
        ours, theirs = running.weights(whole, 6), running.weights(stopped, 6)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("method", ["sft", "reward", "dpo"])
@pytest.mark.wide
def test_a_batch_is_at_most_all_rows(method: str, model: Path, rows: Path, tmp_path: Path) -> None:
    """Of 104 rows 94 are trained on: a larger batch is these, each once, and not a billion of them."""
    section = METHODS[method].own
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


# ---- what was reported is what PPO reads ----

# A template with a BOS of its own and closing tokens: <pad> stands for a BOS that the tokenizer puts before a text too.
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
FORMATS: dict[str, dict[str, Any]] = {
    "template": {},
    "system prompt": {"system_prompt": "Answer like a crowd."},
    "no template": {"chat": False},
    "plain system prompt": {"chat": False, "system_prompt": "Answer like a crowd."},
}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("chat"), "llama")
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token, tokenizer.chat_template = "<pad>", CHAT
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", tokenizer.pad_token_id)]
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.wide
def test_the_accuracy_reported_is_the_one_ppo_reads(
    lora: bool, form: str, chat_model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained under a system prompt or without the template, asked by a PPO run that has neither: the same tokens, so
    the same accuracy, and scores of the training pairs average 0.
    """
    config = settings("reward", chat_model, rows, lora=lora, run={**RUN, "num_steps": 3, "eval_every": 0})
    config.task = config.task.model_copy(update=FORMATS[form])
    code, made, _ = running.train(config, tmp_path, name="reward")
    assert code == 0
    trained = reward_model.RewardModel(config, options=Options(device="cpu"))
    folder = made.checkpoints / "step-000003"

    ppo = running.config("ppo", chat_model, task={"name": "rows", "data": str(rows), "max_samples": None})
    ppo.reward = RewardConfig(model=str(folder))
    parts = SamplingParts(ppo, options=Options(device="cpu"))
    bos, eos = parts.tokenizer.bos_token_id, parts.tokenizer.eos_token_id
    assert isinstance(bos, int)
    assert isinstance(eos, int)
    read: list[list[int]] = []
    batch_of, make = type(parts.roles).batch, reward_models.make_batch

    def noted(prompts: list[list[int]], responses: list[list[int]], **options: Any):
        read.extend(p + r for p, r in zip(prompts, responses, strict=True))
        return make(prompts, responses, **options)

    def noted_batch(roles: Roles, prompts: list[list[int]], responses: list[list[int]], *rest: Any, **options: Any):
        read.extend(p + r for p, r in zip(prompts, responses, strict=True))
        return batch_of(roles, prompts, responses, *rest, **options)

    monkeypatch.setattr(reward_models, "make_batch", noted)
    monkeypatch.setattr(Roles, "batch", noted_batch)

    def scored(lines: list[dict[str, str]], side: str) -> tuple[list[float], list[list[int]]]:
        """Scores and tokens read, of completions as the policy would sample them: in tokens, EOS at the end."""
        read.clear()
        prompts = prepare_prompts(
            parts.task, lines, tokenizer=parts.tokenizer, chat="auto", system_prompt=None, variables={},
            max_prompt_tokens=500, long_prompts="error",
        )  # fmt: skip
        completions = [[*token_ids(parts.tokenizer, line[side]), eos] for line in lines]
        return parts.scorer(prompts, completions).scores[:, 0].tolist(), sorted(read)

    train, held_out = example_rows(config)
    for index, side in enumerate(("chosen", "rejected")):
        assert scored(train, side)[1] == sorted(one.texts[index] for one in trained.train_rows)
        assert scored(held_out, side)[1] == sorted(one.texts[index] for one in trained.held_out)
    chosen, rejected = scored(held_out, "chosen")[0], scored(held_out, "rejected")[0]
    accuracy = sum((a > b) + (a == b) / 2 for a, b in zip(chosen, rejected, strict=True)) / len(chosen)
    line = running.metrics(made)[-1]
    assert accuracy == line["eval/accuracy"]
    margin = sum(a - b for a, b in zip(chosen, rejected, strict=True)) / len(chosen)
    assert margin == pytest.approx(line["eval/margin"], abs=1e-5)
    both = [*scored(train, "chosen")[0], *scored(train, "rejected")[0]]
    assert sum(both) / len(both) == pytest.approx(0, abs=1e-5)
    assert max(tokens.count(bos) for tokens in read) == 1
    parts.close()


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.wide
def test_what_train_reward_says_at_its_end_can_be_typed_anywhere(
    lora: bool, model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Trained with relative paths in one folder; the printed command is run in that folder, its run resumed in another;
    a full fine-tune is a model, not an adapter.
    """
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    (here / "base").symlink_to(model)
    shutil.copyfile(rows, "rows.jsonl")
    few = settings("reward", Path("base"), Path("rows.jsonl"), lora=lora, run={**RUN, "num_steps": 2})
    few.task.system_prompt = "Say: yes"
    running.train(few, Path("runs"), name="rm")
    printed = capsys.readouterr().out.splitlines()
    kind = next(line for line in printed if "step-000002" in line)
    assert kind.split() == ["adapter" if lora else "model", "runs/rm/checkpoints/step-000002/"]
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


@pytest.mark.slow
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
    parts = Sft(chosen, options=Options(device="cpu"))
    tokenizer = parts.tokenizer
    eos = tokenizer.eos_token_id
    tokenizer.bos_token = tokenizer.eos_token
    row = {"prompt": f"{tokenizer.eos_token}ab{tokenizer.eos_token}cd", "completion": "ef"}
    [(start, target, _)] = turns_of(row, parts, system_prompt=None)
    letters = [tokenizer(c, add_special_tokens=False)["input_ids"] for c in ("ab", "cd", "ef")]
    assert start == [eos]
    assert target == [*letters[0], eos, *letters[1], *letters[2], eos]
    parts.close()


@pytest.mark.parametrize("method", ["sft", "reward", "dpo"])
def test_one_row_is_trained_on_and_evaluated(method: str, tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 9)
    config = Config.model_validate({"method": method, "task": {"data": str(tmp_path / "rows.jsonl")}})
    assert example_rows(config) == ([row] * 9, [row])


@pytest.mark.parametrize(("loss_on", "kept"), [("completion", 2), ("all", 3)])
def test_answers_that_are_empty_are_left_out(loss_on: str, kept: int, model: Path, tmp_path: Path) -> None:
    """One with a prompt teaches the prompt where all counts."""
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": " "}, {"text": ""}, {"text": "d"}]
    data = str(tmp_path / "rows.jsonl")
    Path(data).write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"data": data, "eval_data": data}
    values = {"method": "sft", "model": {"path": str(model)}, "task": task, "sft": {"loss_on": loss_on}}
    parts = Sft(Config.model_validate(values), options=Options(device="cpu"))
    assert len(parts.train_rows) == len(parts.held_out) == kept
    assert len([note for note in parts.notes if f"{4 - kept} of 4 rows" in note]) == 2
    parts.close()


@pytest.mark.parametrize("prompt", [{"prompt": ""}, {"prompt": "a game:"}])
def test_rows_of_one_prompt_are_split_by_row(prompt: dict[str, str], tmp_path: Path) -> None:
    rows = [{**prompt, "completion": f"move {n}"} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config.model_validate({"method": "sft", "task": {"data": str(tmp_path / "rows.jsonl")}})
    train_rows, held_out = example_rows(config)
    assert (len(train_rows), len(held_out)) == (27, 3)
    assert [row for row in rows if row not in held_out] == train_rows
