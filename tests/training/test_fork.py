"""Forks go on from a checkpoint as new runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import running
from tests.tiny_models import tiny_model
from tests.training.test_resume import contents, stopped_in_update
from tinyrl.rollout.components import Options
from tinyrl.runs.records import read_run
from tinyrl.runs.run_dir import RunDir
from tinyrl.tools.report.outcome import subtitle
from tinyrl.training.resume import fork

STEPS = 3
CPU = Options(device="cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


def trained(method: str, model: Path, folder: Path) -> RunDir:
    kept = {"num_steps": STEPS, "save_every": 1, "keep_checkpoints": 9, "eval_every": 2}
    sections: dict[str, dict[str, Any]] = {"run": kept}
    if method == "sft":
        rows = [{"prompt": f"say {word}:", "completion": f" {word}"} for word in "abcdefghijklmnop"]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sections["task"] = {"name": "rows", "data": str(folder / "rows.jsonl"), "max_samples": None}
    code, run, _ = running.train(running.config(method, model, **sections), folder, name="first")
    assert code == 0
    return run


@pytest.fixture(scope="module")
def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return trained("grpo", model, tmp_path_factory.mktemp("first"))


def forked(origin: str, *overrides: str, name: str = "second", output_dir: Path | None = None) -> RunDir:
    where = None if output_dir is None else str(output_dir)
    launch = fork(origin, [*overrides], options=CPU, output_dir=where, name=name, command=["test"])
    assert launch.go(report=running.report) == 0
    return launch.run


@pytest.mark.parametrize("method", [pytest.param("grpo"), pytest.param("ppo")])
@pytest.mark.wide
def test_an_unchanged_fork_is_the_run_again(method: str, model: Path, tmp_path: Path) -> None:
    run = trained(method, model, tmp_path)
    before = contents(run)
    again = forked(f"{run.path}@1")
    assert contents(run) == before
    assert running.lasting(again) == running.lasting(run)
    assert again.samples.read_bytes() == run.samples.read_bytes()
    now, then = running.weights(again, STEPS), running.weights(run, STEPS)
    assert now.keys() == then.keys()
    assert all(torch.equal(now[name], then[name]) for name in then)
    assert again.read_config().run.forked_from == f"{run.path.resolve()}@1"
    assert f"forked from {run.path.resolve()}@1"[:40] in subtitle(read_run(again.path))
    assert json.loads((again.path / "env.json").read_text())["command"] == "test"


def test_a_changed_fork_shares_the_beginning_only(first: RunDir, tmp_path: Path) -> None:
    again = forked(f"{first.path}@2", "optim.learning_rate=0.1", "run.num_steps=4", output_dir=tmp_path)
    there, here = running.lasting(first), running.lasting(again)
    assert [line["step"] for line in here] == [0, 1, 2, 3, 4]
    assert here[:3] == there[:3]
    assert here[3]["optim/learning_rate"] == pytest.approx(0.1)
    assert here[3]["reward/mean"] == there[3]["reward/mean"]  # sampled by the same weights
    assert again.read_config().optim.learning_rate == 0.1


def test_a_fork_of_a_step_in_hand_goes_on_in_it(model: Path, tmp_path: Path) -> None:
    settings = running.config("grpo", model, run={"num_steps": STEPS, "save_every": 1, "keep_checkpoints": 9})
    stopped = stopped_in_update(settings, tmp_path)
    again = forked(str(stopped.path))
    assert running.go_on(stopped) == 0
    assert running.lasting(again) == running.lasting(stopped)


def test_what_cannot_be_forked_leaves_no_folder(first: RunDir, tmp_path: Path) -> None:
    for origin, override, sentence in (
        (
            f"{first.path}@7",
            "run.num_steps=9",
            r"no checkpoint of step 7; those there are: 0, 1, 2, 3 \(run.save_every",
        ),
        (str(first.path), "optim.learning_rate=1", "step 3 is the last of .*run.num_steps=N"),
        (f"{first.path}@1", "optim.rate=1", "optim.rate"),
        (f"{first.path}@1", f"model.path={tmp_path / 'gone'}", "gone"),
        (f"{first.path}@1", "lora.r=3", "lora"),
    ):
        with pytest.raises(ValueError, match=sentence):
            forked(origin, override, output_dir=tmp_path)
        assert not [*tmp_path.iterdir()]
