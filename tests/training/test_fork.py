"""Forks go on from a checkpoint as new runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests import running
from tests.tiny_models import tiny_model
from tests.training.test_resuming import contents
from tinyrl.runs.launched import Options
from tinyrl.runs.run_dir import RunDir
from tinyrl.training.launch import fork

STEPS = 3
CPU = Options(device="cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    kept = {"num_steps": STEPS, "save_every": 1, "keep_checkpoints": 9, "eval_every": 2}
    code, run, _ = running.train(
        running.config("grpo", model, run=kept), tmp_path_factory.mktemp("first"), name="first"
    )
    assert code == 0
    return run


def forked(origin: str, *overrides: str, name: str = "second", output_dir: Path | None = None) -> RunDir:
    where = None if output_dir is None else str(output_dir)
    launch = fork(origin, [*overrides], options=CPU, output_dir=where, name=name, command=["test"])
    assert launch.go(report=running.report) == 0
    return launch.folder


def test_an_unchanged_fork_is_the_run_again(first: RunDir, tmp_path: Path) -> None:
    run, before = first, contents(first)
    again = forked(f"{run.path}@1", output_dir=tmp_path)
    assert contents(run) == before
    assert running.lasting(again) == running.lasting(run)
    assert again.samples.read_bytes() == run.samples.read_bytes()
    now, then = running.weights(again, STEPS), running.weights(run, STEPS)
    assert now.keys() == then.keys()
    assert all(torch.equal(now[name], then[name]) for name in then)
    assert again.read_config().run.forked_from == f"{run.path.resolve()}@1"
    assert json.loads((again.path / "env.json").read_text())["command"] == "test"


def test_a_changed_fork_shares_the_beginning_only(first: RunDir, tmp_path: Path) -> None:
    again = forked(f"{first.path}@2", "optim.learning_rate=0.1", "run.num_steps=4", output_dir=tmp_path)
    there, here = running.lasting(first), running.lasting(again)
    assert [line["step"] for line in here] == [0, 1, 2, 3, 4]
    assert here[:3] == there[:3]
    assert here[3]["optim/learning_rate"] == pytest.approx(0.1)
    assert here[3]["reward/mean"] == there[3]["reward/mean"]  # sampled by the same weights
    assert again.read_config().optim.learning_rate == 0.1


def test_what_cannot_be_forked_leaves_no_folder(first: RunDir, tmp_path: Path) -> None:
    for origin, override, sentence in (
        (
            f"{first.path}@7",
            "run.num_steps=9",
            "step 7",
        ),
        (str(first.path), "optim.learning_rate=1", "run.num_steps"),
        (f"{first.path}@1", "optim.rate=1", "optim.rate"),
        (f"{first.path}@1", f"model.path={tmp_path / 'gone'}", "gone"),
        (f"{first.path}@1", "lora.r=3", "lora"),
    ):
        with pytest.raises(ValueError, match=sentence):
            forked(origin, override, output_dir=tmp_path)
        assert not [*tmp_path.iterdir()]
