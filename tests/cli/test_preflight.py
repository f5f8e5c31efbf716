"""Checks before torch is imported: models and rows that do not exist, targets of eval."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tinyrl.cli.preflight import check_before_loading, check_evaluation, go_offline_if_unreachable
from tinyrl.config.recipe import dump_config
from tinyrl.config.schema import Config
from tinyrl.evaluation.targets import Asked

ROWS = [{"prompt": f"say {n}", "answer": str(n), "chosen": "yes", "rejected": "no", "text": "abc"} for n in range(12)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with rows.jsonl and a model's folder in it."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("model/model.safetensors").write_text("")
    return tmp_path


def check(method: str = "grpo", **sections: Any) -> None:
    values = {"method": method, "task": {"data": "rows.jsonl"}, "model": {"path": "model"}, **sections}
    check_before_loading(Config.model_validate(values))


def refused(method: str = "grpo", **sections: Any) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        check(method, **sections)
    assert type(caught.value) is ValueError
    assert len(str(caught.value).splitlines()) <= 6
    return str(caught.value)


@pytest.mark.parametrize("method", ["grpo", "ppo", "sft", "reward", "dpo"])
def test_what_is_in_order(method: str):
    check(method)
    check(method, model={"path": "owner/name"})
    check(method, model={"path": "starter"})


def test_trackers_are_checked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refused(run={"trackers": ["trackio"]}) == "run.trackers: trackio is not installed: pip install trackio"


# Models


def test_a_revision_is_for_the_hub():
    hub = {"data": "a/b:main", "revision": "1f0c"}
    check(model={"path": "owner/name", "revision": "1f0c"})
    for more in ({}, {"eval_data": "a/b@test"}, {"eval_data": "rows.jsonl"}):
        check(task={**hub, **more})
    for path in ("model", "starter"):
        assert refused(model={"path": path, "revision": "1f0c"}).startswith("model.revision=1f0c")
    for where in ({**hub, "eval_data": "c/d"}, {"data": "rows.jsonl", "revision": "1f0c"}):
        assert refused(task=where).startswith("task.revision=1f0c")


@pytest.mark.parametrize(
    ("section", "name", "path", "parts"),
    [
        ("model", "path", "./modle", ["model.path=./modle", "Did you mean `model`?"]),
        ("model", "path", "startr", ["Did you mean `starter`?"]),
        ("critic", "path", "/no/such/place", ["critic.path=/no/such/place"]),
        ("reward", "model", "~nobody/x/y", ["reward.model=~nobody/x/y"]),
        ("model", "path", "x" * 5000, ["model.path=xxx"]),
        ("model", "path", "pickled", ["model.path=pickled", "pytorch_model.bin", "safetensors"]),
        ("model", "path", "empty", ["model.path=empty", "config.json"]),
        ("model", "path", "rows.jsonl", ["model.path=rows.jsonl is a file"]),
        ("model", "adapter", "adapter", ["model.adapter=adapter", "adapter_model.safetensors"]),
        ("model", "adapter", "nowhere", ["model.adapter=nowhere", "adapter_config.json"]),
    ],
)
def test_a_folder_that_is_no_model(section: str, name: str, path: str, parts: list[str]):
    for folder in ("pickled", "empty", "adapter"):
        Path(folder).mkdir()
    Path("pickled/config.json").write_text("{}")
    Path("pickled/pytorch_model.bin").write_bytes(b"\x80\x04")
    Path("adapter/adapter_config.json").write_text("{}")
    said = refused("ppo", **{section: {"path": "model", name: path} if section == "model" else {name: path}})
    assert all(part in said for part in parts)
    Path("pickled/model.safetensors").write_text("")
    check(model={"path": "pickled"})


def test_settings_of_an_adapter_that_differ_from_its_own_are_refused():
    Path("adapter").mkdir()
    own = {"r": 32, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"]}
    Path("adapter/adapter_config.json").write_text(json.dumps(own))
    Path("adapter/adapter_model.safetensors").write_text("")
    model = {"path": "model", "adapter": "adapter"}
    check(model=model)
    check(model=model, lora={"r": 32, "alpha": 8, "target_modules": ["q_proj", "v_proj"]})
    check(model=model, lora={"target_modules": "all-linear"})  # which an adapter is saved without
    for name, given in (("r", 8), ("r", 16), ("alpha", 32), ("target_modules", ["q_proj"])):
        assert refused(model=model, lora={name: given}).startswith(f"lora.{name}=")


@pytest.mark.parametrize(
    ("section", "name"), [("model", "path"), ("model", "adapter"), ("critic", "path"), ("reward", "model")]
)
def test_a_run_in_place_of_a_model(section: str, name: str):
    run = Path("runs/mine")
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(Config.model_validate({"method": "grpo"})))
    assert refused("ppo", **{section: {name: "runs/mine"}}).startswith(f"{section}.{name}=runs/mine: ")
    (run / "checkpoints/step-000010").mkdir()
    for path in ("runs/mine", "runs/mine/checkpoints/step-000010"):
        check("ppo", **{section: {name: path}})


# Rewards and tasks


@pytest.mark.parametrize(
    ("use", "sentence"),
    [("rewards.py:scoer", "Did you mean `score`?"), ("reward.py:score", "no file"), ("rewards.py", "file.py:function")],
)
def test_a_reward_that_is_not_there(use: str, sentence: str):
    Path("rewards.py").write_text("def score(prompts, completions):\n    return []\n")
    assert sentence in refused(reward={"functions": [{"use": use}]})
    check(reward={"functions": [{"use": "rewards.py:score"}]})


def test_a_task_that_is_not_there():
    assert refused(task={"name": "srot"}).startswith("task.name: there is no task 'srot'. Did you mean `sort`?")


@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_data_that_is_not_there(method: str):
    assert refused(method, task={}).startswith("task.data is missing")
    for source in ("rows.jsn", "nowhere.jsonl", "nowhere.parquet", "./a/b/c", "model", "gsm8k"):
        assert source in refused(method, task={"data": source})
        assert source in refused(method, task={"data": "rows.jsonl", "eval_data": source})
    check(method, task={"data": "owner/name:main@train"})  # it may be on the hub
    check("ppo", ppo={"ptx_coef": 1.0, "ptx_data": "owner/name"})
    assert "nowhere.jsonl" in refused("ppo", ppo={"ptx_coef": 1.0, "ptx_data": "nowhere.jsonl"})


# Targets of `tinyrl eval`


def test_targets_of_an_evaluation():
    run = Path("runs/mine")
    (run / "checkpoints/step-000010").mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(Config.model_validate({"method": "grpo"})))
    for target in ("runs/mine", "runs/mine/checkpoints/step-000010"):
        check_evaluation(target, Asked())
    check_evaluation("runs/mine", Asked(), vs="base")
    Path("config.yaml").write_text("somebody else's")  # a stray config.yaml does not make the model a run
    check_evaluation("model", Asked(task="sort"), vs="start")
    check_evaluation("runs/mine", Asked(), vs="model")
    check_evaluation("runs/mine", Asked(), vs="owner/name")  # of the hub
    for target, vs, task, sentence in (
        ("runs/mien", None, None, "runs/mien is not a run. Did you mean `runs/mine`?"),
        ("model", None, None, "model is not a run. To evaluate a model, say what on: --task NAME"),
        ("runs/mine", "mine", None, "mine is not a run: it does not exist. Did you mean `runs/mine`?"),
        ("runs/mine", "modle", None, "model=modle: there is no such folder"),
        ("runs/mine", "./mine", "sort", "mine is not a run: it does not exist. Did you mean `runs/mine`?"),
        ("runs/mine", None, "srot", "task.name: there is no task 'srot'. Did you mean `sort`?"),
    ):
        with pytest.raises(ValueError, match=r"\S") as caught:
            check_evaluation(target, Asked(task=task), vs=vs)
        assert str(caught.value).startswith(sentence)


def test_a_hub_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And that nothing is asked from then on is said."""
    asked: list[str] = []

    def refuse(request: object, *, timeout: float) -> None:
        asked.append(getattr(request, "full_url", ""))
        raise OSError("no network")

    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that it is taken away again
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    go_offline_if_unreachable(Config.model_validate({"method": "grpo", "task": {"name": "sort"}}))
    assert asked == []
    for _ in range(2):
        go_offline_if_unreachable(Config.model_validate({"method": "grpo", "model": {"path": "own/tiny"}}))
    assert len(asked) == 1
    assert capsys.readouterr().err.count("HF_HUB_OFFLINE") == 1
    assert os.environ["HF_HUB_OFFLINE"] == "1"
