"""LoRA's dropout on two processes: each draws numbers of its own, and a stopped run goes on with the same ones."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import running
from tests.distributed.ranks import Ranks
from tests.tiny_models import tiny_model
from tests.trainers.test_resume import assert_same
from tinyrl.config.schema import Config
from tinyrl.models.parallel import leave
from tinyrl.runs.run_dir import RunDir
from tinyrl.runs.signals import StopFlag
from tinyrl.training import update
from tinyrl.training.launch import resume

pytestmark = pytest.mark.slow
STEPS = 3


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """All rows alike, so that without dropout the shares of a step have the same gradient."""
    folder = tmp_path_factory.mktemp("dropout")
    (folder / "rows.jsonl").write_text((json.dumps({"prompt": "one and", "completion": " more"}) + "\n") * 16)
    return running.config(
        "sft",
        tiny_model(folder / "model", "llama"),
        task={"name": "rows", "data": str(folder / "rows.jsonl"), "eval_data": str(folder / "rows.jsonl")},
        sft={"batch_size": 4},
        lora={"dropout": 0.5},
        optim={"learning_rate": 1e-2},
        run={"num_steps": STEPS, "save_every": 0, "eval_every": 0},
    )


def train(settings: Config, folder: Path, *, stops_in: int = 0) -> None:
    """As the command does, with the gradients of each process, before they are added up, in gradients-RANK.safetensors.
    stops_in: the step whose update is stopped by a signal, after its passes.
    """
    seen, add_up = dict[str, torch.Tensor](), update.sum_step

    def noting(world: Any, totals: Any, parameters: Any) -> Any:
        seen[str(len(seen) + 1)] = torch.cat([p.grad.flatten().clone() for p in parameters])
        if len(seen) == stops_in:
            os.kill(os.getpid(), signal.SIGTERM)
        return add_up(world, totals, parameters)

    update.sum_step = noting
    with StopFlag():
        code, *_ = running.train(settings, folder)
        save_file(seen, folder / f"gradients-{os.environ['RANK']}.safetensors")
        leave(code)


def go_on(path: Path) -> None:
    with StopFlag():
        launch = resume(RunDir(path, writes=os.environ["RANK"] == "0"), options=running.Options(device="cpu"))
        assert launch is not None
        leave(launch.go(report=lambda _: None))


@pytest.fixture(scope="module")
def whole(settings: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    ranks = Ranks(train, settings, folder, folder=folder)
    assert ranks.end() == [0, 0], ranks.said
    return folder


def test_each_process_drops_out_by_numbers_of_its_own(whole: Path) -> None:
    ours, theirs = (load_file(whole / f"gradients-{rank}.safetensors") for rank in (0, 1))
    assert len(ours) == STEPS
    for step, gradient in ours.items():
        assert float((gradient - theirs[step]).norm()) > 0.1 * float(gradient.norm())


def test_a_run_that_is_stopped_and_goes_on_has_the_weights_of_one_that_is_not(
    settings: Config, whole: Path, tmp_path: Path
) -> None:
    stopped = Ranks(partial(train, stops_in=2), settings, tmp_path, folder=tmp_path)
    assert stopped.end() == [75, 75], stopped.said
    assert [line["step"] for line in running.metrics(RunDir(tmp_path / "run"))] == [0, 1]
    again = Ranks(go_on, tmp_path / "run", folder=tmp_path)
    assert again.end() == [0, 0], again.said
    assert_same(RunDir(whole / "run"), RunDir(tmp_path / "run"), STEPS)
