"""Settings resolved on disk: absolute paths, runs named as models, room for prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tinyrl.config.recipe import dump_config
from tinyrl.runs.checkpoint import write_checkpoint
from tinyrl.runs.resolve import check_room_for_responses, config_of, resolve, room_for_prompt

SFT = {"method": "sft", "task": {"data": "rows.jsonl"}}
REWARD = {"method": "reward", "task": {"data": "rows.jsonl"}, "model": {"path": "base"}}
PPO = {"method": "ppo", "task": {"data": "rows.jsonl"}, "model": {"path": "starter"}}
FULL = {"lora": {"enabled": False}}


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
    (run / "config.yaml").write_text(dump_config(config_of(values)))

    def write(folder: Path) -> None:
        (folder / "x").write_text("x")

    for step in steps:
        write_checkpoint(run / "checkpoints", step, write=write)
    return run


def settled(**values: Any) -> dict[str, Any]:
    return resolve(config_of({"method": "ppo", "task": {"data": "rows.jsonl"}, **values})).model_dump()


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


def test_a_run_is_replaced_by_its_newest_checkpoint_that_verifies(folder: Path, capsys: pytest.CaptureFixture[str]):
    run = a_run("rm", REWARD)
    checkpoints = folder / "runs/rm/checkpoints"
    assert settled(reward={"model": "runs/rm"})["reward"]["model"] == str(checkpoints / "step-000004")
    older = "runs/rm/checkpoints/step-000002"
    assert settled(reward={"model": older})["reward"]["model"] == str(checkpoints / "step-000002")
    (run / "checkpoints/step-000004/x").write_text("y")
    assert settled(reward={"model": "runs/rm"})["reward"]["model"] == str(checkpoints / "step-000002")
    assert "step-000004: x is not what was written" in capsys.readouterr().err
    with pytest.raises(ValueError, match="step-000004 is damaged"):
        settled(reward={"model": "runs/rm/checkpoints/step-000004"})


def test_every_setting_that_takes_a_model_takes_a_run_of_its_kind_alone():
    reward = {**REWARD, "model": {"path": "starter"}}
    runs = {"lora": SFT, "full": SFT | FULL, "rm": reward, "rm-full": reward | FULL}
    for run, values in runs.items():
        a_run(run, values)
    a_run("new", REWARD, steps=())
    fitting = {
        "model.adapter": ("lora",),
        "model.path": ("full",),
        "critic.path": ("full", "rm", "rm-full"),
        "reward.model": ("rm", "rm-full"),
    }
    for key, fit in fitting.items():
        section, name = key.split(".")
        for run in (*runs, "new"):
            values: dict[str, Any] = {section: {name: f"runs/{run}"}}
            if section == "critic" and run in ("full", "rm-full"):
                values[section]["kind"] = "separate"
            if run in fit:
                assert settled(**values)[section][name].endswith(f"runs/{run}/checkpoints/step-000004")
            else:
                with pytest.raises(ValueError, match=f"{key}=runs/{run} |runs/new has no checkpoint"):
                    settled(**values)


def test_rank_alpha_and_targets_are_those_of_the_adapter_that_is_started_from():
    run = a_run("sft", SFT)
    own = {"r": 32, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], "lora_dropout": 0.1}
    own["target_parameters"] = ["experts.up_proj", "experts.down_proj"]
    (run / "checkpoints/step-000004/adapter_config.json").write_text(json.dumps(own))
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text(json.dumps(own))
    for path in ("adapter", "runs/sft/checkpoints/step-000004"):
        lora = settled(model={"path": "base", "adapter": path})["lora"]
        expected = {"r": 32, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}
        experts = {"target_parameters": ["experts.down_proj", "experts.up_proj"]}
        assert lora == {"enabled": True, "dropout": 0.0, **expected, **experts}
    assert settled(model={"path": "base"})["lora"]["r"] == 16


def test_a_critic_starts_from_a_run_of_its_kind():
    a_run("adapter", PPO)
    a_run("shared", {**PPO, "critic": {"kind": "shared-detached"}})
    a_run("own", {**PPO, "critic": {"kind": "separate"}})
    a_run("full", PPO | FULL)
    a_run("rm", {**REWARD, "model": {"path": "starter"}})
    a_run("rm-full", REWARD | FULL)
    kinds = {"adapter": "adapter", "shared": "shared-detached", "own": "separate", "full": "separate", "rm": "adapter"}
    for run, kind in {**kinds, "rm-full": "separate"}.items():
        values = settled(critic={"path": f"runs/{run}", "kind": kind})
        assert values["critic"]["path"].endswith(f"runs/{run}/checkpoints/step-000004")
        assert resolve(config_of(values)).model_dump() == values  # idempotent
    assert settled(critic={"path": "runs/shared", "kind": "shared"})["critic"]["kind"] == "shared"
    assert settled(critic={"path": "runs/rm"})["critic"]["kind"] == "adapter"
    Path("base/config.yaml").write_text("of another tool")  # which makes a model no run
    assert settled(critic={"path": "base", "kind": "separate"})["critic"]["kind"] == "separate"


def test_a_critic_that_does_not_fit_is_refused():
    a_run("a", PPO)
    a_run("own", {**PPO, "critic": {"kind": "separate"}})
    a_run("rm", {**REWARD, "model": {"path": "starter"}})
    a_run("grpo", {**PPO, "method": "grpo"})
    unfit: list[dict[str, Any]] = [
        {"critic": {"path": "base"}},  # a model has no critic
        {"critic": {"path": "runs/a", "kind": "separate"}},  # of another kind
        {"critic": {"path": "runs/rm", "kind": "shared"}},
        {"critic": {"path": "runs/own", "kind": "separate"}, **FULL},  # a critic of adapters
        {"critic": {"path": "runs/a"}, **FULL},
        {"critic": {"path": "runs/a"}, "model": {"path": "base"}},  # on another base
        {"critic": {"path": "runs/grpo"}},  # no critic
    ]
    for values in unfit:
        with pytest.raises(ValueError, match=r"critic\.(path|kind)="):
            settled(**{"model": {"path": "starter"}, **values})


def test_max_new_tokens_leaves_room_for_a_prompt_where_nobody_has_set_it():
    for positions, room in (
        ({"max_position_embeddings": 100}, 50),
        ({"n_positions": 90}, 45),
        ({"text_config": {"max_position_embeddings": 100}}, 50),
        ({"max_position_embeddings": 4096}, 256),
    ):
        Path("base/config.json").write_text(json.dumps(positions))
        assert settled(model={"path": "base"})["generation"]["max_new_tokens"] == room
    asked = settled(model={"path": "base"}, generation={"max_new_tokens": 200})
    assert asked["generation"]["max_new_tokens"] == 200
    assert settled(model={"path": "starter"})["generation"]["max_new_tokens"] == 128
    assert settled(model={"path": "owner/name"})["generation"]["max_new_tokens"] == 256


@pytest.mark.parametrize(("tokens", "positions", "fits"), [(99, 100, True), (100, 100, False), (300, 100, False)])
def test_a_response_leaves_a_position_for_the_prompt(tokens: int, positions: int, fits: bool, folder: Path):
    Path("base/config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    values = {"model": {"path": "base"}, "generation": {"max_new_tokens": tokens}}
    config = config_of({"method": "grpo", **values})
    if fits:
        check_room_for_responses(config)
    else:
        with pytest.raises(ValueError, match=r"generation\.max_new_tokens=50$"):
            check_room_for_responses(config)


def test_a_prompt_that_is_too_long_gets_an_advice_that_makes_room() -> None:
    """Of 256 positions; where no advice does, none is given."""
    for longest, new, between, advised in (
        (150, 100, 0, ["generation.max_prompt_tokens=150"]),
        (156, 100, 0, ["generation.max_prompt_tokens=156"]),
        (157, 100, 0, ["generation.max_prompt_tokens=157", "generation.max_new_tokens=99"]),
        (120, 100, 60, ["generation.max_prompt_tokens=120", "generation.max_new_tokens=76"]),
        (90, 200, 0, ["generation.max_new_tokens=166"]),  # the limit of prompts would do
        (231, 100, 0, ["generation.max_prompt_tokens=231", "generation.max_new_tokens=25"]),
        (232, 100, 0, []),
        (683, 100, 0, []),
    ):
        values = {"method": "grpo", "generation": {"max_new_tokens": new, "max_prompt_tokens": 100}}
        sentence = room_for_prompt(config_of(values), longest, positions=256, between=between)
        assert sentence.startswith(" ".join(["Set", *advised]) if advised else "No limit")
        assert "environment" not in sentence


def test_a_prompt_for_which_replies_leave_no_room_gets_the_limits_of_replies() -> None:
    values = {"method": "grpo", "generation": {"max_new_tokens": 8, "max_prompt_tokens": 100}}
    sentence = room_for_prompt(config_of(values), 232, positions=256, between=60)
    assert "environment.max_turns" in sentence
    assert "environment.max_observation_tokens" in sentence


def test_an_advice_that_another_setting_forbids_is_not_given() -> None:
    """Responses of 40 tokens have no 60 tokens to penalise."""
    values: dict[str, Any] = {"method": "grpo", "generation": {"max_new_tokens": 100, "max_prompt_tokens": 300}}
    free, bound = (config_of({**values, "reward": {"overlong_tokens": n}}) for n in (40, 60))
    assert "max_new_tokens=40" in room_for_prompt(free, 216, positions=256, between=0)
    assert not room_for_prompt(bound, 216, positions=256, between=0).startswith("Set")


@pytest.mark.parametrize(
    "damaged",
    [
        "[1]", "null", "[" * 100_000, '{"text_config": [1]}', '{"n_positions": "many"}', '{"n_positions": true}',
        '{"max_position_embeddings": 0}', '{"max_position_embeddings": -5}',
    ],
)  # fmt: skip
def test_a_damaged_config_json_sets_no_lengths(folder: Path, damaged: str):
    (folder / "damaged").mkdir()
    (folder / "damaged" / "config.json").write_text(damaged)
    (folder / "damaged" / "model.safetensors").write_text("")
    assert settled(model={"path": "damaged"})["generation"] == settled(model={"path": "owner/name"})["generation"]
