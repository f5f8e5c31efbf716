"""Runs of two threads beside a process that computes: equal commands, kills and resumes are equal to the bit."""

import hashlib
import json
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
    "rloo": {"method": "grpo", "grpo": {"preset": "rloo", "num_prompts": 8, "group_size": 4}},
    "reinforce++": {"method": "grpo", "grpo": {"preset": "reinforce++", "num_prompts": 8, "group_size": 4}},
    **{
        f"ppo, {kind}": {"method": "ppo", "critic": {"kind": kind, "warmup": 0}, "ppo": {"num_prompts": 16}}
        for kind in ("adapter", "shared", "shared-detached", "separate")
    },
    "sft": {"sft": {"batch_size": 16}},
    "dpo": {"dpo": {"batch_size": 8}},
    "reward": {"reward_model": {"batch_size": 8}},
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


def settings(name: str, model: Path, folder: Path, *, lora: bool) -> Config:
    case = dict(CASES[name])
    method = case.pop("method", name)
    run = {"num_steps": STEPS, "eval_every": 0, "eval_prompts": 8, "save_every": 1, "threads": 2}
    sections: dict[str, Any] = {**case, "lora": {"enabled": lora}, "run": run}
    if method in ("sft", "dpo", "reward"):
        texts = [f"{n} and {n + 1}" * (1 + n % 5) for n in range(64)]
        rows = [{"prompt": f"{n}:", "completion": t, "chosen": t, "rejected": t[::-1]} for n, t in enumerate(texts)]
        data = folder / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = {"method": method, "model": {"path": str(model)}, "task": {"data": str(data)}, **sections}
        return Config.model_validate(values)
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


OFTEN = ("grpo", "ppo, adapter")  # of which a slow test says so, the others before a release


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        *(pytest.param(n, True, marks=pytest.mark.slow if n in OFTEN else pytest.mark.release) for n in CASES),
        pytest.param("grpo", False, marks=pytest.mark.slow),
    ],
)
def test_equal_commands_are_equal(name: str, lora: bool, wide: Path, tmp_path: Path):
    assert len(digests(settings(name, wide, tmp_path, lora=lora), tmp_path, repeats=2)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo"])
def test_a_run_that_is_stopped_and_goes_on_is_the_same(name: str, wide: Path, tmp_path: Path):
    config = settings(name, wide, tmp_path, lora=True)
    (whole,) = digests(config, tmp_path, repeats=1)
    _, _, looks = running.train(config, tmp_path, name="looks")
    for at in (looks // 3, 2 * looks // 3):
        code, run, _ = running.train(config, tmp_path, name=f"stopped{at}", stop_at=at)
        assert code != 0
        assert running.go_on(run) == 0
        assert digest(run) == whole


def test_what_auto_came_to_is_in_the_configuration_and_is_no_change(wide: Path, tmp_path: Path):
    """The number is there for whoever runs config.yaml elsewhere; a resume under `auto` keeps it."""
    config = settings("grpo", wide, tmp_path, lora=True)
    auto = config.model_copy(update={"run": config.run.model_copy(update={"threads": "auto"})})
    code, run, _ = running.train(auto, tmp_path, stop_at=6)
    assert code != 0
    written = yaml.safe_load((run.path / "config.yaml").read_text())["run"]["threads"]
    assert written == torch.get_num_threads()
    assert running.go_on(run, config=auto) == 0
    assert yaml.safe_load((run.path / "config.yaml").read_text())["run"]["threads"] == written
