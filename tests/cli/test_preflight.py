"""Checks before torch is imported: models and rows that do not exist, targets of eval."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tinyrl.cli.commands import app
from tinyrl.config.derive import rebuilt
from tinyrl.config.recipe import dump_config, load_config
from tinyrl.config.refusal import Refusal, refusals_at
from tinyrl.evaluation.prepared import prepare_evaluation
from tinyrl.evaluation.targets import Asked, policy_at
from tinyrl.rewards.rubric import check_rubrics
from tinyrl.rollout.preflight import check_before_loading
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.resolve import config_of

ROWS = [{"prompt": f"say {n}", "answer": str(n), "chosen": "yes", "rejected": "no", "text": "abc"} for n in range(12)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with rows, models, an adapter, a reward and runs with and without a checkpoint in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "pickled", "runs/mine/checkpoints/step-000010", "runs/new"):
        Path(name).mkdir(parents=True)
    for run in ("runs/mine", "runs/new"):
        config = config_of({"method": "grpo", "task": {"data": "rows.jsonl"}})
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
    check_before_loading(config_of(values))


def refused(method: str = "grpo", **sections: Any) -> str:
    with pytest.raises(Refusal) as caught:
        check(method, **sections)
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


def test_a_server_samples_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    served = {"engine": "server", "url": "http://127.0.0.1:1"}
    check(generation=served)
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "generation.engine=server" in refused(generation=served)


@pytest.mark.parametrize(("sections", "named"), REFUSED)
def test_what_is_not_there_is_refused(sections: dict[str, Any], named: str) -> None:
    assert named in refused(**sections)


@pytest.mark.parametrize(
    ("lines", "typed", "place"),
    [
        ("run:\n  threads: 100000\n", [], "r.yaml:4: "),
        ("reward:\n  functions:\n    - use: reward.py:score\n", [], "r.yaml:4: "),
        ("reward:\n  model: runs/new\n", [], "r.yaml:4: "),
        ("run:\n  trackers: [tensorboard]\n", [], "r.yaml:4: "),
        ("generation:\n  top_p: 0.9\n", [], "r.yaml:4: "),
        ("", ["task.data=nowhere.jsonl"], "override 'task.data=nowhere.jsonl': "),
        ("task:\n  data: rows.jsonl\n", ["task.name=srot"], "override 'task.name=srot': "),
        ("", ["model.path=./modle"], "override 'model.path=./modle': "),
    ],
)
def test_a_refusal_names_the_line_of_a_recipe_or_the_override(
    lines: str, typed: list[str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    Path("r.yaml").write_text(f"method: grpo\nmodel: {{path: model}}\n{lines}")
    result = CliRunner().invoke(app, ["train", "r.yaml", "task.data=rows.jsonl", *typed])
    assert result.exit_code == 2
    assert result.output.startswith(f"tinyrl: {place}")


def test_a_run_of_another_kind_is_refused_at_the_line_that_names_it() -> None:
    """Which runs/resolve.py finds, behind the checks."""
    Path("r.yaml").write_text("method: grpo\ntask: {data: rows.jsonl}\nmodel:\n  path: runs/mine\n")
    for command in (["check", "r.yaml", "--quick"], ["train", "r.yaml"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert result.output.splitlines()[-1].startswith("tinyrl: r.yaml:4: model.path=runs/mine is a grpo run")
    with pytest.raises(ValueError, match=r"^override 'reward\.model=runs/mine': "):
        policy_at("model", ["reward.model=runs/mine"])


def test_what_a_resume_refuses_is_placed_at_the_override_or_in_config_yaml() -> None:
    values = {"method": "grpo", "task": {"name": "sort"}, "generation": {"top_p": 0.9}}  # an earlier version's
    Path("runs/new/config.yaml").write_text(dump_config(rebuilt(values)))
    for run, typed, place in (
        ("runs/mine", ["run.threads=100000"], "override 'run.threads=100000': "),
        ("runs/new", [], "runs/new/config.yaml:"),
    ):
        result = CliRunner().invoke(app, ["train", "--resume", run, *typed])
        assert result.exit_code == 2
        assert result.output.startswith(f"tinyrl: {place}")


def test_what_a_recipe_lacks_is_missing_there() -> None:
    Path("r.yaml").write_text("method: sft\n")
    result = CliRunner().invoke(app, ["train", "r.yaml"])
    assert result.output.startswith("tinyrl: r.yaml: task.data is missing")


def test_of_a_judge_the_line_of_its_own_rubric_is_named() -> None:
    judge = "{use: judge, url: 'http://a:1', model: m, rubric: gone.md}"
    Path("r.yaml").write_text(
        f"method: grpo\ntask: {{data: rows.jsonl}}\nreward:\n  functions:\n    - use: rewards.py:score\n    - {judge}\n"
    )
    config = load_config("grpo", "r.yaml", overrides=[])
    with pytest.raises(ValueError, match=r"^r\.yaml:6: .*gone\.md"), refusals_at(config.given.places):
        check_rubrics(config)


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


def test_a_setting_of_an_evaluation_is_refused_by_its_override() -> None:
    with pytest.raises(ValueError, match=r"^override 'reward\.model=\./gone': "):
        prepare_evaluation("model", Asked(task="sort", settings=("reward.model=./gone",)))
