"""`tinyrl export` and `tinyrl chat` as commands: what they print, and how they end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import running
from tests.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taking")
    base = tiny_model(folder / "base", "llama")
    assert running.train(running.config("grpo", base), folder)[0] == 0
    return folder / "run"


def tinyrl(*words: str, said: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tinyrl", *words]
    done = subprocess.run(command, capture_output=True, text=True, input=said, env=environment, check=False)
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.slow
def test_export_prints_the_folder_and_what_to_type_next(run: Path):
    lines = tinyrl("export", str(run), "--merge", "--dtype", "float32").stdout.splitlines()
    assert lines[0] == f"{run}/export/merged-float32"
    assert lines[1].startswith("float32: log-probabilities differ by at most ")
    assert f"serve      vllm serve {run}/export/merged-float32" in lines
    refused = tinyrl("export", str(run), "--merge", "--dtype", "float32", code=2).stderr
    assert refused == f"tinyrl: {run}/export/merged-float32 exists; choose another --output, or use --overwrite\n"


@pytest.mark.slow
def test_chat_answers_the_lines_that_it_reads(run: Path):
    said = tinyrl("chat", str(run), "--device", "cpu", said="letters: b a sorted:\n/compare\n/reward\n").stdout
    assert said.startswith("run/step-000003 (no chat template: each line is a prompt of its own)")
    assert "initial model: " in said
    assert "policy: reward " in said


def test_a_mistyped_run_is_named(run: Path):
    said = tinyrl("chat", str(run.parent / "runn"), code=2).stderr
    assert f"Did you mean `{run}`?" in said
    assert "settings of task, generation" in tinyrl("chat", str(run), "optim.learning_rate=1", code=2).stderr
