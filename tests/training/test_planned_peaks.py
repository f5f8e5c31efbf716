"""What a run was planned to take beside what it took: runs of `tinyrl train` in processes of their own."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sizes import SIZES, build, prompt_texts

TO = 0.15  # of the measured peak
GRPO = ["grpo.num_prompts=8", "grpo.group_size=8"]
PPO = ["ppo.num_prompts=32", "ppo.minibatch_size=16", "ppo.num_epochs=1"]
RUN = ["run.num_steps=2", "run.eval_prompts=8", "run.save_every=0", "run.threads=1", "generation.max_new_tokens=96"]
CASES = {
    "grpo with LoRA": ("grpo", "s", GRPO),
    "grpo, every weight": ("grpo", "m", [*GRPO, "lora.enabled=false"]),
    "grpo, a large vocabulary and micro-batch": ("grpo", "v", [*GRPO, "run.micro_batch_tokens=4096"]),
    "ppo with LoRA": ("ppo", "m", PPO),
    "ppo, every weight": ("ppo", "s", [*PPO, "lora.enabled=false"]),
}
IN_CI = ("grpo with LoRA", "ppo, every weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts; a model is built when it is first asked for."""
    return prepared(tmp_path_factory.mktemp("peaks"))


def prepared(made: Path) -> Path:
    """Prompts for all cases in a folder, which is returned."""
    rows = [json.dumps({"prompt": text, "answer": "w5"}) for text in prompt_texts(SIZES["s"], 64)]
    (made / "rows.jsonl").write_text("\n".join(rows))
    return made


def peaks(case: str, folder: Path, *, device: str = "cpu") -> tuple[float, float]:
    """GB planned and measured of a run."""
    method, size, settings = CASES[case]
    if not (folder / size).exists():
        build(replace(SIZES[size], early_ends=False), folder / size)
    where = [f"model.path={folder / size}", f"task.data={folder / 'rows.jsonl'}", "--device", device]
    command = [sys.executable, "-m", "tinyrl", "train", method, *where, *RUN, *settings]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = re.search(r"memory +([\d.]+) (.B) planned \(.*\), ([\d.]+) (.B) measured", done.stdout)
    assert said is not None, done.stdout
    scale = {"GB": 1.0, "MB": 1e-3}
    return float(said[1]) * scale[said[2]], float(said[3]) * scale[said[4]]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in IN_CI else pytest.mark.release) for case in CASES]
)
def test_the_planned_peak_is_the_measured_one(case: str, folder: Path):
    planned, measured = peaks(case, folder)
    assert planned == pytest.approx(measured, rel=TO)
