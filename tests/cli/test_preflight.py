"""Checks before torch is imported: models and rows that do not exist, targets of eval."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tinyrl.config.recipe import dump_config
from tinyrl.config.schema import Config
from tinyrl.evaluation.prepared import prepare_evaluation
from tinyrl.evaluation.targets import Asked
from tinyrl.rollout.preflight import check_before_loading
from tinyrl.runs import checkpoint as checkpoints

ROWS = [{"prompt": f"say {n}", "answer": str(n), "chosen": "yes", "rejected": "no", "text": "abc"} for n in range(12)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with rows, models, an adapter, a reward and runs with and without a checkpoint in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "pickled", "runs/mine/checkpoints/step-000010", "runs/new"):
        Path(name).mkdir(parents=True)
    for run in ("runs/mine", "runs/new"):
        config = Config.model_validate({"method": "grpo", "task": {"data": "rows.jsonl"}})
        Path(run, "config.yaml").write_text(dump_config(config))
    checkpoint = Path("runs/mine/checkpoints/step-000010")
    (checkpoint / "adapter_config.json").write_text("{}")
    checkpoints.seal(checkpoint, 10)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("rewards.py").write_text("def score(prompts, completions):\n    return []\n")
    for name in ("model", "pickled"):
        Path(name, "config.json").write_text("{}")
    Path("model/model.safetensors").write_text("")
    Path("pickled/pytorch_model.bin").write_bytes(b"\x80\x04")


def check(method: str = "grpo", **sections: Any) -> None:
    values = {"method": method, "task": {"data": "rows.jsonl"}, "model": {"path": "model"}, **sections}
    check_before_loading(Config.model_validate(values))


def refused(method: str = "grpo", **sections: Any) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        check(method, **sections)
    assert type(caught.value) is ValueError
    assert len(str(caught.value).splitlines()) <= 6
    return str(caught.value)


def function(use: str) -> dict[str, Any]:
    return {"functions": [{"use": use}]}


IN_ORDER: list[dict[str, Any]] = [
    {"model": {"path": "owner/name", "revision": "1f0c"}},
    {"model": {"path": "runs/mine/checkpoints/step-000010"}},
    {"model": {"path": "model", "adapter": "runs/mine"}},
    {"task": {"data": "owner/name:main@train"}},  # it may be on the hub
    {"reward": {**function("rewards.py:score"), "model": "runs/mine"}},
    {"run": {"threads": 4}},
]
REFUSED: list[tuple[dict[str, Any], str]] = [  # and what is named
    ({"model": {"path": "./modle"}}, "`model`"),
    ({"model": {"path": "startr"}}, "`starter`"),
    ({"model": {"path": "pickled"}}, "pytorch_model.bin"),
    ({"model": {"path": "rows.jsonl"}}, "model.path=rows.jsonl is a file"),
    ({"model": {"path": "runs/new"}}, "model.path=runs/new"),
    ({"model": {"path": "model", "adapter": "runs/new"}}, "model.adapter=runs/new"),
    ({"reward": {"model": "runs/new"}}, "reward.model=runs/new"),
    ({"reward": function("reward.py:score")}, "reward.py"),
    ({"task": {}}, "task.data is missing"),
    ({"task": {"name": "srot"}}, "srot"),
    *(({"task": {"data": name}}, name) for name in ("nowhere.jsonl", "./a/b", "model")),
    *(({"task": {"data": "x" * 5000 + ending}}, "xxx...") for ending in ("", ".jsonl")),
    ({"run": {"threads": 100_000}}, "run.threads=100000"),
]


def test_what_is_in_order() -> None:
    for sections in IN_ORDER:
        check(**sections)


@pytest.mark.parametrize(("sections", "named"), REFUSED)
def test_what_is_not_there_is_refused(sections: dict[str, Any], named: str) -> None:
    assert named in refused(**sections)


def test_methods_have_checks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("ppo", "sft", "reward", "dpo"):
        check(method)
    check("ppo", ppo={"ptx_coef": 1.0, "ptx_data": "owner/name"}, critic={"path": "runs/mine"})
    assert "nowhere.jsonl" in refused("ppo", ppo={"ptx_coef": 1.0, "ptx_data": "nowhere.jsonl"})
    assert "critic.path=/no/such/place" in refused("ppo", critic={"path": "/no/such/place"})
    assert "task.data is missing" in refused("sft", task={})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "run.trackers: trackio" in refused(run={"trackers": ["trackio"]})


def test_targets_of_an_evaluation() -> None:
    for target in ("runs/mine", "runs/mine/checkpoints/step-000010"):
        prepare_evaluation(target, Asked())
    Path("config.yaml").write_text("somebody else's")  # a stray config.yaml does not make the model a run
    prepare_evaluation("model", Asked(task="sort"), vs="start")
    for vs in ("base", "model", "owner/name"):
        prepare_evaluation("runs/mine", Asked(), vs=vs)
    for target, vs, task, named in (
        ("runs/mien", None, None, "runs/mien is not a run.*`runs/mine`"),
        ("model", None, None, "model is not a run.*--task"),
        ("runs/mine", "modle", None, "model=modle"),
        ("runs/mine", None, "srot", "task.name.*srot"),
    ):
        with pytest.raises(ValueError, match=named):
            prepare_evaluation(target, Asked(task=task), vs=vs)
