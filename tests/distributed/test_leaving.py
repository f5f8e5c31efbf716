"""The command under a launcher, and how processes end: killed, signalled, slow, without memory, with other weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests import running
from tests.distributed.ranks import Ranks
from tests.faults.children import PATIENCE_S, ROOT, Child, before_call, workers_left
from tests.tiny_models import tiny_model
from tests.training.test_resume import assert_same
from tinyrl.cli.commands import app
from tinyrl.config.recipe import dump_config
from tinyrl.config.schema import Config
from tinyrl.models.parallel import leave
from tinyrl.process.signals import StopFlag
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.checkpoint import newest_sound
from tinyrl.runs.run_dir import RunDir
from tinyrl.training import run as training_run
from tinyrl.training import step
from tinyrl.training.launch import resume

FOUR = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}
LAST = {"RANK": "3", "LOCAL_RANK": "3"}


def test_what_takes_one_process_is_refused_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tinyrl", "chat", "runs/x"])
    first, other = (CliRunner().invoke(app, ["chat", "runs/x"], env=FOUR | rank) for rank in ({}, LAST))
    assert (first.exit_code, other.exit_code, other.output) == (2, 2, "")
    assert "tinyrl chat runs/x" in first.stderr
    words = ["train", "grpo", "generation.engine=server", "generation.url=http://127.0.0.1:8000"]
    result = CliRunner().invoke(app, words, env=FOUR)
    assert result.exit_code == 2
    assert "generation.engine=server samples for one process" in result.stderr


def launch(*words: str, **options: Any) -> subprocess.Popen[Any]:
    """`accelerate launch` with two processes, which without GPUs connect by gloo."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": str(Path(sys.executable).parent)}
    start = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0", "-m", "tinyrl", *words]
    return subprocess.Popen([sys.executable, "-m", "accelerate.commands.launch", *start], env=environment, **options)


@pytest.mark.slow
def test_a_launched_run_is_stopped_and_evaluated(tmp_path: Path) -> None:
    """SIGTERM to the launcher: the run is saved, no process is left, and two processes evaluate as one does."""
    model = tiny_model(tmp_path / "model", "llama")
    run = {"num_steps": 500, "eval_prompts": 4, "save_every": 0}
    settings = running.config("grpo", model, reward=running.IN_A_WORKER, run=run)
    (tmp_path / "recipe.yaml").write_text(dump_config(settings))
    with (tmp_path / "said.txt").open("w") as said:
        words = ("train", "grpo", "recipe.yaml", "--name", "run", "--device", "cpu")
        going = launch(*words, cwd=tmp_path, stdout=said, stderr=said)
        run, until = RunDir(tmp_path / "runs/run"), time.monotonic() + PATIENCE_S
        while not run.metrics.is_file() or len(running.metrics(run)) < 3:
            assert going.poll() is None, (tmp_path / "said.txt").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        family = psutil.Process(going.pid).children(recursive=True)
        going.send_signal(signal.SIGTERM)
        assert going.wait(PATIENCE_S) != 0
    assert (tmp_path / "said.txt").read_text().count("tinyrl train --resume runs/run") == 1
    assert psutil.wait_procs(family, timeout=20)[1] == []
    assert newest_sound(run.checkpoints)[0] is not None


STEPS = 3
RARE = {"num_steps": STEPS, "save_every": 0, "eval_every": 0, "eval_prompts": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


def settings_for(model: Path, **run: Any) -> Config:
    over = {"ppo": {"num_prompts": 8, "minibatch_size": 4}, "optim": {"learning_rate": 1e-3}}
    run = {**RARE, "micro_batch_tokens": 60, **run}
    return running.config("ppo", model, reward=running.IN_A_WORKER, **over, run=run)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The run of a single process."""
    folder = tmp_path_factory.mktemp("whole")
    child = Child(train_one, settings_for(model), folder, output=folder / "said.txt")
    assert child.end() == 0, child.said
    return RunDir(folder / "run")


def train_one(settings: Config, folder: Path) -> None:
    running.train(settings, folder)


def train(settings: Config, folder: Path, before: Callable[[int], None] = lambda rank: None) -> None:
    """As the command does: train, and leave together. `before` is given the rank."""
    before(int(os.environ["RANK"]))
    with StopFlag():
        code, *_ = running.train(settings, folder)
        leave(code)


def go_on(path: Path) -> None:
    """As `tinyrl train --resume` does."""
    run = RunDir(path, writes=os.environ.get("RANK", "0") == "0")
    with StopFlag():
        launch = resume(run, prepare(run.read_config()), options=running.Options(device="cpu"))
        leave(0 if launch is None else launch.go(report=lambda _: None))


def assert_like(whole: RunDir, run: RunDir) -> None:
    """The weights at the end, to what sums in another order may change."""
    one, two = running.weights(whole, STEPS), running.weights(run, STEPS)
    assert set(one) == set(two)
    for key, tensor in one.items():
        assert float((two[key].double() - tensor.double()).abs().max()) < 1e-4, key
    assert [line["step"] for line in running.metrics(run)] == [*range(STEPS + 1)]


def assert_saved(ranks: Ranks, folder: Path) -> None:
    """Rank 0 alone says that nothing is lost, and its newest checkpoint is sound; no worker is left."""
    assert "stopped; nothing is lost" in ranks[0].said
    assert "stopped" not in ranks[1].said
    sound, warnings = newest_sound(folder / "run/checkpoints")
    assert sound is not None, ranks.said
    assert warnings == []
    assert workers_left({child.pid for child in ranks.all}) == []


# ---- kills and signals ----


def kill_rank_1(rank: int) -> None:
    """kill -9 in the second step, at the backward pass of a micro-batch."""
    if rank == 1:
        before_call(torch.Tensor, "backward", 14, do=lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_loses_nothing(model: Path, whole: RunDir, tmp_path: Path) -> None:
    undisturbed = Ranks(train, settings_for(model), tmp_path / "two", folder=tmp_path)
    ranks = Ranks(train, settings_for(model), tmp_path, kill_rank_1, folder=tmp_path)
    assert ranks.end() == [75, -signal.SIGKILL], ranks.said
    assert_saved(ranks, tmp_path)
    alone = RunDir(shutil.copytree(tmp_path / "run", tmp_path / "alone"))
    again = Ranks(go_on, tmp_path / "run", folder=tmp_path)
    by_itself = Child(go_on, alone.path, output=tmp_path / "alone.txt")
    assert again.end() == [0, 0], again.said
    assert by_itself.end() == 0, by_itself.said
    assert undisturbed.end() == [0, 0], undisturbed.said
    assert_same(RunDir(tmp_path / "two/run"), RunDir(tmp_path / "run"), STEPS)  # to the bit
    assert_like(whole, alone)


# ---- weights that are not the same ----


def change_a_bit(rank: int) -> None:
    """Compare after every step; on rank 1 the last bit of one weight changes in the first one's end."""
    setattr(training_run, "CHECK_EVERY", 1)  # noqa: B010
    plain = training_run.Run.end_step

    def end_step(self: training_run.Run, **metrics: float) -> None:
        if rank == 1 and self.state.step == 1:
            name, parameter = list(self.method.policy.parameters["policy"].items())[3]
            parameter.data.view(torch.int32).view(-1)[5] += 1
            print(f"changed {name}", flush=True)
        plain(self, **metrics)

    training_run.Run.end_step = end_step


@pytest.mark.slow
def test_a_planted_difference_of_one_bit_is_found(model: Path, tmp_path: Path) -> None:
    ranks = Ranks(train, settings_for(model), tmp_path, change_a_bit, folder=tmp_path)
    assert ranks.end() == [3, 3], ranks.said
    (changed,) = [line.removeprefix("changed ") for line in ranks[1].said.splitlines() if line.startswith("changed")]
    assert f"processes 0 and 1 have 1 different checksums of weights: policy {changed}" in ranks[0].said
    assert [line["step"] for line in running.metrics(RunDir(tmp_path / "run"))] == [0, 1, 2]


# ---- dropout ----


def train_with_dropout(settings: Config, folder: Path) -> None:
    """Train; the gradients of each process before they are summed go into gradients-RANK.safetensors."""
    seen, sum_up = dict[str, torch.Tensor](), step.sum_step

    def noting(world: Any, totals: Any, parameters: Any) -> Any:
        seen[str(len(seen) + 1)] = torch.cat([p.grad.flatten().clone() for p in parameters])
        return sum_up(world, totals, parameters)

    step.sum_step = noting
    code, *_ = running.train(settings, folder)
    save_file(seen, folder / f"gradients-{os.environ['RANK']}.safetensors")
    leave(code)


@pytest.mark.slow
def test_each_process_drops_out_by_numbers_of_its_own(model: Path, tmp_path: Path) -> None:
    """All rows are alike, so that without dropout the shares of a step have the same gradient."""
    (rows := tmp_path / "rows.jsonl").write_text((json.dumps({"prompt": "one and", "completion": " more"}) + "\n") * 16)
    sections = {"sft": {"batch_size": 4}, "lora": {"dropout": 0.5}, "optim": {"learning_rate": 1e-2}, "run": RARE}
    task = {"name": "rows", "data": str(rows), "eval_data": str(rows)}
    ranks = Ranks(train_with_dropout, running.config("sft", model, task=task, **sections), tmp_path, folder=tmp_path)
    assert ranks.end() == [0, 0], ranks.said
    ours, theirs = (load_file(tmp_path / f"gradients-{rank}.safetensors") for rank in (0, 1))
    assert len(ours) == STEPS
    for key, gradient in ours.items():
        assert float((gradient - theirs[key]).norm()) > 0.1 * float(gradient.norm())
