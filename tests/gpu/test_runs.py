"""Runs on a device: every method and environment a few steps, a stop, and an exact resume."""

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import running
from tests.faults.lookup_runs import answered_by, lookup, searching
from tests.faults.test_chat_episodes import chat_model, playing
from tests.gpu.devices import ON_A_GPU, all_on_a_gpu
from tests.tiny_models import TinyModels
from tests.training.test_resume import assert_same
from tinyrl.config.schema import Config
from tinyrl.runs.resolve import config_of
from tinyrl.workers.sandbox import why_not_isolated

STOP_S = 5.0
TEXT_RUN = {"num_steps": 2, "eval_every": 1, "save_every": 0, "threads": 1}
ROWS = {
    "sft": {"prompt": "one and one:", "completion": " two"},
    "reward": {"prompt": "one and one:", "chosen": " two", "rejected": " three"},
    "dpo": {"prompt": "one and one:", "chosen": " two", "rejected": " three"},
}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"grpo": {"preset": "grpo"}}),
    "grpo, every weight, recomputed": (
        "grpo",
        {"lora": {"enabled": False}, "model": {"gradient_checkpointing": True}, "optim": {"learning_rate": 1e-3}},
    ),
    "ppo, adapter": ("ppo", {"critic": {"kind": "adapter"}}),
    "ppo, shared": ("ppo", {"critic": {"kind": "shared"}}),
    "ppo, separate": ("ppo", {"critic": {"kind": "separate"}}),
    "grpo, adamw8bit": ("grpo", {"optim": {"optimizer": "adamw8bit"}}),
}
RESPOND = """
    def respond(prompts, transcripts, **columns):
        return [None if len(t) > 3 else "found it ;" for t in transcripts]
"""
TOOLS = '''
    def guess(word: str) -> str:
        """Guess the word.

        Args:
            word: The word.
        """
        return "yes" if word == "red" else "no"

    def length(completions, **columns):
        return [float(len(c[0]["content"])) for c in completions]
'''
ENVIRONMENTS = ("task", "respond", "class", "tools", "search", "python")


def assert_ran(code: int, run: Any, *, steps: int = 2) -> None:
    lines = [line for line in running.metrics(run) if "time/update" in line]
    assert code == 0
    assert len(lines) == steps
    assert all(value == value for line in lines for value in line.values() if isinstance(value, float))


@all_on_a_gpu("form", FORMS)
def test_every_form_of_rl_runs(tiny: TinyModels, device: torch.device, form: str, tmp_path: Path):
    method, sections = FORMS[form]
    if "adamw8bit" in form:
        pytest.importorskip("bitsandbytes")
    settings = running.config(method, tiny("qwen3"), run={"num_steps": 2}, **sections)
    code, run, _ = running.train(settings, tmp_path, device=device.type)
    assert_ran(code, run)
    assert max(line.get("optim/grad_norm", 0.0) for line in running.metrics(run)) > 0


@all_on_a_gpu("method", ROWS)
def test_every_method_on_text_runs(tiny: TinyModels, device: torch.device, method: str, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({**ROWS[method], "prompt": f"{i} and {i}:"}) + "\n" for i in range(24)))
    values = {"method": method, "model": {"path": str(tiny("llama"))}, "task": {"data": str(rows)}, "run": TEXT_RUN}
    code, run, _ = running.train(config_of(values), tmp_path, device=device.type)
    assert_ran(code, run)


def environment(name: str, folder: Path) -> Config:
    """A small run in an environment of a kind: the task's own, a function, tools, a class, search, a sandbox."""
    if name == "respond":
        return answered_by(folder, RESPOND)
    if name == "class":
        return playing(chat_model(folder / "model"), folder)
    if name == "tools":
        (folder / "tools.py").write_text(textwrap.dedent(TOOLS))
        own = playing(chat_model(folder / "model"), folder).model_dump(exclude_unset=True)
        own["environment"] |= {"name": None, "tools": [f"{folder / 'tools.py'}:guess"]}
        return config_of({**own, "reward": {"functions": [{"use": f"{folder / 'tools.py'}:length"}]}})
    return {"task": lookup, "search": lambda: searching(folder, num_steps=2), "python": in_a_sandbox}[name]()


def in_a_sandbox() -> Config:
    """Turns that run code are answered; the lookup model hardly writes any."""
    return lookup(environment={"name": "python"})


@all_on_a_gpu("name", ENVIRONMENTS)
def test_every_environment_is_played(device: torch.device, name: str, tmp_path: Path):
    if name == "python" and why_not_isolated() is not None:
        pytest.skip(f"programs cannot be isolated here: {why_not_isolated()}")
    code, run, _ = running.train(environment(name, tmp_path), tmp_path, device=device.type)
    assert_ran(code, run)
    assert all("environment/turns" in line for line in running.metrics(run) if "time/update" in line)


@all_on_a_gpu("method", ["grpo", "ppo"])
def test_a_deterministic_run_resumes_to_the_bit(tiny: TinyModels, device: torch.device, method: str, tmp_path: Path):
    """Stopped by SIGTERM within its update; on a GPU as far as torch has deterministic kernels."""
    settings = running.config(method, tiny("qwen3"), run={"num_steps": 3, "deterministic": True})
    try:
        code, whole, looks = running.train(settings, tmp_path, name="whole", device=device.type)
        assert code == 0
        code, stopped, _ = running.train(settings, tmp_path, name="stopped", stop_at=looks * 2 // 3, device=device.type)
        assert code == 75
        assert running.go_on(stopped, device=device.type) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(whole, stopped, settings.run.num_steps)


@pytest.mark.parametrize("moment", [0.3, 2.3])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)], indirect=True)
def test_a_signal_ends_the_command_soon_and_it_resumes(device: torch.device, moment: float, tmp_path: Path):
    """SIGTERM some seconds after the first step of `tinyrl train grpo`: within 5 s on a GPU, with 75."""
    where = ["--output-dir", str(tmp_path), "--name", "run", "--device", device.type]
    command = [sys.executable, "-m", "tinyrl", "train"]
    begun = [*command, "grpo", "run.threads=1", "run.num_steps=500", "run.eval_prompts=8", *where]
    with (tmp_path / "said.txt").open("wb") as said:
        process = subprocess.Popen(begun, stdout=said, stderr=said)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and "time/update" in metrics.read_text()):
        assert process.poll() is None, (tmp_path / "said.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(moment)
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(STOP_S)
    finally:
        process.kill()
    assert code == 75
    done = len(metrics.read_text().splitlines())
    longer = [*command, "--resume", str(tmp_path / "run"), f"run.num_steps={done + 1}", "--allow-config-change"]
    again = subprocess.run([*longer, "--device", device.type], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr[-2000:]
