"""Settings settled on disk: absolute paths, runs named as models by their newest sound checkpoint, room for prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tinyrl.config.recipe import apply_overrides, as_override, dump_config
from tinyrl.config.schema import Config
from tinyrl.config.yaml_reader import Source
from tinyrl.runs.checkpoint import write_checkpoint
from tinyrl.runs.resolve import absolute_paths, resolve
from tinyrl.runs.run_dir import named_run

REWARD = {"method": "reward", "task": {"data": "rows.jsonl"}, "model": {"path": "base"}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a model, rows, a reward file."""
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    Path("base/config.json").write_text(json.dumps({"max_position_embeddings": 100}))
    Path("rows.jsonl").write_text('{"prompt": "a"}\n')
    Path("rewards.py").write_text("def score(prompts, completions):\n    return []\n")
    return tmp_path


def a_run(name: str, values: dict[str, Any], *, steps: tuple[int, ...] = (2, 4)) -> Path:
    """A run of this configuration with checkpoints, relative to the current folder."""
    run = Path("runs") / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(Config.model_validate(values)))
    for step in steps:
        write_checkpoint(run / "checkpoints", step, write=lambda folder: void((folder / "x").write_text("x")))
    return run


def void(_: object) -> None:
    """For a lambda whose value is not wanted."""


def settled(**values: Any) -> dict[str, Any]:
    return resolve(Config.model_validate({"method": "ppo", "task": {"data": "rows.jsonl"}, **values})).model_dump()


def test_paths_become_absolute_and_names_stay(folder: Path):
    functions = [{"use": "rewards.py:score", "weight": 2.0}, {"use": "package.module:score"}]
    got = settled(model={"path": "./base"}, reward={"functions": functions, "model": "owner/name"})
    assert got["model"]["path"] == str(folder / "base")
    assert got["task"]["data"] == str(folder / "rows.jsonl")
    assert got["reward"]["functions"] == [
        {"use": f"{folder}/rewards.py:score", "weight": 2.0},
        {"use": "package.module:score", "weight": 1.0},
    ]
    assert got["reward"]["model"] == "owner/name"
    agent = settled(environment={"agent": "rewards.py:score"})["environment"]["agent"]
    assert agent == f"{folder}/rewards.py:score"
    assert settled(ppo={"ptx_data": "rows.jsonl", "ptx_coef": 1.0})["ppo"]["ptx_data"] == str(folder / "rows.jsonl")
    embedded = settled(model={"path": "starter"}, reward={"model": "starter-reward"}, task={"data": "owner/set:main@x"})
    assert [embedded["model"]["path"], embedded["reward"]["model"]] == ["starter", "starter-reward"]
    assert embedded["task"]["data"] == "owner/set:main@x"


def test_settling_twice_changes_nothing_and_an_old_record_is_compared_as_it_was_meant(folder: Path):
    a_run("rm", REWARD)
    once = resolve(Config.model_validate({"method": "ppo", "model": {"path": "base"}, "reward": {"model": "runs/rm"}}))
    assert resolve(once) == once
    before = {"method": "ppo", "model": {"path": "base"}, "task": {"data": "rows.jsonl"}}
    kept = absolute_paths(before)
    assert kept["model"]["path"] == str(folder / "base")
    assert kept["task"]["data"] == str(folder / "rows.jsonl")
    assert before["model"]["path"] == "base"


def test_a_run_stands_for_its_newest_checkpoint_that_verifies(folder: Path, capsys: pytest.CaptureFixture[str]):
    run = a_run("rm", REWARD)
    checkpoints = folder / "runs/rm/checkpoints"
    assert settled(reward={"model": "runs/rm"})["reward"]["model"] == str(checkpoints / "step-000004")
    older = "runs/rm/checkpoints/step-000002"
    assert settled(reward={"model": older})["reward"]["model"] == str(checkpoints / "step-000002")
    (run / "checkpoints/step-000004/x").write_text("y")
    assert settled(reward={"model": "runs/rm"})["reward"]["model"] == str(checkpoints / "step-000002")
    assert "step-000004: x is not what was written" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is damaged: x is not what was written"):
        settled(reward={"model": "runs/rm/checkpoints/step-000004"})


def test_every_setting_that_takes_a_model_takes_a_run():
    a_run("lora", {"method": "sft", "task": {"data": "rows.jsonl"}})
    a_run("full", {"method": "sft", "task": {"data": "rows.jsonl"}, "lora": {"enabled": False}})
    a_run("rm", {**REWARD, "lora": {"enabled": False}})
    assert settled(model={"adapter": "runs/lora"})["model"]["adapter"].endswith("runs/lora/checkpoints/step-000004")
    assert settled(model={"path": "runs/full"})["model"]["path"].endswith("runs/full/checkpoints/step-000004")
    for critic in ("runs/full", "runs/rm"):
        assert settled(critic={"path": critic})["critic"]["path"].endswith(f"{critic}/checkpoints/step-000004")


@pytest.mark.parametrize(
    ("key", "path", "sentence"),
    [
        ("reward.model", "runs/lora", "reward.model=runs/lora is a sft run; a reward model is made by"),
        ("model.adapter", "runs/rm", "model.adapter=runs/rm is a reward model: reward.model=runs/rm"),
        ("model.path", "runs/rm", "model.path=runs/rm is a reward model: reward.model=runs/rm"),
        ("model.adapter", "runs/full", "was fully fine-tuned, so it is a model: model.path=runs/full"),
        ("model.path", "runs/lora", "its base and it are model.path=starter model.adapter=runs/lora"),
        ("critic.path", "runs/lora", "critic.path=runs/lora holds adapters, not a whole model"),
        ("reward.model", "runs/new", "runs/new has no checkpoint yet"),
    ],
)
def test_a_run_that_is_something_else_is_refused_with_its_place(key: str, path: str, sentence: str):
    a_run("lora", {"method": "sft", "task": {"data": "rows.jsonl"}})
    a_run("full", {"method": "sft", "task": {"data": "rows.jsonl"}, "lora": {"enabled": False}})
    a_run("rm", REWARD)
    a_run("new", REWARD, steps=())
    section, name = key.split(".")
    with pytest.raises(ValueError, match=r"\S") as caught:
        settled(**{section: {name: path}})
    assert sentence in str(caught.value)


def test_rank_alpha_and_targets_are_those_of_the_adapter_that_is_started_from():
    run = a_run("sft", {"method": "sft", "task": {"data": "rows.jsonl"}})
    own = {"r": 32, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], "lora_dropout": 0.1}
    (run / "checkpoints/step-000004/adapter_config.json").write_text(json.dumps(own))
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text(json.dumps(own))
    for path in ("adapter", "runs/sft/checkpoints/step-000004"):
        lora = settled(model={"path": "base", "adapter": path})["lora"]
        expected = {"r": 32, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}
        assert lora == {"enabled": True, "dropout": 0.0, **expected}
    assert settled(model={"path": "base"})["lora"]["r"] == 16
    Path("adapter/adapter_config.json").unlink()  # of a run that is evaluated after its start has gone
    assert settled(model={"path": "base", "adapter": "adapter"}, lora={"r": 32})["lora"]["r"] == 32


PPO = {"method": "ppo", "task": {"data": "rows.jsonl"}, "model": {"path": "starter"}}


def test_a_critic_that_starts_from_a_run_is_of_its_kind_unless_somebody_says_otherwise():
    a_run("adapter", PPO)
    a_run("shared", {**PPO, "critic": {"kind": "shared-detached"}})
    a_run("own", {**PPO, "critic": {"kind": "separate"}})
    a_run("full", {**PPO, "lora": {"enabled": False}})
    a_run("rm", {**REWARD, "model": {"path": "starter"}})
    a_run("rm-full", {**REWARD, "lora": {"enabled": False}})
    kinds = {"adapter": "adapter", "shared": "shared-detached", "own": "separate", "full": "separate", "rm": "adapter"}
    for run, kind in {**kinds, "rm-full": "separate"}.items():
        values = settled(critic={"path": f"runs/{run}"})
        assert values["critic"]["kind"] == kind
        assert values["critic"]["path"].endswith(f"runs/{run}/checkpoints/step-000004")
        again = resolve(Config.model_validate(values))
        assert again.model_dump() == values
    assert settled(critic={"path": "runs/shared", "kind": "shared"})["critic"]["kind"] == "shared"
    assert settled(critic={"path": "base"})["critic"]["kind"] == "separate"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"critic": {"path": "base", "kind": "shared"}}, "critic.path=base is a model, for critic.kind=separate"),
        ({"critic": {"path": "runs/a", "kind": "separate"}}, "critic.path=runs/a is for critic.kind=adapter; critic.k"),
        ({"critic": {"path": "runs/rm", "kind": "shared"}}, "critic.path=runs/rm is for critic.kind=adapter; critic."),
        ({"critic": {"path": "runs/own"}, "lora": {"enabled": False}}, "critic.path=runs/own holds a critic of adapte"),
        ({"critic": {"path": "runs/a"}, "lora": {"enabled": False}}, "critic.kind=adapter needs lora.enabled=true"),
        ({"critic": {"path": "runs/a"}, "model": {"path": "base"}}, "reads the states of model.path=starter; model.pa"),
        ({"critic": {"path": "runs/drawn"}}, "critic.path=runs/drawn holds adapters on weights drawn at random"),
        ({"critic": {"path": "runs/grpo"}}, "critic.path=runs/grpo holds adapters, not a whole model, and no critic:"),
    ],
)
def test_a_critic_that_does_not_fit_is_refused(values: dict[str, Any], sentence: str):
    a_run("a", PPO)
    a_run("own", {**PPO, "critic": {"kind": "separate"}})
    a_run("rm", {**REWARD, "model": {"path": "starter"}})
    a_run("grpo", {**PPO, "method": "grpo"})
    a_run("drawn", {**PPO, "model": {"path": "starter", "random_init": True}})
    with pytest.raises(ValueError, match=r"\S") as caught:
        settled(**{"model": {"path": "starter"}, **values})
    assert sentence in str(caught.value)


def test_a_model_beside_a_config_yaml_is_a_model():
    Path("base/config.yaml").write_text("of another tool")
    assert named_run("base") is None
    assert named_run("starter") is None


@pytest.mark.parametrize(
    ("positions", "room"),
    [
        ({"max_position_embeddings": 100}, 50),
        ({"n_positions": 90}, 45),
        ({"text_config": {"max_position_embeddings": 100}}, 50),
        ({"max_position_embeddings": 4096}, 256),
        ({}, 256),
        ({"max_position_embeddings": "many"}, 256),
        ([], 256),
    ],
)
def test_max_new_tokens_leaves_room_for_a_prompt_where_nobody_has_set_it(positions: Any, room: int):
    Path("base/config.json").write_text(json.dumps(positions))
    assert settled(model={"path": "base"})["generation"]["max_new_tokens"] == room
    asked = settled(model={"path": "base"}, generation={"max_new_tokens": 200})
    assert asked["generation"]["max_new_tokens"] == 200


def test_the_embedded_model_has_room_for_a_prompt_and_a_hub_model_keeps_the_default():
    assert settled(model={"path": "starter"})["generation"]["max_new_tokens"] == 128
    assert settled(model={"path": "owner/name"})["generation"]["max_new_tokens"] == 256


@pytest.mark.parametrize(
    "value", ["a b", "no", "3", "a: b", "# x", "x: [", "", "line\nbreak", "é\U0001f600", {"a": "q"}, None]
)
def test_an_override_is_read_back_as_it_was_meant(value: Any):
    assert apply_overrides(Source("", {}), [as_override("task.x", value)]).values == {"task": {"x": value}}
