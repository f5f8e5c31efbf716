"""Runs of two threads beside a process that computes: equal commands, kills and resumes are equal to the bit."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests import running
from tests.tiny_models import sharp_model
from tinyrl.config.schema import Config
from tinyrl.runs.run_dir import RunDir

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STEPS = 2
SAMPLED = {"generation": {"max_new_tokens": 12}}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"grpo": {"num_prompts": 8, "group_size": 4, "kl_coef": 0.05}},
    "ppo": {"critic": {"kind": "adapter", "warmup_steps": 0}, "ppo": {"num_prompts": 16}},
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_model(tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.fixture(scope="module", autouse=True)
def busy() -> Iterator[None]:
    """A process that computes, so that threads arrive in another order every time."""
    threads, other = torch.get_num_threads(), subprocess.Popen(["nice", sys.executable, "-c", "while True: pass"])
    yield
    other.kill()
    other.wait()
    torch.set_num_threads(threads)


def settings(method: str, model: Path, *, lora: bool) -> Config:
    run = {"num_steps": STEPS, "eval_every": 0, "eval_prompts": 8, "save_every": 1, "threads": 2}
    sections: dict[str, Any] = {**CASES[method], "lora": {"enabled": lora}, "run": run}
    return running.config(method, model, **SAMPLED, **sections)


def digest(run: RunDir) -> str:
    weights = running.weights(run, STEPS)
    return hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()[:16]


def digests(config: Config, folder: Path, *, repeats: int) -> set[str]:
    found = set()
    for repeat in range(repeats):
        code, run, _ = running.train(config, folder, name=f"{repeat}")
        assert code == 0
        found.add(digest(run))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("method", "lora"), [("ppo", True), ("grpo", False)])
def test_equal_commands_are_equal(method: str, lora: bool, wide: Path, tmp_path: Path):
    assert len(digests(settings(method, wide, lora=lora), tmp_path, repeats=2)) == 1


@pytest.mark.slow
def test_a_run_that_is_stopped_and_goes_on_is_the_same(wide: Path, tmp_path: Path):
    config = settings("grpo", wide, lora=True)
    (whole,) = digests(config, tmp_path, repeats=1)
    _, _, looks = running.train(config, tmp_path, name="looks")
    for at in (looks // 2,):
        code, run, _ = running.train(config, tmp_path, name=f"stopped{at}", stop_at=at)
        assert code != 0
        assert running.go_on(run) == 0
        assert digest(run) == whole


def test_what_auto_came_to_is_in_the_configuration_and_is_no_change(wide: Path, tmp_path: Path):
    """The number is there for whoever runs config.yaml elsewhere; a resume under `auto` keeps it."""
    config = settings("grpo", wide, lora=True)
    auto = config.model_copy(update={"run": config.run.model_copy(update={"threads": "auto"})})
    code, run, _ = running.train(auto, tmp_path)
    assert code == 0
    written = yaml.safe_load((run.path / "config.yaml").read_text())["run"]["threads"]
    assert written == torch.get_num_threads()
    assert running.go_on(run, config=auto) == 0
    assert yaml.safe_load((run.path / "config.yaml").read_text())["run"]["threads"] == written
