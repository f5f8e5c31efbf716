"""Reward functions that break in the middle of a run.

The run survives; the rows at fault are dropped, counted and kept for reading, and their prompt is named. Only a
reward that keeps failing stops it.
"""

from __future__ import annotations

import json
import math
import os
import textwrap
from dataclasses import dataclass, field
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


@dataclass
class Fault:
    """What a reward does, when, and the result: rows dropped in each step, the message (None: none)."""

    code: str
    reason: str | None
    when: str = IN_BAD_ROWS
    dropped: list[int] = field(default_factory=lambda: [GROUP, GROUP])
    timeout_s: float = 30.0
    failed: bool = True  # dropped rows failed; otherwise the reward does not apply to them


FAULTS = {
    "raises": Fault("raise KeyError('judge')", "`score` raised KeyError: 'judge' (rewards.py, line 13)"),
    "NaN": Fault("scores[row] = float('nan')", "`score` returned NaN"),
    "None": Fault("scores[row] = None", None, failed=False),
    "hangs": Fault("time.sleep(1000)", "`score` gave no answer within 1 s (rewards.py, line 13)", timeout_s=1.0),
    "segfaults": Fault("os.kill(os.getpid(), signal.SIGSEGV)", "`score` died of SIGSEGV"),
    "raises once": Fault(
        "if not Path(__file__).with_name('raised').exists(): "
        "Path(__file__).with_name('raised').touch(); raise OSError('the network blinked')",
        None,
        IN_SECOND_BATCH,
        [0, 0],
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


def code_of(fault: str, when: str) -> str:
    return textwrap.dedent(REWARD).format(rows=PROMPTS * GROUP, when=when, fault=fault)


def failed_rows(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.failed_rewards.read_text().splitlines()]


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.wide
def test_a_reward_that_breaks_costs_its_rows_and_not_the_run(
    name: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fault = FAULTS[name]
    reward = {"timeout_s": fault.timeout_s}
    code, run, _ = running.train(
        settings_for(model, tmp_path, code_of(fault.code, fault.when), reward=reward), tmp_path
    )
    said = capfd.readouterr().err
    assert code == 0, said
    assert [line["reward/dropped"] for line in running.metrics(run)[1:]] == fault.dropped
    assert all(
        0 <= line["optim/grad_norm"] < 100 and line["optim/skipped_steps"] == 0 for line in running.metrics(run)[1:]
    )
    warned = [line for line in said.splitlines() if "rewards failed and their rows are dropped" in line]
    if fault.reason is None:
        assert warned == []
        assert not run.failed_rewards.exists()
    else:
        steps = [step for step, dropped in enumerate(fault.dropped, 1) if dropped]
        assert len(warned) == len(steps), said
        assert all(fault.reason in line and "Prompt 'say " in line for line in warned), said
        assert fault.when != IN_BAD_ROWS or all(BAD in line for line in warned)
        rows = failed_rows(run)
        assert [row["step"] for row in rows] == [step for step in steps for _ in range(fault.dropped[step - 1])]
        assert all(fault.reason in row["reason"] and isinstance(row["completion"], str) for row in rows)
        assert fault.when != IN_BAD_ROWS or {row["prompt"] for row in rows} == {BAD}
    assert said.count("was tried row by row") == (name in ("raises", "hangs", "segfaults", "raises once"))
    assert workers_left({os.getpid()}) == []


# More than a fifth of the rows fail, in as many batches as the name says


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
