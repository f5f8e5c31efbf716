"""The command under a launcher: refusals, and a real launch of two processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from tests import running
from tests.faults.children import PATIENCE_S, ROOT
from tests.tiny_models import tiny_model
from tinyrl.api import evaluate
from tinyrl.cli.commands import app
from tinyrl.config.recipe import dump_config
from tinyrl.runs.checkpoint import newest_sound
from tinyrl.runs.run_dir import RunDir

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
    assert "generation.engine=server samples for one process, and 4 were launched" in result.stderr


def launch(*words: str, **options: Any) -> subprocess.Popen[Any]:
    """`accelerate launch` with two processes, which without GPUs connect by gloo."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": str(Path(sys.executable).parent)}
    start = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0", "-m", "tinyrl", *words]
    return subprocess.Popen([sys.executable, "-m", "accelerate.commands.launch", *start], env=environment, **options)


@pytest.mark.slow
def test_a_launched_run_is_stopped_and_evaluated(tmp_path: Path) -> None:
    """SIGTERM to the launcher: the run is saved, no process is left, and two processes evaluate as one does."""
    model = tiny_model(tmp_path / "model", "llama")
    settings = running.config("grpo", model, run={"num_steps": 500, "eval_prompts": 4, "save_every": 0})
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
    asked = ("eval", "runs/run", "--vs", "start", "--num-prompts", "7", "--samples", "2", "--json", "--device", "cpu")
    done = launch(*asked, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    (line,) = done.communicate(timeout=PATIENCE_S)[0].splitlines()
    assert done.returncode == 0
    wanted = evaluate(str(run.path), vs="start", num_prompts=7, samples=2, device="cpu")
    assert_alike(json.loads(line), json.loads(json.dumps(wanted)))


def assert_alike(ours: Any, wanted: Any) -> None:
    """Numbers to 1e-5, all else the same."""
    if isinstance(wanted, dict):
        assert set(ours) == set(wanted)
        for key in set(wanted) - {"target"}:
            assert_alike(ours[key], wanted[key])
    elif isinstance(wanted, list):
        for mine, other in zip(ours, wanted, strict=True):
            assert_alike(mine, other)
    else:
        assert ours == (pytest.approx(wanted, rel=1e-5, abs=1e-6) if isinstance(wanted, float) else wanted)
