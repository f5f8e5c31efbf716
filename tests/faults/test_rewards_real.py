"""Reward functions that break in the middle of a run.

The run survives; the rows at fault are dropped, counted and kept for reading, and their prompt is named. Only a
reward that keeps failing stops it.
"""

from __future__ import annotations

import json
import math
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests import running
from tests.faults.children import workers_left
from tests.tiny_models import tiny_reward_model
from tinyrl.config.schema import Config
from tinyrl.runs.run_dir import RunDir

PROMPTS, GROUP = 8, 2
BAD = "say bad things:"
REWARD = """
    import ctypes, os, re, signal, sys, time
    from pathlib import Path

    calls = 0  # of training batches, in this process

    def score(prompts, completions, **columns):
        global calls
        calls += len(prompts) == {rows}
        scores = [float(len(set(completion))) for completion in completions]
        for row, prompt in enumerate(prompts):
            if {when}:
                {fault}
        return scores
"""
IN_BAD_ROWS = "'bad' in prompt"
IN_SECOND_BATCH = f"calls == 2 and row == 0 and len(prompts) == {PROMPTS * GROUP}"


# What a reward does, when, and the reason in the warning (None: nothing is dropped)
FAULTS = {
    "raises": ("raise KeyError('judge')", IN_BAD_ROWS, "`score` raised KeyError: 'judge' (rewards.py, line 13)"),
    "hangs": ("time.sleep(1000)", IN_BAD_ROWS, "`score` gave no answer within 1 s (rewards.py, line 13)"),
    "segfaults": ("os.kill(os.getpid(), signal.SIGSEGV)", IN_BAD_ROWS, "`score` died of SIGSEGV"),
    "raises once": (
        "if not Path(__file__).with_name('raised').exists(): "
        "Path(__file__).with_name('raised').touch(); raise OSError('the network blinked')",
        IN_SECOND_BATCH,
        None,
    ),
}


def settings_for(model: Path, folder: Path, code: str, **sections: Any) -> Config:
    """Two steps over eight prompts, all in each step, one of them bad."""
    good = [f"say {a}:" for a in "abcdefg"]
    for name, prompts in (("rows", [*good, BAD]), ("eval", good)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    (folder / "rewards.py").write_text(code)
    task = {"name": "rows", "data": str(folder / "rows.jsonl"), "eval_data": str(folder / "eval.jsonl")}
    reward = {"functions": [{"use": f"{folder / 'rewards.py'}:score"}], **sections.pop("reward", {})}
    few = {"num_steps": 2, "eval_every": 0, "eval_prompts": 4, "save_every": 1, **sections.pop("run", {})}
    grpo = {"num_prompts": PROMPTS, "group_size": GROUP}
    return running.config("grpo", model, task=task, reward=reward, grpo=grpo, run=few, **sections)


def failed_rows(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.failed_rewards.read_text().splitlines()]


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.wide
def test_a_reward_that_breaks_costs_its_rows_and_not_the_run(
    name: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fault, when, reason = FAULTS[name]
    code = textwrap.dedent(REWARD).format(rows=PROMPTS * GROUP, when=when, fault=fault)
    settings = settings_for(model, tmp_path, code, reward={"timeout_s": 4.0 if name == "hangs" else 30.0})
    code, run, _ = running.train(settings, tmp_path)
    said = capfd.readouterr().err
    assert code == 0, said
    assert [line["reward/dropped"] for line in running.metrics(run)[1:]] == [GROUP * (reason is not None)] * 2
    assert all(
        0 <= line["optim/grad_norm"] < 100 and line["optim/skipped_steps"] == 0 for line in running.metrics(run)[1:]
    )
    warned = [line for line in said.splitlines() if "rewards failed and their rows are dropped" in line]
    if reason is None:
        assert warned == []
        assert not run.failed_rewards.exists()
    else:
        assert len(warned) == 2, said
        assert all(reason in line and f"Prompt '{BAD}" in line for line in warned), said
        rows = failed_rows(run)
        assert [row["step"] for row in rows] == [step for step in (1, 2) for _ in range(GROUP)]
        assert all(reason in row["reason"] and row["prompt"] == BAD for row in rows)
    assert "was tried row by row" in said
    assert workers_left({os.getpid()}) == []


def test_a_reward_model_without_numbers_stops_the_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only tokens past the few that loading tries have no numbers."""
    folder = tiny_reward_model(tmp_path / "reward")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][9:] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    reward = {"functions": [], "model": str(folder)}
    code, run, _ = running.train(settings_for(model, tmp_path, "", reward=reward, run={"num_steps": 8}), tmp_path)
    assert code == 3
    assert "(last: 16 of 16). Prompt 'say" in (said := capsys.readouterr().err)
    assert "the reward model gave no number to learn from" in said
    assert len(failed_rows(run)) == 3 * 16
